"""Every mode against the reference on 1, 2 and 4 ranks; the reference against a dense layer without a dispatcher."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.dispatch.cases import CASES, Variant, compare_variants, compare_with_reference, dense_layer, make_inputs
from tests.process_pool import ProcessPool

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
"""Largest error relative to the largest element. fp32: sums are reordered by at most one step, which is far within. bf16:
one rounding step on either side."""
DENSE_TOLERANCE = 1e-5
"""fp32 against float64."""


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert actual.isfinite().all(), name
    if expected.numel():
        error = float((actual.double() - expected.double()).abs().max())
        scale = float(expected.abs().max())
        assert error <= tolerance * scale, f"{name}: error {error:.3e} of {scale:.3e}"


def placements(world_size: int, num_experts: int) -> list[list[int] | None]:
    """The default; uneven and out of order; all but the other ranks' single expert on the last rank."""
    if world_size == 1:
        return [None]
    scattered = [(5 * expert + 1) % world_size for expert in range(num_experts)]
    heavy_last = [min(expert, world_size - 1) for expert in range(num_experts)]
    return [None, scattered, heavy_last[::-1]]


# All modes, and both hops wherever there can be two: one node, a grid of nodes, every rank a node of its own.
VARIANTS = {
    1: [Variant(mode="local")],
    2: [
        Variant(mode="all_to_all"),
        Variant(mode="all_gather"),
        Variant(mode="all_gather", ranks_per_node=1, chunks=3),
        Variant(mode="two_hop"),
        Variant(mode="two_hop", ranks_per_node=1),
        Variant(mode="two_hop", ranks_per_node=1, chunks=3),
    ],
    4: [
        Variant(mode="all_to_all", ranks_per_node=2),
        Variant(mode="all_gather", ranks_per_node=2),
        Variant(mode="two_hop", ranks_per_node=2),
        Variant(mode="two_hop", ranks_per_node=2, chunks=2),
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mode_equals_reference(process_pool: Callable[[int], ProcessPool], world_size: int, dtype: torch.dtype) -> None:
    variants = VARIANTS[world_size]
    cases = [
        (case, num_experts, 1, placement)
        for case in CASES
        for num_experts in (world_size, 7)
        for placement in placements(world_size, num_experts)
        # On one expert a rank a placement only renames ranks; four processes on few cores take their time.
        if world_size < 4 or placement is None or num_experts == 7
    ]
    for results in process_pool(world_size).run(compare_variants, variants, cases, dtype):
        for case, (of_variants, reference) in zip(cases, results, strict=True):
            for variant, ours in zip(variants, of_variants, strict=True):
                for name, expected in reference.items():
                    if variant.chunks == 1 and name in ("rows", "tokens_per_local_expert"):
                        assert torch.equal(ours[name], expected), (variant, case, name)
                    elif name not in ("rows", "tokens_per_local_expert"):
                        assert_close(f"{variant} {case}: {name}", ours[name], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reference_equals_a_dense_layer(process_pool: Callable[[int], ProcessPool], world_size: int) -> None:
    num_experts = 8
    cases = [(case, num_experts, 2, None) for case in CASES]
    by_rank = process_pool(world_size).run(compare_with_reference, "reference", cases, torch.float32)
    for index, (case, _, seed, _) in enumerate(cases):
        inputs = [make_inputs(case, rank, world_size, num_experts, seed) for rank in range(world_size)]
        dense, grad_experts_EDD = dense_layer(inputs, num_experts)
        references = [results[index][1] for results in by_rank]
        for rank in range(world_size):
            for name, expected in dense[rank].items():
                assert_close(f"{case}, rank {rank}: {name}", references[rank][name], expected, DENSE_TOLERANCE)
        grad_experts = torch.cat([reference["grad_experts"] for reference in references])
        assert_close(f"{case}: grad_experts", grad_experts, grad_experts_EDD, DENSE_TOLERANCE)
