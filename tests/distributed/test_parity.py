"""The net under everything: a layout never changes the mathematics.

Each case runs three optimizer steps of a small model on 2 or 4 gloo processes and compares loss, every gradient, clip
norm, counts, bias and the weights after the last step with the plain engine on one process, the reference dispatcher,
the same global batches. Rows have padding and different numbers of labels, so a mean of means shows.

To add an axis: one more parameter of `case`, one more list in the cross.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from dispatch.config import DispatchMode, DropPolicy
from moe.model.config import BalanceScope, RouterKind
from moe.schema import RunConfig
from moe.train.config import Checkpointing, DType, EngineKind, Offload, OffloadAdam
from moe.verify.layout import Trace, compare_traces, one_process
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


def small(router: RouterKind = RouterKind.softmax, scope: BalanceScope = BalanceScope.sequence) -> RunConfig:
    """A model with every part that a layout could get wrong: dense and MoE blocks, shared expert, z-loss, bias, clipping."""
    config = RunConfig(recipe="parity")
    return replace(
        config,
        model=replace(
            config.model, vocab_size=512, hidden_size=32, num_layers=3, num_dense_layers=1, intermediate_size=48,
            num_heads=4, num_kv_heads=2, tie_embeddings=True,
        ),
        moe=replace(
            config.moe, num_experts=8, top_k=2, moe_intermediate_size=16, num_shared_experts=1, router=router,
            load_balancing_coef=0.02, balance_scope=scope, router_z_coef=1e-3,
            expert_bias_rate=1e-3 if router is RouterKind.sigmoid else 0.0,
        ),
        data=replace(config.data, seq_len=24),
        trainer=replace(config.trainer, batch_size=8, accumulation=1, max_steps=3, seed=3),
        # Adam's first steps are g / (|g| + eps): with eps near the rounding of g, an element whose gradient is nothing
        # but rounding moves by a visible share of lr. A larger eps makes the update as smooth as the gradients are.
        optim=replace(config.optim, lr=3e-3, warmup_steps=1, clip_norm=0.5, eps=1e-4),
        engine=replace(config.engine, dtype=DType.fp32, zero_stage=1),
        backend=replace(config.backend),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One layout of `small`."""

    world_size: int
    expert: int
    zero_stage: int
    accumulation: int = 1
    checkpointing: Checkpointing = Checkpointing.none
    engine: EngineKind = EngineKind.deepspeed
    router: RouterKind = RouterKind.softmax
    scope: BalanceScope = BalanceScope.sequence
    mode: DispatchMode = DispatchMode.auto
    ranks_per_node: int | None = None
    chunks: int = 1
    overlap: bool = True
    capacity: float | None = None
    drop: DropPolicy = DropPolicy.probability
    placement: tuple[int, ...] | None = None
    offload: OffloadAdam | None = None

    def __str__(self) -> str:
        return (
            f"{self.engine.value}-zero{self.zero_stage}-ep{self.expert}x{self.world_size // self.expert}"
            f"-acc{self.accumulation}-ckpt_{self.checkpointing.value}-{self.router.value}-{self.scope.value}"
            f"-{self.mode.value}"
            + (f"-nodes_of_{self.ranks_per_node}" if self.ranks_per_node else "")
            + (f"-chunks{self.chunks}" if self.chunks > 1 else "")
            + ("" if self.overlap else "-in_turn")
            + (f"-capacity{self.capacity}_{self.drop.value}" if self.capacity else "")
            + (f"-offload_{self.offload.value}" if self.offload else "")
            + (f"-placed{''.join(map(str, self.placement))}" if self.placement else "")
        )

    def config(self) -> RunConfig:
        base = small(self.router, self.scope)
        return replace(
            base,
            parallel=replace(
                base.parallel,
                nproc=self.world_size,
                expert=self.expert,
                ranks_per_node=self.ranks_per_node,
                expert_placement=None if self.placement is None else list(self.placement),
            ),
            dispatch=replace(
                base.dispatch,
                mode=self.mode,
                chunks=self.chunks,
                overlap_forward=self.overlap,
                overlap_backward=self.overlap,
                overlap_shared=self.overlap,
                capacity_factor=self.capacity,
                drop_policy=self.drop,
            ),
            engine=replace(
                base.engine,
                kind=self.engine,
                zero_stage=self.zero_stage,
                activation_checkpointing=self.checkpointing,
                offload_optimizer=Offload.cpu if self.offload else Offload.none,
                offload_adam=self.offload or OffloadAdam.torch,
            ),
            trainer=replace(base.trainer, accumulation=self.accumulation),
        )


# The whole cross of the layout axes on 2 and 4 processes, with the default router.
CROSS = [
    Case(world_size, expert, zero_stage, accumulation, checkpointing)
    for world_size, expert in ((2, 1), (2, 2), (4, 2), (4, 4))
    for zero_stage in (0, 1, 2, 3)
    for accumulation in (1, 2)
    for checkpointing in Checkpointing
    # Stage 3 takes seconds a case: of the layouts that differ least, both at once or neither.
    if zero_stage < 3 or world_size == 2 * expert or (accumulation == 2) == (checkpointing is Checkpointing.full)
]
# The other axes, each on the layouts where they could go wrong.
OTHERS = [
    Case(2, 2, 1, 2, router=RouterKind.sigmoid),
    Case(4, 2, 2, 2, Checkpointing.full, router=RouterKind.sigmoid, scope=BalanceScope.batch),
    Case(4, 2, 1, 1, scope=BalanceScope.batch),
    Case(4, 4, 0, 2, scope=BalanceScope.batch),
    Case(2, 1, 0, 1, engine=EngineKind.torch),
    Case(2, 2, 0, 2, engine=EngineKind.torch),
    Case(4, 2, 0, 2, Checkpointing.full, engine=EngineKind.torch, scope=BalanceScope.batch),
    Case(1, 1, 1, 2),
    Case(4, 1, 1, 1),
    Case(2, 2, 1, 1, mode=DispatchMode.all_gather),
    Case(4, 2, 1, 2, Checkpointing.full, mode=DispatchMode.all_gather, ranks_per_node=1, chunks=2),
    Case(2, 2, 2, 1, mode=DispatchMode.two_hop, ranks_per_node=1),
    Case(4, 4, 1, 1, mode=DispatchMode.two_hop, ranks_per_node=2),
    Case(4, 4, 0, 2, Checkpointing.full, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=4),
    Case(2, 2, 1, 1, placement=(1, 0, 0, 1, 0, 1, 1, 0)),
    Case(2, 2, 0, 2, mode=DispatchMode.two_hop, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(4, 2, 0, 1, engine=EngineKind.torch, placement=(0, 0, 1, 0, 0, 0, 0, 1)),
    Case(2, 2, 1, 2, Checkpointing.full, chunks=3),
    Case(2, 2, 1, 1, chunks=3, overlap=False),
    Case(4, 4, 0, 1, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2, overlap=False),
    Case(2, 2, 1, 1, capacity=0.75),
    Case(4, 2, 2, 1, Checkpointing.full, capacity=0.5, drop=DropPolicy.position, mode=DispatchMode.all_gather),
    Case(4, 4, 0, 1, capacity=0.75, drop=DropPolicy.random, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2),
    Case(2, 2, 1, 2, capacity=0.75, drop=DropPolicy.position, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(2, 2, 2, 2, offload=OffloadAdam.torch),
    Case(2, 2, 3, 2, offload=OffloadAdam.torch),
    Case(4, 2, 2, 2, Checkpointing.full, offload=OffloadAdam.torch),
    Case(4, 2, 3, 1, offload=OffloadAdam.torch),
    Case(2, 2, 3, 2, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(4, 2, 3, 2, Checkpointing.full, placement=(1, 0, 0, 1, 1, 1, 1, 1), chunks=2),
    Case(4, 2, 3, 1, Checkpointing.full, router=RouterKind.sigmoid, scope=BalanceScope.batch, chunks=2),
    Case(4, 4, 3, 2, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2),
]


def trace_on_rank(config: RunConfig) -> bytes | None:
    """Runs in a pool's rank; rank 0 hands the trace back (pickled here, since a pipe would share tensors by handle)."""
    import torch.distributed as dist

    from backends.resolve import resolve_backend
    from moe.verify.layout import record_trace

    trace = record_trace(config, backend=resolve_backend("cpu", dist.get_rank()))
    return pickle.dumps(trace) if dist.get_rank() == 0 else None


@pytest.fixture(scope="session")
def oracle(process_pool: Pools) -> Callable[[RunConfig], Trace]:
    """Traces on one process, each computed once."""
    known: dict[str, Trace] = {}

    def get(config: RunConfig) -> Trace:
        alone = one_process(config)
        if str(alone) not in known:
            known[str(alone)] = pickle.loads(process_pool(1).run(trace_on_rank, alone)[0])
        return known[str(alone)]

    return get


@pytest.mark.parametrize("case", CROSS + OTHERS, ids=str)
def test_layout_gives_the_mathematics_of_one_process(
    case: Case, process_pool: Pools, oracle: Callable[[RunConfig], Trace]
) -> None:
    """A06, A07, A13, A15, A21, A24, A25, A28, A29: loss, gradients, norm, counts, bias and weights, within 1e-5."""
    config = case.config()
    trace = pickle.loads(process_pool(case.world_size).run(trace_on_rank, config)[0])
    expected = oracle(config)
    # A capacity that drops nothing would show nothing.
    assert all((int(step.dropped_per_expert_LE.sum()) > 0) == bool(case.capacity) for step in expected.steps)
    comparison = compare_traces(expected, trace, tolerance=1e-5)
    assert comparison.first is None, comparison.report()
