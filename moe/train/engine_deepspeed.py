"""The DeepSpeed engine (end of a step): ZeRO 0 to 3 around our model, our experts and our schedule.

The only file that imports deepspeed, and the only one that leans on its private names. Written and tested against
0.19.8; each such place says what would make it unnecessary, and tests/train/test_deepspeed_contract.py says at once
when a name has moved.

Who reduces, clips and updates:

    stage, dtype   gradients accumulate in           reduce, partition        clip        update
    0 fp32         .grad                             DeepSpeed, all-reduce    here        MasterAdamW
    0 bf16         fp32 masters' .grad (here)        DeepSpeed, all-reduce    here        MasterAdamW
    1 fp32         .grad                             DeepSpeed, partitioned   DeepSpeed   AdamW on flat fp32 partitions
    1 bf16         fp32 buffer (BF16_Optimizer)      DeepSpeed, all-reduce    DeepSpeed   AdamW on flat fp32 partitions
    2 fp32, bf16   fp32 partition, every micro-step  DeepSpeed, partitioned   DeepSpeed   AdamW on flat fp32 partitions
    3 fp32, bf16   fp32 partition, every micro-step  DeepSpeed, partitioned   DeepSpeed   AdamW on flat fp32 partitions

At stage 3 the weights are partitioned too: each is gathered while its module runs.
"""

import contextlib
import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject import auto_ep_layer
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from backends.device import Backend
from moe.errors import EnvironmentProblem
from moe.model.batch import TokenBatch
from moe.model.outputs import ModelOutput
from moe.model.transformer import Transformer
from moe.train.config import EngineConfig, Offload, OffloadAdam, OptimConfig
from moe.train.engine import ParameterState, StepOutcome
from moe.train.mesh import Mesh
from moe.train.optim import (
    EXPERT_DECAY,
    EXPERTS,
    MasterAdamW,
    agreed_norm,
    allocate_state,
    cast_parameters,
    check_states,
    clip_coefficient,
    global_grad_norm,
    is_expert,
    parameter_groups,
)
from moe.train.zero import offload, stage3
from moe.train.zero.host import elements_of_ranks, local_rank_set
from moe.train.zero.norm_gate import NormGate
from moe.train.zero.settings import deepspeed_settings
from moe.train.zero.stage0 import StageZeroAdamW


class DeepSpeedEngine:
    """Implements `moe.train.engine.Engine` with a DeepSpeed engine inside.

    Sums: the config asks for `gradient_allreduce_op: sum` and backward runs with `scale_wrt_gas=False`, so DeepSpeed
    divides by nothing, neither ranks nor micro-batches, and an expert's gradient is summed over its copies. What it
    holds is the gradient of the sum that the Protocol speaks of. Stage 3 knows averages alone: there the loss is
    multiplied by the number of ranks, and no factor is put in or taken out anywhere else.
    """

    module: Transformer

    def __init__(
        self,
        module: Transformer,
        *,
        mesh: Mesh,
        backend: Backend,
        optim: OptimConfig,
        engine: EngineConfig,
        accumulation: int,
    ) -> None:
        """Build (collective). module: parallelised and initialised, on mesh.device; cast to engine.dtype here.

        Raises ValueError for another ZeRO stage than 0 to 3, or when DeepSpeed is bound to another kind of device.
        """
        if engine.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"engine.zero_stage ({engine.zero_stage}) must be 0, 1, 2 or 3; choose one of these")
        cast_parameters(module, engine.dtype)
        self.module = module
        self._mesh = mesh
        self._stage = engine.zero_stage
        self._offloaded = engine.offload_optimizer is not Offload.none
        self._clip_norm = optim.clip_norm
        self._accumulation = accumulation
        self._micro_batches = 0
        # Stage 3 of 0.19.8 knows averages alone, and refuses gradient_allreduce_op=sum. Dense and expert gradients alike
        # are divided by the number of all ranks, so one factor on the loss makes sums of both. Condition: it takes sum.
        self._averaged_ranks = mesh.world_size if engine.zero_stage == 3 else 1
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._own_attributes = {p: set(vars(p)) for p in [*module.parameters(), *module.modules()]}
        self._own_tables = {part: part._parameters for part in module.modules()}
        self._marked: list[tuple[nn.Module, type[nn.Module]]] = []
        # With one expert-parallel rank every rank holds all experts: replicas like any dense weight, and no marker.
        self._experts_differ = mesh.expert_size > 1 and any(is_expert(name) for name in self._parameters)

        _prepare_deepspeed(mesh, backend)
        if self._stage == 3:
            _ignore_known_warnings()
        groups = parameter_groups(module, optim)
        if self._experts_differ:
            group_name = _install_expert_groups(mesh)
            self._marked = _mark_layers(module, mesh, group_name, stage=self._stage)
            for group in groups:
                if group["name"] == EXPERT_DECAY:
                    # DeepSpeed looks the reduction group up by the name of the parameter group.
                    group.update(name=group_name, moe=True)
        self._optimizer = _adam(groups, engine)
        most_elements, equal_ranks = elements_of_ranks(self._parameters.values(), mesh)
        with _known_warnings(), local_rank_set(mesh):
            self._engine, _, _, _ = deepspeed.initialize(
                model=module,
                optimizer=self._optimizer,
                config=deepspeed_settings(
                    optim,
                    engine,
                    accumulation,
                    num_elements=most_elements,
                    equal_ranks=equal_ranks,
                    pin_memory=mesh.device.type != "cpu",
                    hidden_size=module.model_config.hidden_size if engine.ds_config is not None else 0,
                ),
                dist_init_required=False,
            )
        # A parameter that gets a gradient on one rank and none on another makes ZeRO mix up its buckets without a word.
        self._without_gradient: set[str] = set()
        self._hooks: list[Any] = []
        if self._stage > 0:
            self._norm_gate = NormGate(self._engine.optimizer, mesh)
            if self._stage == 3:
                stage3.allocate_pieces(self._engine.optimizer)
            else:
                allocate_state(self._optimizer)
                # Private, condition: a public way to read moments before the first step. DeepSpeed links parameters to
                # moments after the first step of the *first* group, when the others' moments do not exist yet.
                self._engine.optimizer._lazy_init_hp_params_optimizer_state()
            self._set_steps(0)
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_seen(name))
                self._hooks.append(hook)

    def _gradient_seen(self, name: str) -> Any:
        def hook(_: Tensor) -> None:
            self._without_gradient.discard(name)

        return hook

    def forward(self, batch: TokenBatch) -> ModelOutput:
        """See `Engine.forward`."""
        self.module.train()
        output: ModelOutput = self._engine(batch)
        return output

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`.

        Raises RuntimeError under ZeRO 1 to 3 when a parameter took no part in the micro-batch on this rank.
        """
        assert self._micro_batches < self._accumulation, "step() is due"
        self._micro_batches += 1
        # DeepSpeed counts micro-batches in its own step(); we call that once, so we say where the step ends.
        self._engine.set_gradient_accumulation_boundary(self._micro_batches == self._accumulation)
        self._without_gradient = set(self._parameters)
        with _known_warnings():
            self._engine.backward(loss * self._averaged_ranks, scale_wrt_gas=False)
        if self._stage == 0:
            assert isinstance(self._optimizer, StageZeroAdamW)
            if self._micro_batches < self._accumulation:
                self._optimizer.accumulate()
        elif self._without_gradient:
            raise RuntimeError(
                f"no gradient reached {sorted(self._without_gradient)} on rank {self._mesh.rank}; under ZeRO every "
                "parameter must take part in every micro-batch (with a gradient of zeros if it must be), "
                "use engine.zero_stage=0 or engine.kind=torch for a model where one does not"
            )

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gradients`."""
        assert self._micro_batches == self._accumulation, "gradients are complete after the last micro-batch only"
        for name, parameter in self._parameters.items():
            if self._stage == 0:
                gradient = self._masters.masters[parameter].grad
            else:
                gradient = safe_get_full_grad(parameter)
            assert gradient is not None
            yield name, gradient

    @property
    def _masters(self) -> MasterAdamW:
        """The optimizer of stage 0."""
        assert isinstance(self._optimizer, MasterAdamW)
        return self._optimizer

    def step(self, lr: float, *, norm_limit: float = math.inf) -> StepOutcome:
        """See `Engine.step`."""
        assert self._micro_batches == self._accumulation, "step() comes after the last micro-batch"
        self._micro_batches = 0
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            return self._step_stage_zero(norm_limit)
        with _known_warnings(), self._norm_gate.closed_above(norm_limit) as gate:
            self._engine.step()
        applied = bool(self._engine.was_step_applied())
        if self._offloaded and not applied:
            offload.forget_bad_gradients(self._engine.optimizer)
        norm = self._engine.get_global_grad_norm() if gate.norm is None or applied else gate.norm
        return StepOutcome(grad_norm=float(norm), applied=applied)

    def _step_stage_zero(self, norm_limit: float) -> StepOutcome:
        """Clip here: without ZeRO, DeepSpeed averages the ranks' norms although ranks hold different experts."""
        masters = self._masters
        gradients = {name: masters.masters[parameter].grad for name, parameter in self._parameters.items()}
        norm = float(
            global_grad_norm(
                [g for name, g in gradients.items() if g is not None and not is_expert(name)],
                [g for name, g in gradients.items() if g is not None and is_expert(name)],
                self._mesh.expert_group,
            )
        )
        norm = agreed_norm(norm, norm_limit, self._mesh)
        applied = math.isfinite(norm) and norm <= norm_limit
        if applied:
            masters.scale_gradients(clip_coefficient(norm, self._clip_norm))
            with _known_warnings():
                self._engine.step()
        masters.clear()
        return StepOutcome(grad_norm=norm, applied=applied)

    def parameter_states(self) -> Iterator[tuple[str, ParameterState]]:
        """See `Engine.parameter_states`."""
        # Every rank has a flat partition in every group, so any of them knows the number of steps.
        step = int(next(iter(self._optimizer.state.values()))["step"])
        for name, parameter in self._parameters.items():
            if self._stage == 0:
                yield name, self._masters.parameter_state(parameter)
            else:
                yield (
                    name,
                    ParameterState(
                        weight=safe_get_full_fp32_param(parameter),
                        exp_avg=safe_get_full_optimizer_state(parameter, "exp_avg"),
                        exp_avg_sq=safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
                        step=step,
                    ),
                )

    @torch.no_grad()
    def load_parameter_states(self, states: Mapping[str, ParameterState]) -> None:
        """See `Engine.load_parameter_states`."""
        check_states(self._parameters, states)
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                self._masters.load_parameter_state(parameter, states[name])
            self._masters.write_back()
            return
        for name, parameter in self._parameters.items():
            saved = states[name]
            for field in ("weight", "exp_avg", "exp_avg_sq"):
                self._write_field(parameter, field, getattr(saved, field).to(parameter.device, torch.float32))
        steps = {saved.step for saved in states.values()}
        if len(steps) > 1:
            raise ValueError(
                f"saved state holds parameters of different steps {sorted(steps)}, but ZeRO keeps one count per group; "
                "load a state that was saved as a whole"
            )
        self._set_steps(next(iter(steps)))
        with _known_warnings():
            if self._stage == 3:
                stage3.write_masters_back(self._engine.optimizer)
            else:
                self._engine.optimizer.update_lp_params()

    def _set_steps(self, step: int) -> None:
        """Set the count that each of the optimizer's states keeps: torch's AdamW a tensor, DeepSpeed's CPU Adam an int."""
        for state in self._optimizer.state.values():
            state["step"] = step if isinstance(self._optimizer, DeepSpeedCPUAdam) else torch.tensor(float(step))

    def _write_field(self, parameter: nn.Parameter, field: str, whole: Tensor) -> None:
        """Put a master weight or moment into the partitions of ZeRO 1 to 3."""
        if self._stage == 3:
            # By pieces: of a tensor that does not divide evenly, `safe_set_full_*` asks for elements behind its end.
            whole = stage3.own_piece(whole, parameter)
        set_weight, set_state = (
            (safe_set_local_fp32_param, safe_set_local_optimizer_state)
            if self._stage == 3
            else (safe_set_full_fp32_param, safe_set_full_optimizer_state)
        )
        if field == "weight":
            set_weight(parameter, whole)
        else:
            set_state(parameter, whole, field)

    def close(self) -> None:
        """See `Engine.close`."""
        for hook in self._hooks:
            hook.remove()
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        with _known_warnings():
            self._engine.destroy()
        for layer, own_class in self._marked:
            layer.__class__ = own_class
        if self._stage == 3:
            for part, table in self._own_tables.items():
                part._parameters = table
            # Private, condition: `destroy` takes it out. A list of the process that holds every module ever run.
            parameter_offload.FWD_MODULE_STACK[:] = [
                m for m in parameter_offload.FWD_MODULE_STACK if m is not self.module
            ]
        # ZeRO hangs bound methods and fragments on parameters and modules: cycles that would keep flat buffers alive.
        for owner, own in self._own_attributes.items():
            for attribute in set(vars(owner)) - own:
                delattr(owner, attribute)
        for parameter in self.module.parameters():
            parameter.grad = None
        if self._experts_differ:
            _remove_expert_groups(self._mesh)
        del self._engine, self._optimizer


def _adam(groups: list[dict[str, Any]], engine: EngineConfig) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed drives.

    Raises EnvironmentProblem when engine.offload_adam=deepspeed and its op cannot be built.
    """
    if engine.zero_stage == 0:
        return StageZeroAdamW(groups)
    if engine.offload_optimizer is Offload.none or engine.offload_adam is OffloadAdam.torch:
        return torch.optim.AdamW(groups)
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True)
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"engine.offload_adam=deepspeed: {error} ({error.__cause__}); install a C++ compiler and ninja, or set "
            "engine.offload_adam=torch"
        ) from error


def _prepare_deepspeed(mesh: Mesh, backend: Backend) -> None:
    """Bring DeepSpeed's process-wide state into line with ours; safe to repeat."""
    accelerator = get_accelerator().device_name()
    if accelerator != backend.deepspeed_accelerator:
        raise ValueError(
            f"deepspeed was imported for device '{accelerator}', but backend.device needs "
            f"'{backend.deepspeed_accelerator}'; set DS_ACCELERATOR={backend.deepspeed_accelerator} before the start"
        )
    deepspeed_logger.setLevel(logging.ERROR)
    # Private, condition: BF16_Optimizer reports memory only when asked to. It forces prints and garbage collections.
    bf16_optimizer.see_memory_usage = _no_memory_report
    if accelerator == "cpu":
        # Private, condition: the shared-memory op is built on demand. On CPU it is compiled when communication starts
        # (a minute, and an error without compiler), and serves inference alone. By name, since the attribute
        # `deepspeed.comm.torch` is PyTorch itself.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = _no_shared_memory_op
    if accelerator == "npu":
        # Stage 3 of 0.19.8 adds up norms in fp64 wherever the accelerator has it, and NPUs inherit "yes", although their
        # reductions (A2, A3) take no fp64. Condition: DeepSpeed's NPU accelerator answers for itself.
        vars(get_accelerator())["is_fp64_supported"] = _no_fp64
    with _known_warnings():
        deepspeed.init_distributed(
            dist_backend=backend.collective, auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )
    # Private, condition: deepspeed.initialize takes process groups. It clones the world once per process and would keep
    # the clone of a job that has been torn down.
    deepspeed_groups._WORLD_GROUP = mesh.world_group


def _no_shared_memory_op() -> None:
    """Stand in for build_shm_op: no op."""


def _no_fp64() -> bool:
    """Stand in for is_fp64_supported of an NPU."""
    return False


def _no_memory_report(message: str, force: bool = False) -> None:
    """Stand in for see_memory_usage."""


def _group_name(mesh: Mesh) -> str:
    return f"ep_size_{mesh.expert_size}"


def _group_tables() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """DeepSpeed's tables of expert groups. Private, condition: deepspeed.initialize takes process groups."""
    return (
        deepspeed_groups._EXPERT_PARALLEL_GROUP,
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )


def _install_expert_groups(mesh: Mesh) -> str:
    """Make DeepSpeed use the mesh's own groups, so that layouts cannot disagree; returns their name."""
    name = _group_name(mesh)
    entries = (
        mesh.expert_group,
        dist.get_process_group_ranks(mesh.expert_group),
        mesh.expert_data_group,
        dist.get_process_group_ranks(mesh.expert_data_group),
    )
    for table, entry in zip(_group_tables(), entries, strict=True):
        # Entries of an engine that was never closed belong to another layout.
        table.clear()
        table[name] = entry
    return name


def _remove_expert_groups(mesh: Mesh) -> None:
    for table in _group_tables():
        table.pop(_group_name(mesh), None)


def _keep_own_groups(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """set_deepspeed_parallelism of a marked layer: its groups are the mesh's and stand already."""


def _mark_layers(
    module: nn.Module, mesh: Mesh, group_name: str, *, stage: int
) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Make DeepSpeed see our MoE layers as its AutoEP layers, without touching what they do or how they are named.

    DeepSpeed knows layers with experts by class alone. Each layer gets a class made from its own and AutoEPMoELayer:
    ours comes first, so every method stays ours, and AutoEPMoELayer's constructor never runs. Only `num_experts` is
    read from such a layer at stages 0 to 2. Returns (layer, its own class).
    Private, condition: DeepSpeed goes by the parameters' `allreduce` and `group_name` attributes alone.
    """
    marked = []
    for name, experts in list(module.named_modules()):
        if name.split(".")[-1] != EXPERTS:
            continue
        layer = module.get_submodule(name.rpartition(".")[0])
        own_class = type(layer)
        namespace = {
            "__module__": own_class.__module__,
            "set_deepspeed_parallelism": _keep_own_groups,
            "num_experts": next(experts.parameters()).shape[0] * mesh.expert_size,
        }
        layer.__class__ = type(own_class.__name__, (own_class, auto_ep_layer.AutoEPMoELayer), namespace)
        for parameter in experts.parameters():
            vars(parameter).update(allreduce=False, group_name=group_name)
            if stage == 3:
                vars(parameter).update(stage3.expert_placement(group_name))
        marked.append((layer, own_class))
    return marked


@contextlib.contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence what DeepSpeed is known to warn about, and nothing else."""
    with warnings.catch_warnings():
        _ignore_known_warnings()
        yield


def _ignore_known_warnings() -> None:
    """Add filters to those in force; at stage 3, where modules communicate whenever they run, to those of the process."""
    # On its first engine DeepSpeed imports its Muon optimizer, whose decorator loads torch's compiler, which still uses
    # TorchScript (torch 2.13). Condition: a torch without it, or a DeepSpeed that imports Muon when asked for.
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    # Renamed in torch 2.13. Condition: a DeepSpeed that calls the new names.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated", category=FutureWarning)
