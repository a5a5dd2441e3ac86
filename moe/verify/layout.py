"""Layout against one process: the same recipe, weights and batches on any layout must give the same mathematics.

`record_trace` runs a few steps and writes down everything that must not depend on the layout, assembled to global
tensors; `compare_traces` says where two of them first depart. Steps, engines and data slicing are those of the trainer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from backends.device import Backend
from dispatch.config import DispatchMode
from moe.data.loader import sample_index_for
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import BalanceScope, balance_terms
from moe.model.layer import MoELayer
from moe.model.transformer import Transformer
from moe.schema import RunConfig
from moe.train.build import build_engine
from moe.train.config import Checkpointing, EngineKind
from moe.train.engine import Engine
from moe.train.mesh import Mesh, build_mesh
from moe.train.optim import learning_rate
from moe.train.parallelize import build_model, weight_dtype
from moe.train.step import count_step, expert_biases, run_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one step must give on every layout."""

    lm_loss: float
    balance_loss: float | None
    z_loss: float | None
    grad_norm: float
    tokens_per_expert_LE: Tensor
    """int64."""
    dropped_per_expert_LE: Tensor
    """int64."""
    expert_bias_LE: Tensor
    """fp32, after the step."""
    gradients: dict[str, Tensor]
    """Global name -> fp32 gradient before clipping; expert stacks hold all experts. Empty if not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A few steps, and the fp32 master weights after them."""

    layout: str
    steps: list[StepTrace]
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One quantity in two traces."""

    what: str
    """Such as `step 1: gradient of layers.1.moe.experts.w1`."""
    error: float
    """max |a - b| / max |b|, b the reference; 0 or inf for quantities that must be equal to the last bit."""
    tolerance: float
    where: str
    """Place and both values of the largest departure."""

    @property
    def bad(self) -> bool:
        """Beyond tolerance (NaN is)."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.what}: relative error {self.error:.2e} (tolerance {self.tolerance:.0e}); {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All quantities of two traces, in the order in which a step makes them."""

    reference: str
    candidate: str
    differences: list[Difference]

    @property
    def first(self) -> Difference | None:
        """The first quantity that departs: the place to look, since what follows inherits it."""
        return next((difference for difference in self.differences if difference.bad), None)

    @property
    def worst(self) -> Difference:
        """The largest error in units of its tolerance (exact quantities come first when they differ)."""
        return max(self.differences, key=lambda d: d.error / d.tolerance if d.tolerance else d.error)

    def report(self, count: int = 10) -> str:
        """A few lines for a person: the first departure, then the worst."""
        lines = [f"{self.candidate} against {self.reference}: "]
        first = self.first
        if first is None:
            lines[0] += f"equal; worst is {self.worst}"
            return lines[0]
        bad = [difference for difference in self.differences if difference.bad]
        lines[0] += f"{len(bad)} of {len(self.differences)} quantities depart"
        lines.append(f"  first: {first}")
        ranked = sorted(bad, key=lambda d: -d.error if d.error == d.error else float("-inf"))
        lines += [f"  worst: {difference}" for difference in ranked[:count]]
        return "\n".join(lines)


def synthetic_batch(start: int, count: int, *, seq_len: int, vocab_size: int, seed: int) -> TokenBatch:
    """Rows start..start+count-1, each a pure function of (seed, row): two documents, a padding tail on every third row.

    Uneven on purpose: rows differ in their number of labelled and of valid tokens, so a mean of means shows.
    """
    rows = []
    for index in range(start, start + count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        ids = torch.randint(0, vocab_size, (seq_len,), generator=generator)
        cut = int(torch.randint(1, seq_len, (1,), generator=generator))
        padding = int(torch.randint(1, seq_len // 2, (1,), generator=generator)) if index % 3 == 0 else 0
        position = torch.arange(seq_len)
        documents = (position >= cut).long()
        positions = torch.where(position < cut, position, position - cut)
        labels = torch.cat([ids[1:], ids.new_tensor([IGNORE_LABEL])])
        labels[cut - 1] = IGNORE_LABEL
        if padding:
            ids[-padding:] = 0
            documents[-padding:] = PADDING_DOCUMENT
            positions[-padding:] = 0
            labels[-padding - 1 :] = IGNORE_LABEL
        rows.append(TokenBatch(ids, labels, positions, documents))
    return TokenBatch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def record_trace(config: RunConfig, *, backend: Backend, num_steps: int = 3, with_gradients: bool = True) -> Trace:
    """Run num_steps on the default process group and layout of `config` (collective); every rank gets the whole trace."""
    mesh = build_mesh(
        expert_size=config.parallel.expert,
        sequence_size=config.parallel.sequence,
        device=backend.device,
        ranks_per_node=config.parallel.ranks_per_node,
    )
    module = build_model(
        config.model,
        config.moe,
        mesh=mesh,
        dispatch=config.dispatch,
        ops=config.backend.ops,
        seed=config.trainer.seed,
        dtype=weight_dtype(config.engine.dtype),
        checkpoint_blocks=config.engine.activation_checkpointing is Checkpointing.full,
        placement=config.parallel.expert_placement,
    )
    engine = build_engine(
        module,
        mesh=mesh,
        backend=backend,
        optim=config.optim,
        engine=config.engine,
        accumulation=config.trainer.accumulation,
    )
    try:
        steps = [_record_step(config, engine, mesh, step, with_gradients=with_gradients) for step in range(num_steps)]
        weights = _assemble(((name, state.weight) for name, state in engine.parameter_states()), module, mesh)
    finally:
        engine.close()
        mesh.close()
    return Trace(layout=describe_layout(config, mesh), steps=steps, weights=weights)


def describe_layout(config: RunConfig, mesh: Mesh) -> str:
    """One line that names a layout."""
    stage = f" ZeRO-{config.engine.zero_stage}" if config.engine.kind.value == "deepspeed" else ""
    return (
        f"{config.engine.kind.value}{stage} {config.engine.dtype.value}, {mesh.world_size} ranks = expert {mesh.expert_size} "
        f"× expert-data {mesh.world_size // mesh.expert_size}"
        f"{f', sequence {mesh.sequence_size}' if mesh.sequence_size > 1 else ''}"
        f", accumulation {config.trainer.accumulation}, checkpointing {config.engine.activation_checkpointing.value}, "
        f"dispatch {config.dispatch.mode.value}"
    )


def one_process(config: RunConfig) -> RunConfig:
    """The oracle of a layout: the plain engine on one process, nothing split, nothing recomputed.

    Accumulation stays where the mathematics names the micro-step (capacity; balance scopes batch and micro_batch, and the
    latter names the rank too: it has no oracle here); the dispatcher is the reference.
    """
    keep = config.dispatch.capacity_factor is not None or not {BalanceScope.batch, BalanceScope.micro_batch}.isdisjoint(
        balance_terms(config.moe)
    )
    return replace(
        config,
        parallel=replace(config.parallel, nproc=1, expert=1, sequence=1, expert_placement=None, ranks_per_node=None),
        dispatch=replace(config.dispatch, mode=DispatchMode.reference),
        engine=replace(config.engine, kind=EngineKind.torch, activation_checkpointing=Checkpointing.none),
        trainer=replace(config.trainer, accumulation=config.trainer.accumulation if keep else 1),
    )


def compare_traces(reference: Trace, candidate: Trace, *, tolerance: float = 1e-5) -> Comparison:
    """Compare every quantity: counts, drops and bias to the last bit, the rest within `tolerance` (relative, max norm)."""
    differences: list[Difference] = []
    for number, (expected, found) in enumerate(zip(reference.steps, candidate.steps, strict=True), start=1):
        head = f"step {number}: "
        for field in ("tokens_per_expert_LE", "dropped_per_expert_LE"):
            differences.append(_difference(head + field, getattr(expected, field), getattr(found, field), 0.0))
        for field in ("lm_loss", "balance_loss", "z_loss"):
            first, second = getattr(expected, field), getattr(found, field)
            if first is not None:
                differences.append(_difference(head + field, torch.tensor(first), torch.tensor(second), tolerance))
        for name in dict.fromkeys([*expected.gradients, *found.gradients]):
            differences.append(
                _difference(
                    f"{head}gradient of {name}", expected.gradients.get(name), found.gradients.get(name), tolerance
                )
            )
        differences.append(
            _difference(head + "grad_norm", torch.tensor(expected.grad_norm), torch.tensor(found.grad_norm), tolerance)
        )
        differences.append(_difference(head + "expert_bias_LE", expected.expert_bias_LE, found.expert_bias_LE, 0.0))
    for name in dict.fromkeys([*reference.weights, *candidate.weights]):
        differences.append(
            _difference(f"weight {name}", reference.weights.get(name), candidate.weights.get(name), tolerance)
        )
    return Comparison(reference=reference.layout, candidate=candidate.layout, differences=differences)


def _difference(what: str, expected: Tensor | None, found: Tensor | None, tolerance: float) -> Difference:
    if expected is None or found is None:
        side = "reference" if expected is None else "candidate"
        return Difference(what=what, error=float("inf"), tolerance=tolerance, where=f"the {side} has none")
    if expected.shape != found.shape:
        where = f"shape {list(found.shape)}, expected {list(expected.shape)}"
        return Difference(what=what, error=float("inf"), tolerance=tolerance, where=where)
    if expected.numel() == 0:
        return Difference(what=what, error=0.0, tolerance=tolerance, where="empty")
    gap = (found.double() - expected.double()).abs().flatten()
    # A non-finite value is the largest departure there is.
    gap = torch.where(torch.isfinite(gap), gap, torch.full_like(gap, float("inf")))
    place = int(gap.argmax())
    scale = float(expected.double().abs().max())
    error = 0.0 if float(gap[place]) == 0.0 else float(gap[place]) / scale if scale else float("inf")
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)] if expected.dim() else []
    values = f"{found.flatten()[place].item():.9g}, expected {expected.flatten()[place].item():.9g}"
    return Difference(what=what, error=error, tolerance=tolerance, where=f"at {index}: {values}")


def _record_step(config: RunConfig, engine: Engine, mesh: Mesh, step: int, *, with_gradients: bool) -> StepTrace:
    batches = []
    for micro_step in range(config.trainer.accumulation):
        rows = sample_index_for(
            step,
            micro_step,
            mesh.data_rank,
            batch_size=config.trainer.batch_size,
            accumulation=config.trainer.accumulation,
            data_size=mesh.data_size,
        )
        whole = synthetic_batch(
            rows.start,
            len(rows),
            seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size,
            seed=config.trainer.seed,
        )
        batches.append(TokenBatch(*(tensor.to(mesh.device) for tensor in whole)))
    counts, _ = count_step(batches, mesh=mesh, stop_requested=False)
    gradients: dict[str, Tensor] = {}

    def read_gradients() -> None:
        if with_gradients:
            gradients.update(_assemble(engine.gradients(), engine.module, mesh))

    lr = learning_rate(step + 1, config.optim, config.trainer.max_steps)
    result = run_step(
        engine,
        batches,
        counts,
        mesh=mesh,
        moe=config.moe,
        lr=lr,
        step=step + 1,
        max_steps=config.trainer.max_steps,
        before_update=read_gradients,
    )
    biases = [bias.cpu().clone() for bias in expert_biases(engine.module)]
    return StepTrace(
        lm_loss=result.lm_loss,
        balance_loss=result.balance_loss,
        z_loss=result.z_loss,
        grad_norm=result.outcome.grad_norm,
        tokens_per_expert_LE=result.sums.tokens_per_expert_LE.cpu().clone(),
        dropped_per_expert_LE=result.sums.dropped_per_expert_LE.cpu().clone(),
        expert_bias_LE=torch.stack(biases) if biases else torch.zeros(0),
        gradients=gradients,
    )


def _assemble(tensors: Iterator[tuple[str, Tensor]], module: Transformer, mesh: Mesh) -> dict[str, Tensor]:
    """Local tensors by name -> global ones on host: expert stacks are gathered over the expert group, in id order."""
    stacks = {
        f"{prefix}.experts.{name}": layer
        for prefix, layer in module.named_modules()
        if isinstance(layer, MoELayer)
        for name, _ in layer.experts.named_parameters()
    }
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors:
        local = tensor.detach().float().contiguous()
        if name in stacks and mesh.expert_size > 1:
            ids: list[list[int]] = [[] for _ in range(mesh.expert_size)]
            dist.all_gather_object(ids, list(stacks[name].dispatcher.local_expert_ids), group=mesh.expert_group)
            parts = [local.new_empty(len(own), *local.shape[1:]) for own in ids]
            parts[mesh.ep_rank] = local
            # Ranks may hold different numbers of experts, which all_gather does not take.
            for ep_rank, part in enumerate(parts):
                dist.broadcast(part, group=mesh.expert_group, group_src=ep_rank)
            order = torch.tensor([i for own in ids for i in own]).argsort()
            local = torch.cat(parts)[order]
        whole[name] = local.cpu().clone()
    return whole
