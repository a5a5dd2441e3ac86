"""Both engines on every small layout, against one process; state, refusals and a clean exit.

The wide cross of layouts is `tests/distributed/test_parity.py`; here stand the promises of the engine contract itself.
"""

import contextlib
import gc
import hashlib
import io
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends import cpu
from backends.config import OpsConfig
from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig
from dispatch.interface import TokenDispatcher
from dispatch.topology import one_node
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import BalanceScope, ModelConfig, MoEConfig
from moe.model.transformer import Transformer
from moe.train.build import build_engine
from moe.train.config import DType, EngineConfig, EngineKind, Offload, OffloadAdam, OptimConfig
from moe.train.engine import Engine, ParameterState, StepOutcome
from moe.train.engine_torch import TorchEngine
from moe.train.mesh import Mesh, build_mesh
from moe.train.objective import StepCounts, count_tokens
from moe.train.optim import is_expert
from moe.train.parallelize import build_model, weight_dtype
from moe.train.step import run_step
from tests.process_pool import ProcessPool
from tests.train.weights import whole_weights

Pools = Callable[[int], ProcessPool]

MODEL = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_dense_layers=1, intermediate_size=24, num_heads=2, num_kv_heads=1
)
MOE = MoEConfig(
    num_experts=4, top_k=2, moe_intermediate_size=12, num_shared_experts=1,
    load_balancing_coef=0.02, balance_scope=BalanceScope.sequence, router_z_coef=1e-3,
)  # fmt: skip
# Clipping is active in every step: the norms are near 1.
OPTIM = OptimConfig(lr=1e-3, clip_norm=0.3)
ROWS, TOKENS = 8, 10


@dataclass(frozen=True)
class Kind:
    """One engine."""

    kind: EngineKind
    stage: int = 1
    dtype: DType = DType.fp32
    offload: OffloadAdam | None = None

    def __str__(self) -> str:
        name = f"zero{self.stage}" if self.kind is EngineKind.deepspeed else "torch"
        return f"{name}-{self.dtype.value}" + (f"-offload_{self.offload.value}" if self.offload else "")

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            kind=self.kind, zero_stage=self.stage, dtype=self.dtype,
            offload_optimizer=Offload.cpu if self.offload else Offload.none,
            offload_adam=self.offload or OffloadAdam.torch,
        )  # fmt: skip


TORCH = Kind(EngineKind.torch)
ZERO = [Kind(EngineKind.deepspeed, stage) for stage in (0, 1, 2, 3)]
ZERO_BF16 = [Kind(EngineKind.deepspeed, stage, DType.bf16) for stage in (0, 1, 2, 3)]
OFFLOAD_BF16 = [Kind(EngineKind.deepspeed, stage, DType.bf16, OffloadAdam.torch) for stage in (2, 3)]


def one_rank_mesh() -> Mesh:
    """A mesh of this rank alone, for the reference (collective)."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    return Mesh(
        rank=0, world_size=1, expert_size=1, sequence_size=1, ep_rank=0, edp_rank=0,
        world_group=group, sequence_group=None, expert_group=group, expert_data_group=group, topology=one_node(group),
        device=torch.device("cpu"),
    )  # fmt: skip


def global_batch(step: int) -> TokenBatch:
    """ROWS rows; some end in padding, so rows weigh differently."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, MODEL.vocab_size, (ROWS, TOKENS), generator=generator) for _ in range(2))
    documents = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    documents[::3, -3:] = PADDING_DOCUMENT
    labels[::3, -4:] = IGNORE_LABEL
    return TokenBatch(ids, labels, torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous(), documents)


def padding_only(batch: TokenBatch, rows: slice) -> TokenBatch:
    """The same batch with these rows emptied."""
    labels, documents = batch.labels_BS.clone(), batch.document_ids_BS.clone()
    labels[rows], documents[rows] = IGNORE_LABEL, PADDING_DOCUMENT
    return batch._replace(labels_BS=labels, document_ids_BS=documents)


def share(batch: TokenBatch, mesh: Mesh, accumulation: int) -> list[TokenBatch]:
    """This rank's micro-batches of a global batch."""
    size = ROWS // (mesh.world_size * accumulation)
    starts = [(m * mesh.world_size + mesh.rank) * size for m in range(accumulation)]
    return [TokenBatch(*(tensor[start : start + size] for tensor in batch)) for start in starts]


def counts_of(batch: TokenBatch, mesh: Mesh) -> StepCounts:
    return count_tokens([batch], mesh)


def make(
    kind: Kind, mesh: Mesh, accumulation: int = 1, moe: MoEConfig = MOE, model: ModelConfig = MODEL, seed: int = 0
) -> Engine:
    module = build_model(
        model, moe, mesh=mesh, dispatch=DispatchConfig(), ops=OpsConfig(), seed=seed, dtype=weight_dtype(kind.dtype),
        checkpoint_blocks=False,
    )  # fmt: skip
    return build_engine(
        module, mesh=mesh, backend=cpu.make(0), optim=OPTIM, engine=kind.config, accumulation=accumulation
    )


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Warnings are errors on a worker too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@dataclass
class Trace:
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]
    """fp32 masters after the last."""


def train(engine: Engine, mesh: Mesh, accumulation: int, batches: list[TokenBatch], moe: MoEConfig = MOE) -> Trace:
    gradients: list[dict[str, Tensor]] = []
    norms = []
    for batch in batches:
        result = run_step(
            engine, share(batch, mesh, accumulation), counts_of(batch, mesh), mesh=mesh, moe=moe, lr=OPTIM.lr,
            before_update=lambda: gradients.append({name: g.clone() for name, g in engine.gradients()}),
        )  # fmt: skip
        assert result.outcome.applied
        norms.append(result.outcome.grad_norm)
    weights = {name: state.weight.clone() for name, state in engine.parameter_states()}
    return Trace(norms, gradients[0], weights)


def local_part(name: str, whole: Tensor, mesh: Mesh) -> Tensor:
    return whole.chunk(mesh.expert_size)[mesh.ep_rank] if is_expert(name) else whole


def assert_same(found: Trace, expected: Trace, mesh: Mesh, tolerance: float) -> None:
    """Norms, gradients and weights within `tolerance` of the largest value of each tensor."""
    torch.testing.assert_close(found.norms, expected.norms, rtol=tolerance, atol=0)
    for what in ("gradients", "weights"):
        mine, theirs = getattr(found, what), getattr(expected, what)
        assert mine.keys() == theirs.keys()
        for name, whole in theirs.items():
            scale = float(whole.abs().max())
            torch.testing.assert_close(
                mine[name], local_part(name, whole, mesh), rtol=0, atol=tolerance * scale,
                msg=lambda text, name=name, what=what: f"{what} of {name}: {text}",
            )  # fmt: skip


def _layout_case(kind: Kind, expert_size: int, accumulation: int, hollow: bool = False) -> str:
    """Train three steps and compare with one process; returns a digest of the dense weights, to compare between ranks."""
    batches = [global_batch(step) for step in range(3)]
    if hollow:
        # One rank has nothing but padding, another one in the next step.
        size = ROWS // dist.get_world_size()
        batches = [padding_only(b, slice(i * size, (i + 1) * size)) for i, b in enumerate(batches[:2])]
    alone = one_rank_mesh()
    expected = train(make(TORCH, alone), alone, 1, batches)
    mesh = build_mesh(expert_size=expert_size, device=torch.device("cpu"))
    with strict():
        engine = make(kind, mesh, accumulation)
        found = train(engine, mesh, accumulation, batches)
        weights = whole_weights(engine)
        engine.close()
    assert_same(found, expected, mesh, tolerance=1e-5)
    digest = hashlib.sha256()
    for name, weight in weights.items():
        if not is_expert(name):
            digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("expert_size", [1, 2])
@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_two_ranks_equal_one_process(process_pool: Pools, kind: Kind, expert_size: int, accumulation: int) -> None:
    """Gradients, clip norm and weights; dense copies equal to the last bit on all ranks (A26, A28)."""
    digests = process_pool(2).run(_layout_case, kind, expert_size, accumulation)
    assert len(set(digests)) == 1


@pytest.mark.parametrize("expert_size", [2, 4])
@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_four_ranks_equal_one_process(process_pool: Pools, kind: Kind, expert_size: int) -> None:
    """Expert-parallel times expert-data parallel, two micro-batches."""
    digests = process_pool(4).run(_layout_case, kind, expert_size, 2)
    assert len(set(digests)) == 1


@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_a_rank_of_padding_changes_nothing(process_pool: Pools, kind: Kind) -> None:
    """A23: a rank without a single token still gives every parameter a gradient, and nobody hangs."""
    digests = process_pool(2).run(_layout_case, kind, 2, 1, hollow=True, timeout=60)
    assert len(set(digests)) == 1


def _bf16_case(kind: Kind, accumulation: int) -> None:
    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    batches = [global_batch(step) for step in range(3)]
    with strict():
        engine = make(kind, mesh, accumulation)
        found = train(engine, mesh, accumulation, batches)
        assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
        for name, weight in whole_weights(engine).items():
            torch.testing.assert_close(weight, found.weights[name].bfloat16(), rtol=0, atol=0)
        engine.close()
        reference = make(replace(TORCH, dtype=DType.bf16), mesh, accumulation)
        expected = train(reference, mesh, accumulation, batches[:1])
    # The first step starts from the same bits, so what is left is the order of fp32 sums: no bf16 sum hides anywhere.
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", [*ZERO_BF16, *OFFLOAD_BF16], ids=str)
def test_bf16_accumulates_and_reduces_in_fp32(process_pool: Pools, kind: Kind, accumulation: int) -> None:
    """As the plain engine does, on the same layout; parameters are the rounded masters."""
    process_pool(2).run(_bf16_case, kind, accumulation)


class OneWeightExperts(nn.Module):
    """Expert e is y = w_e · x."""

    def __init__(self, num_local_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(num_local_experts, 1, 1))

    def forward(self, rows_RD: Tensor, tokens_per_local_expert_e: Tensor) -> Tensor:
        return rows_RD * self.w1.view(-1).repeat_interleave(tokens_per_local_expert_e).unsqueeze(1)


class OneWeightLayer(nn.Module):
    """Tokens below 3 go to expert 0, the others to expert 1."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.experts = OneWeightExperts(len(dispatcher.local_expert_ids))

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK = (x_TD >= 3).long()
        return self.dispatcher.run(x_TD, ids_TK, torch.ones_like(x_TD), self.experts)


class OneWeightModel(nn.Module):
    """scale · expert(x), with scale a dense weight of 1; returns Σ ½y²."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.moe = OneWeightLayer(build_dispatcher(DispatchConfig(), num_experts=2, group=mesh.expert_group))

    def forward(self, x_TD: Tensor) -> Tensor:
        return (0.5 * (self.moe(x_TD) * self.scale) ** 2).sum()


def _f3_case(kind: Kind, expert_size: int, accumulation: int) -> tuple[dict[str, list[float]], StepOutcome]:
    mesh = build_mesh(expert_size=expert_size, device=torch.device("cpu"))
    # Rank 0 holds tokens 1 and 3, rank 1 holds 2 and 4; ranks 2 and 3 repeat them.
    tokens = torch.tensor([[1.0], [3.0]] if mesh.rank % 2 == 0 else [[2.0], [4.0]])
    num_tokens = 2 * mesh.world_size
    if mesh.world_size == 1:
        tokens, num_tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 4
    module: nn.Module = OneWeightModel(mesh)
    engine = build_engine(
        module, mesh=mesh, backend=cpu.make(0), optim=OPTIM, engine=kind.config, accumulation=accumulation  # type: ignore[arg-type]
    )  # fmt: skip
    for part in tokens.chunk(accumulation):
        engine.backward(engine.forward(part) / num_tokens)  # type: ignore[arg-type, operator]
    gradients = {name: gradient.flatten().tolist() for name, gradient in engine.gradients()}
    outcome = engine.step(1e-3)
    engine.close()
    return gradients, outcome


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("world_size", "expert_size"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_expert_gradients_do_not_depend_on_the_layout(
    process_pool: Pools, kind: Kind, world_size: int, expert_size: int, accumulation: int
) -> None:
    """A24 on F3: 1.25 and 6.25 in every layout; and A25: the norm counts each of them once.

    Σ y²/4 = 7.5 is the gradient of the dense scale, and √(1.25² + 6.25² + 7.5²) the norm.
    """
    for rank, (gradients, outcome) in enumerate(
        process_pool(world_size).run(_f3_case, kind, expert_size, accumulation)
    ):
        expected = [1.25, 6.25] if expert_size == 1 else [[1.25], [6.25]][rank % 2]
        assert gradients["moe.experts.w1"] == pytest.approx(expected, rel=1e-6)
        assert gradients["scale"] == pytest.approx([7.5], rel=1e-6)
        assert outcome.grad_norm == pytest.approx((1.25**2 + 6.25**2 + 7.5**2) ** 0.5, rel=1e-6)
        assert outcome.applied


def snapshot(engine: Engine) -> dict[str, ParameterState]:
    """A copy of the whole state."""
    return {
        name: replace(s, weight=s.weight.clone(), exp_avg=s.exp_avg.clone(), exp_avg_sq=s.exp_avg_sq.clone())
        for name, s in engine.parameter_states()
    }


def assert_bitwise(found: dict[str, ParameterState], expected: dict[str, ParameterState]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        mine = found[name]
        assert mine.step == theirs.step, name
        for field in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(mine, field), getattr(theirs, field)), f"{field} of {name}"


def _resume_case(kind: Kind) -> None:
    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))

    def steps(engine: Engine, numbers: range) -> list[tuple[float, float]]:
        results = []
        for batch in map(global_batch, numbers):
            result = run_step(engine, share(batch, mesh, 2), counts_of(batch, mesh), mesh=mesh, moe=MOE, lr=OPTIM.lr)
            results.append((result.lm_loss, result.outcome.grad_norm))
        return results

    with strict():
        engine = make(kind, mesh, 2)
        before = snapshot(engine)
        assert all(s.step == 0 and not s.exp_avg.any() and not s.exp_avg_sq.any() for s in before.values())
        for name, weight in whole_weights(engine).items():
            assert torch.equal(before[name].weight, weight.float())
        steps(engine, range(3))
        saved = snapshot(engine)
        assert all(s.step == 3 and s.weight.dtype == torch.float32 for s in saved.values())
        straight = steps(engine, range(3, 6))
        end = snapshot(engine)
        engine.close()

        resumed = make(kind, mesh, 2, seed=1)
        resumed.load_parameter_states(saved)
        assert_bitwise(snapshot(resumed), saved)
        for name, weight in whole_weights(resumed).items():
            assert torch.equal(weight, saved[name].weight.to(weight.dtype)), name
        assert steps(resumed, range(3, 6)) == straight
        assert_bitwise(snapshot(resumed), end)
        with pytest.raises(ValueError, match="missing"):
            resumed.load_parameter_states({})
        resumed.close()


@pytest.mark.parametrize("kind", [TORCH, replace(TORCH, dtype=DType.bf16), *ZERO, *ZERO_BF16, *OFFLOAD_BF16], ids=str)
def test_resume_is_the_same_run(process_pool: Pools, kind: Kind) -> None:
    """A31: three steps, save, a fresh engine with other weights, load, three steps: bitwise the uninterrupted run.

    State can be read before the first step, too.
    """
    process_pool(2).run(_resume_case, kind)


def _non_finite_case(kind: Kind) -> None:
    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    batch = global_batch(0)

    def one_step(engine: Engine, poison: bool) -> StepOutcome:
        for part in share(batch, mesh, 2):
            loss = engine.forward(part).lm_loss_sum / counts_of(batch, mesh).labelled_tokens
            engine.backward(loss * float("inf") if poison and mesh.rank == 1 else loss)
        return engine.step(OPTIM.lr)

    with strict():
        engine = make(kind, mesh, 2)
        before = snapshot(engine)
        outcome = one_step(engine, poison=True)
        assert not outcome.applied
        assert not torch.isfinite(torch.tensor(outcome.grad_norm))
        assert_bitwise(snapshot(engine), before)
        after_fault = one_step(engine, poison=False)
        final = snapshot(engine)
        engine.close()
        untouched = make(kind, mesh, 2)
        assert one_step(untouched, poison=False) == after_fault
        assert_bitwise(final, snapshot(untouched))
        untouched.close()


@pytest.mark.parametrize("kind", [TORCH, *ZERO, *ZERO_BF16, *OFFLOAD_BF16], ids=str)
def test_a_non_finite_gradient_on_one_rank_changes_nothing_anywhere(process_pool: Pools, kind: Kind) -> None:
    """No weight, moment or step count moves on any rank, and the next step is as if the bad one had not been."""
    process_pool(2).run(_non_finite_case, kind)


def _dense_case(kind: Kind) -> None:
    model = replace(MODEL, num_dense_layers=MODEL.num_layers)
    batches = [global_batch(step) for step in range(3)]
    alone, mesh = one_rank_mesh(), build_mesh(expert_size=1, device=torch.device("cpu"))
    expected = train(make(TORCH, alone, model=model), alone, 1, batches)
    engine = make(kind, mesh, model=model)
    assert_same(train(engine, mesh, 1, batches), expected, mesh, tolerance=1e-5)
    engine.close()


@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_a_model_without_experts_works(process_pool: Pools, kind: Kind) -> None:
    process_pool(2).run(_dense_case, kind)


class Unused(Transformer):
    """A Transformer with a weight that takes no part."""

    def __init__(self) -> None:
        super().__init__(MODEL, MOE)
        self.forgotten = nn.Linear(2, 2, bias=False)


def _unused_case() -> None:
    from moe.model.init import initialise

    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    module = Unused()
    initialise(module, seed=0, device="cpu")
    kind = Kind(EngineKind.deepspeed, 1)
    engine = build_engine(module, mesh=mesh, backend=cpu.make(0), optim=OPTIM, engine=kind.config, accumulation=1)
    output = engine.forward(share(global_batch(0), mesh, 1)[0])
    with pytest.raises(RuntimeError, match=r"no gradient reached \['forgotten.weight'\] on rank"):
        engine.backward(output.lm_loss_sum)
    engine.close()


def test_a_parameter_without_gradient_is_named(process_pool: Pools) -> None:
    """ZeRO mixes up its buckets in silence when one rank lacks a gradient: refused instead."""
    process_pool(2).run(_unused_case)


def _many_engines_case() -> tuple[list[float], str]:
    from deepspeed.utils import groups

    stdout = io.StringIO()
    batch = global_batch(0)
    meshes = {p: build_mesh(expert_size=p, device=torch.device("cpu")) for p in (1, 2)}
    classes = set()
    resident: list[float] = []

    def resident_mb() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    with strict(), contextlib.redirect_stdout(stdout):
        for _ in range(2):
            for kind, expert_size in itertools.product([*ZERO, ZERO_BF16[1]], (1, 2)):
                mesh = meshes[expert_size]
                engine = make(kind, mesh)
                own = {name: set(vars(parameter)) for name, parameter in engine.module.named_parameters()}
                run_step(engine, share(batch, mesh, 1), counts_of(batch, mesh), mesh=mesh, moe=MOE, lr=OPTIM.lr)
                module = engine.module
                engine.close()
                assert any(own.values()) == (kind.stage > 0 or expert_size > 1)
                classes |= {type(layer) for layer in module.moe_layers()}
                assert not any(vars(parameter) for parameter in module.parameters())
                assert not any(module._forward_hooks or module._forward_pre_hooks for module in module.modules())
                assert not groups._EXPERT_PARALLEL_GROUP
                assert not groups._EXPERT_DATA_PARALLEL_GROUP
            resident.append(resident_mb())
    assert [c.__mro__[1] for c in classes] == [nn.Module]
    return resident, stdout.getvalue()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from /proc")
def test_engines_follow_each_other_in_one_process(process_pool: Pools) -> None:
    """16 engines, stage, type and expert-parallel size changing: nothing printed, nothing left, no memory kept."""
    for resident_mb, printed in process_pool(2).run(_many_engines_case):
        assert resident_mb[-1] - resident_mb[0] < 8, resident_mb
        assert printed == ""


def test_engine_follows_its_process_group() -> None:
    """DeepSpeed keeps process-wide state; an engine after a torn-down process group must not meet the old one."""
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
            engine = make(Kind(EngineKind.deepspeed, 1), mesh)
            assert train(engine, mesh, 1, [global_batch(0)]).norms[0] > 0
            engine.close()
        finally:
            dist.destroy_process_group()


def test_engines_of_one_process_without_deepspeed() -> None:
    """The oracle needs no DeepSpeed: kind=torch builds the plain engine."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
        engine = make(TORCH, mesh, accumulation=2)
        assert isinstance(engine, TorchEngine)
        with pytest.raises(AssertionError):
            next(iter(engine.gradients()))
    finally:
        dist.destroy_process_group()
