"""Every router and balance scope, cut over processes and micro-steps: the mathematics of one process, whole batch.

Jitter, noise and a logit cap are on everywhere: random numbers belong to tokens, not to ranks. Two steps, so that the
second starts from updated weights and a moved bias. The oracle runs without accumulation: with accumulation the
global-batch loss must find the fractions of the whole step before its first backward.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dispatch.config import CapacityScope, DispatchMode
from moe.model.config import ROUTER_TRAITS, BalanceConfig, BiasRule, RouterKind
from moe.model.routers.registry import ROUTERS
from moe.schema import RunConfig
from moe.train.config import Checkpointing, EngineKind
from moe.verify.layout import Trace, compare_traces, one_process
from moe.verify.parity import small
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


@dataclass(frozen=True)
class Layout:
    """Processes, expert-parallel size, micro-steps."""

    world_size: int
    expert: int
    accumulation: int
    checkpointing: Checkpointing = Checkpointing.none

    def __str__(self) -> str:
        return f"ep{self.expert}x{self.world_size // self.expert}-acc{self.accumulation}-{self.checkpointing.value}"


LAYOUTS = [
    Layout(1, 1, 4),
    Layout(2, 2, 2, Checkpointing.full),
    Layout(4, 2, 1),
]


def config_of(kind: RouterKind) -> RunConfig:
    """Everything at once that the router allows."""
    traits = ROUTER_TRAITS[kind]
    base = small()
    changes: dict[str, Any] = {
        "router": kind, "load_balancing_coef": 0.0, "normalize_topk": traits.exact_top_k,
        "router_jitter": 0.05, "router_noise": 0.3, "router_logit_cap": 5.0, "num_shared_experts": 0,
        "balance": BalanceConfig(sequence=0.01, global_batch=0.05) if traits.balance_loss else BalanceConfig(),
        "expert_bias_rate": 1e-2 if traits.expert_bias else 0.0,
        "expert_bias_rule": BiasRule.proportional if kind is RouterKind.sqrt_softplus else BiasRule.sign,
        "num_groups": 4 if traits.groups else 1, "topk_groups": 2 if traits.groups else 1,
    }  # fmt: skip
    return replace(
        base,
        model=replace(base.model, num_layers=2, hidden_size=16),
        moe=replace(base.moe, **changes),
        engine=replace(base.engine, kind=EngineKind.torch),
    )


def laid_out(config: RunConfig, layout: Layout) -> RunConfig:
    return replace(
        config,
        parallel=replace(config.parallel, nproc=layout.world_size, expert=layout.expert),
        engine=replace(config.engine, activation_checkpointing=layout.checkpointing),
        trainer=replace(config.trainer, accumulation=layout.accumulation),
    )


def two_steps(config: RunConfig) -> bytes | None:
    """Runs on every rank of a pool; rank 0 hands the trace back."""
    import torch.distributed as dist

    from backends.resolve import resolve_backend
    from moe.verify.layout import record_trace

    trace = record_trace(config, backend=resolve_backend("cpu", dist.get_rank()), num_steps=2)
    return pickle.dumps(trace) if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def oracle(process_pool: Pools) -> Callable[[RouterKind], Trace]:
    """One process, one micro-step, the reference dispatcher."""
    known: dict[RouterKind, Trace] = {}

    def get(kind: RouterKind) -> Trace:
        if kind not in known:
            alone = one_process(config_of(kind))
            assert alone.trainer.accumulation == 1
            known[kind] = pickle.loads(process_pool(1).run(two_steps, alone)[0])
        return known[kind]

    return get


def test_a_frozen_router_stays_under_every_engine(process_pool: Pools) -> None:
    """ZeRO-1 on two ranks against one process: no gradient or update of the router anywhere, the rest as ever."""
    base = config_of(RouterKind.softmax)
    frozen = replace(base, moe=replace(base.moe, freeze_router=True))
    expected = pickle.loads(process_pool(1).run(two_steps, one_process(frozen))[0])
    config = laid_out(frozen, Layout(2, 2, 2))
    config = replace(config, engine=replace(config.engine, kind=EngineKind.deepspeed))
    comparison = compare_traces(expected, pickle.loads(process_pool(2).run(two_steps, config)[0]), tolerance=1e-5)
    assert comparison.first is None, comparison.report()
    assert not any("router" in name for name in expected.weights)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", list(ROUTERS), ids=lambda kind: kind.name)
def test_a_router_is_the_same_on_every_layout(
    kind: RouterKind, layout: Layout, process_pool: Pools, oracle: Callable[[RouterKind], Trace]
) -> None:
    """A06, A07, A13, A15: picks and (sign) bias to the last bit; losses, gradients, weights within 1e-5."""
    trace = pickle.loads(process_pool(layout.world_size).run(two_steps, laid_out(config_of(kind), layout))[0])
    comparison = compare_traces(oracle(kind), trace, tolerance=1e-5)
    assert comparison.first is None, comparison.report()


WAYS: dict[str, dict[str, Any]] = {
    # As much room as there are experts: nothing is dropped, however uneven the load.
    "padded": {"pad_to_capacity": True, "capacity_factor": 8.0, "capacity_scope": CapacityScope.local},
    "limited": {"capacity_factor": 8.0},
    "two_hop in chunks": {"mode": DispatchMode.two_hop, "chunks": 2},
    "all_gather": {"mode": DispatchMode.all_gather},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(ROUTERS), ids=lambda kind: kind.name)
def test_a_router_is_the_same_through_every_dispatcher(
    kind: RouterKind, way: str, process_pool: Pools, oracle: Callable[[RouterKind], Trace]
) -> None:
    """Expert choice gives a token up to E picks, where the others give K: no way to the experts may count on K."""
    config = laid_out(config_of(kind), Layout(2, 2, 1))
    config = replace(config, dispatch=replace(config.dispatch, **WAYS[way]))
    if way.startswith("two_hop"):
        config = replace(config, parallel=replace(config.parallel, ranks_per_node=1))
    comparison = compare_traces(oracle(kind), pickle.loads(process_pool(2).run(two_steps, config)[0]), tolerance=1e-5)
    assert comparison.first is None, comparison.report()
