"""The dispatch suite over HCCL: outputs and all gradients of every mode against one dense layer in float64 on the CPU.

Then the same with lazy collectives, where a wait that is missing in forward or backward, or a buffer that is used again too
early, gives NaN or other numbers.
"""

import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch import exchange
from tests.dispatch.cases import (
    CASES,
    Variant,
    dense_layer,
    expert_weights,
    make_inputs,
    run_experts,
    run_layer,
    topologies,
)
from tests.process_pool import ProcessPool

NUM_EXPERTS, WORLD_SIZE = 4, 2
TOLERANCE = 1e-5
"""fp32, relative to the largest element: sums are reordered."""
VARIANTS = {
    "all_gather": Variant(mode="all_gather"),
    "all_to_all": Variant(mode="all_to_all"),
    "all_to_all in 3 chunks": Variant(mode="all_to_all", chunks=3),
    "two_hop": Variant(mode="two_hop", ranks_per_node=1),
    "two_hop in 2 chunks": Variant(mode="two_hop", ranks_per_node=1, chunks=2),
}


def layers(variants: Sequence[Variant], cases: Sequence[str] = CASES) -> list[dict[str, dict[str, Tensor]]]:
    """For each variant and case, what this rank computes on its device."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    results = []
    with topologies(variants, group) as of:
        for variant in variants:
            per_case = {}
            for case in cases:
                seed = CASES.index(case)
                dispatcher = variant.build(NUM_EXPERTS, group, of[variant.ranks_per_node])
                inputs = make_inputs(case, rank, WORLD_SIZE, NUM_EXPERTS, seed)
                per_case[case] = run_layer(dispatcher, inputs, torch.float32, rank, "npu")
            results.append(per_case)
    return results


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, name
    assert actual.isfinite().all(), name
    if expected.numel():
        error, scale = float((actual.double() - expected).abs().max()), float(expected.abs().max())
        assert error <= TOLERANCE * max(scale, 1.0), f"{name}: error {error:.3e} of {scale:.3e}"


@pytest.mark.parametrize("kind", ["npu_pool", "lazy_pool"])
def test_every_mode_equals_the_dense_layer(kind: str, request: pytest.FixtureRequest) -> None:
    pool: ProcessPool = request.getfixturevalue(kind)
    of_rank = pool.run(layers, list(VARIANTS.values()), timeout=200)
    for seed, case in enumerate(CASES):
        inputs = [make_inputs(case, rank, WORLD_SIZE, NUM_EXPERTS, seed) for rank in range(WORLD_SIZE)]
        expected, grad_experts_EDD = dense_layer(inputs, NUM_EXPERTS)
        per_rank = NUM_EXPERTS // WORLD_SIZE
        for number, variant in enumerate(VARIANTS):
            for rank in range(WORLD_SIZE):
                actual, where = of_rank[rank][number][case], f"{variant}, {case}, rank {rank}"
                for name, value in expected[rank].items():
                    assert_close(f"{where}: {name}", actual[name], value)
                own = grad_experts_EDD[rank * per_rank : (rank + 1) * per_rank]
                assert_close(f"{where}: grad_experts", actual["grad_experts"], own)


def without_a_wait() -> bool:
    """Whether a dispatcher that waits for nothing gives numbers that are none."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch, topologies([VARIANTS["all_to_all"]], group) as of:
        dispatcher = VARIANTS["all_to_all"].build(NUM_EXPERTS, group, of[None])
        rank = dist.get_rank()
        inputs = make_inputs("random", rank, WORLD_SIZE, NUM_EXPERTS, 0)
        own_start = exchange._start_all_to_all

        def start(*args: Any) -> exchange.Pending:
            pending = own_start(*args)
            patch.setattr(pending, "wait", lambda: pending._received)
            return pending

        patch.setattr(exchange, "_start_all_to_all", start)
        with torch.no_grad():
            y_TD = dispatcher.run(
                *(given.to("npu") for given in inputs),
                lambda rows_RD, counts_e: run_experts(rows_RD, counts_e, expert_weights(NUM_EXPERTS)[:2].to("npu")),
            )
        missing = bool(y_TD.isnan().any())
    torch.npu.synchronize()
    return missing


def test_the_lazy_suite_would_see_a_missing_wait(npu_pool: ProcessPool, lazy_pool: ProcessPool) -> None:
    assert lazy_pool.run(without_a_wait) == [True, True]
    assert npu_pool.run(without_a_wait) == [False, False]


class HostReads(TorchDispatchMode):
    """Notes where the host reads from the device, and so waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        copies = name in ("aten::_to_copy", "aten::copy_") and result.device.type == "cpu" and args[-1] is not result
        source = args[1] if name == "aten::copy_" else args[0] if args else None
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero") or (
            copies and isinstance(source, Tensor) and source.device.type == "npu"
        ):
            frames = [frame for frame in traceback.extract_stack() if "/dispatch/" in frame.filename]
            self.places.append(
                f"{name} at {frames[-1].filename.rpartition('/')[2]}: {frames[-1].line}" if frames else name
            )
        return result


def host_reads(mode: str) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    variant = Variant(mode=mode)
    with topologies([variant], group) as of:
        dispatcher = variant.build(NUM_EXPERTS, group, of[None])
        inputs = [given.to("npu") for given in make_inputs("random", dist.get_rank(), WORLD_SIZE, NUM_EXPERTS, 0)]
        # The first call also agrees on what the ranks are; later ones are what every step pays.
        for _ in range(2):
            with HostReads() as reads:
                dispatcher.run(*inputs, lambda rows_RD, counts_e: rows_RD)
    return reads.places


def test_where_the_host_waits_for_the_device(npu_pool: ProcessPool) -> None:
    """Counts and headers come to the host in one copy. What else is read (here the picks left out, per chunk) is named,
    so that no further wait comes in unseen."""
    for places in npu_pool.run(host_reads, "all_to_all"):
        in_counts = [place for place in places if "at all_to_all.py" in place]
        assert len(in_counts) == 1, places
        assert [place for place in places if place not in in_counts] == [
            "aten::_local_scalar_dense at permute.py: num_left_out = int(count_per_bin[0])"
        ]
