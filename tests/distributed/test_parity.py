"""The net under everything: a layout never changes the mathematics.

Each case runs three optimizer steps of a small model on 2 or 4 gloo processes and compares loss, every gradient, clip
norm, counts, bias and the weights after the last step with the plain engine on one process, the reference dispatcher,
the same global batches. Rows have padding and different numbers of labels, so a mean of means shows.

Cases and comparison are those of moe/verify/parity.py.
"""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from moe.schema import RunConfig
from moe.train.config import Checkpointing
from moe.verify.layout import Trace, compare_traces, one_process
from moe.verify.parity import OTHERS, TOLERANCE, Case, cross, run_cases, table
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


# The layout axes with the default router; the whole cross with chunks is run by `python -m moe.verify.parity`.
CROSS = [
    case
    for case in cross(chunks=(1,))
    # Stage 3 takes seconds a case: of the layouts that differ least, both at once or neither.
    if case.zero_stage < 3
    or case.world_size == 2 * case.expert
    or (case.accumulation == 2) == (case.checkpointing is Checkpointing.full)
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
    comparison = compare_traces(expected, trace, tolerance=TOLERANCE)
    assert comparison.first is None, comparison.report()


def test_the_command_runs_cases_and_tells_a_departure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of `python -m moe.verify.parity`, on two of its cases; and a tolerance that nothing can meet."""
    cases = [Case(2, 2, 1), OTHERS[4]]
    outcomes = run_cases(cases, tmp_path)
    assert [outcome.comparison.first for outcome in outcomes] == [None, None]
    lines = table(outcomes).splitlines()
    assert lines[2].startswith("| 2 | 2 × 1 | 1 | 1 | ")
    assert lines[2].endswith(" | equal |")
    assert str(cases[1]) in lines[-1]
    monkeypatch.setattr("moe.verify.parity.TOLERANCE", 1e-12)
    assert "DEPARTS" in table(run_cases(cases[:1], tmp_path / "again"))
