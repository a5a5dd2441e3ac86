"""Learning rate, parameter groups, gradient norm, AdamW over fp32 masters: what both engines share (end of a step).

Nothing here talks to DeepSpeed. A gradient that a backward pass did not produce is a zero, never an absence, so an
expert without tokens decays like any other weight: "idle" is no property that could be read alike in every layout.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.train.config import DType, OptimConfig, ScheduleKind
from moe.train.engine import ParameterState
from moe.train.mesh import Mesh

EXPERTS = "experts"
"""Name of the submodule whose parameters differ from rank to rank, as in `layers.3.moe.experts.w1`."""
DENSE_DECAY, DENSE_NO_DECAY, EXPERT_DECAY = "dense", "dense_no_decay", "experts"
"""Names of the parameter groups."""
CLIP_EPSILON = 1e-6
"""Added to the norm before division, so that a zero gradient clips to zero. The same in DeepSpeed."""


def learning_rate(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, a pure function: nothing to save, nothing to restore.

    step: from 1. Linear warm-up lr · step / warmup_steps, then constant, or a cosine that ends at lr · min_lr_ratio at
    step max_steps and stays there.
    """
    assert step >= 1
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule is ScheduleKind.constant:
        return optim.lr
    progress = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)


def is_expert(name: str) -> bool:
    """Whether the parameter of this global name is held by one expert-parallel rank and not by its neighbours."""
    return EXPERTS in name.split(".")[:-1]


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Split trainable parameters into groups for torch.optim, in the order of `named_parameters`.

    Keys of a group: name, params, lr, betas, eps, weight_decay. Dense tensors of two or more dimensions and expert
    stacks ([e, ., .]) decay; norms and other vectors do not. Empty groups are left out.
    """
    members: dict[str, list[nn.Parameter]] = {DENSE_DECAY: [], DENSE_NO_DECAY: [], EXPERT_DECAY: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kind = EXPERT_DECAY if is_expert(name) else DENSE_DECAY if parameter.ndim >= 2 else DENSE_NO_DECAY
            members[kind].append(parameter)
    return [
        {
            "name": name,
            "params": parameters,
            "lr": optim.lr,
            "betas": (optim.beta1, optim.beta2),
            "eps": optim.eps,
            "weight_decay": 0.0 if name == DENSE_NO_DECAY else optim.weight_decay,
        }
        for name, parameters in members.items()
        if parameters
    ]


def global_grad_norm(
    dense: Iterable[Tensor], expert: Iterable[Tensor], expert_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the L2 norm over the whole model as an fp32 scalar: dense tensors once, each expert once.

    dense: gradients that are equal on all ranks. expert: this rank's experts. expert_group: the ranks that together
    hold every expert once; None for one such rank. Collective over expert_group. Not finite when any gradient is not.
    """
    dense_norms = [_norm(gradient) for gradient in dense]
    expert_norms = [_norm(gradient) for gradient in expert]
    device = next((norm.device for norm in dense_norms + expert_norms), None)
    zero = torch.zeros((), dtype=torch.float32, device=device)
    square = torch.stack(expert_norms).square().sum() if expert_norms else zero.clone()
    if expert_group is not None and dist.get_world_size(expert_group) > 1:
        dist.all_reduce(square, group=expert_group)
    if dense_norms:
        square = square + torch.stack(dense_norms).square().sum()
    return square.sqrt()


def _norm(gradient: Tensor) -> Tensor:
    # A CPU adds up a long vector almost one by one: in fp32 the norm of 10^5 elements was seen 4e-6 off. Accelerators
    # reduce in trees, and not all of them have fp64.
    accumulate = torch.float64 if gradient.device.type == "cpu" else torch.float32
    return torch.linalg.vector_norm(gradient, dtype=accumulate).float()


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """Return the factor in (0, 1] that brings a gradient of this global norm to clip_norm; clip_norm 0 = never clip."""
    return min(1.0, clip_norm / (norm + CLIP_EPSILON)) if clip_norm > 0.0 else 1.0


def agreed_norm(norm: float, limit: float, mesh: Mesh) -> float:
    """The norm that all ranks hold against a limit: the largest any of them computed (collective if the limit is finite).

    Sums in another order may differ in the last bit from rank to rank, and a decision must not.
    """
    if limit == math.inf:
        return norm
    largest = torch.tensor(norm if math.isfinite(norm) else math.inf, dtype=torch.float64, device="cpu")
    if mesh.device.type != "cpu":
        largest = largest.float().to(mesh.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.world_group)
    return float(largest)


def cast_parameters(module: nn.Module, dtype: DType) -> None:
    """Bring the parameters to the type a forward pass uses. Buffers keep theirs: the expert bias must stay fp32."""
    target = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}[dtype]
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != target:
            parameter.data = parameter.data.to(target)


class MasterAdamW(torch.optim.AdamW):
    """AdamW over fp32 masters, with fp32 gradient accumulation.

    An fp32 parameter is its own master and accumulates in `.grad`. For a bf16 parameter `accumulate` moves `.grad` into
    the fp32 gradient of a separate master after each micro-batch, and `step` writes the rounded master back.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """groups: as from `parameter_groups`. Masters begin at the parameters' present values, moments at zero."""
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter -> its master; the same object for fp32."""
        master_groups = []
        for group in groups:
            for parameter in group["params"]:
                master = parameter
                if parameter.dtype != torch.float32:
                    master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                self.masters[parameter] = master
            master_groups.append({**group, "params": [self.masters[parameter] for parameter in group["params"]]})
        super().__init__(master_groups)
        allocate_state(self)

    def accumulate(self) -> None:
        """Add each parameter's gradient to its master's, fp32. A gradient that is missing is a zero."""
        for parameter, master in self.masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if master is not parameter and parameter.grad is not None:
                master.grad.add_(parameter.grad)
                parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        """Multiply all master gradients in place."""
        if factor != 1.0:
            torch._foreach_mul_([master.grad for master in self.masters.values() if master.grad is not None], factor)

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters and write them back to the parameters."""
        super().step(closure)
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into their parameters."""
        for parameter, master in self.masters.items():
            if master is not parameter:
                parameter.copy_(master)

    def parameter_state(self, parameter: nn.Parameter) -> ParameterState:
        """Return views of the master and moments of one parameter."""
        master = self.masters[parameter]
        state = self.state[master]
        return ParameterState(
            weight=master.detach(),
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            step=int(state["step"]),
        )

    @torch.no_grad()
    def load_parameter_state(self, parameter: nn.Parameter, saved: ParameterState) -> None:
        """Copy a saved state in place; call `write_back` after the last one."""
        master = self.masters[parameter]
        state = self.state[master]
        master.copy_(saved.weight)
        state["exp_avg"].copy_(saved.exp_avg)
        state["exp_avg_sq"].copy_(saved.exp_avg_sq)
        state["step"].fill_(float(saved.step))


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter of an AdamW its zero moments and step 0 now, as its first step would.

    So that state can be read before the first step, and a load has something to write into (a load into an optimizer
    that holds nothing restores nothing, silently).
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
                }


def check_states(parameters: Mapping[str, nn.Parameter], states: Mapping[str, ParameterState]) -> None:
    """Refuse saved states that are not exactly those of these parameters.

    Raises ValueError that names missing and unknown parameters, or the first one of another shape.
    """
    missing, unknown = sorted(parameters.keys() - states.keys()), sorted(states.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"saved state does not fit the model: missing {missing or 'none'}, unknown {unknown or 'none'}; "
            "load it with the model configuration and expert-parallel size it was saved with"
        )
    for name, parameter in parameters.items():
        saved = states[name]
        for field, tensor in (
            ("weight", saved.weight),
            ("exp_avg", saved.exp_avg),
            ("exp_avg_sq", saved.exp_avg_sq),
        ):
            # ZeRO-3 keeps a parameter's whole shape beside the empty parameter.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if tensor.shape != shape:
                raise ValueError(
                    f"{field} of {name} has shape {list(tensor.shape)}, but the model's is {list(shape)}; "
                    "load it with the model configuration and expert-parallel size it was saved with"
                )
