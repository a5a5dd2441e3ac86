"""dispatch.mode=auto: the criterion by its published values, and a measurement that all ranks agree on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dispatch.choose import Bandwidths, choose_mode, measure_bandwidths, picks_per_wanted_node, two_hops_pay
from dispatch.config import DispatchMode
from dispatch.topology import Topology, build_topology
from tests.process_pool import ProcessPool


def test_picks_per_wanted_node_follow_from_the_closed_form() -> None:
    """E = 192, k = 4: a token wants 0.94 of the one other of 2 nodes, and 2.06 of the three others of 4."""
    assert picks_per_wanted_node([96, 96], 4) == pytest.approx(4 / (2 * 0.94), rel=0.01)
    assert picks_per_wanted_node([48] * 4, 4) == pytest.approx(4 / (4 * 2.06 / 3), rel=0.01)
    assert picks_per_wanted_node([8, 8], 1) == 1
    assert picks_per_wanted_node([8, 8], 16) == 8


@pytest.mark.parametrize(("q", "threshold"), [(2, 1.75), (3, 1.3125), (4, 1.1667)])
def test_the_threshold_is_the_published_one(q: int, threshold: float) -> None:
    """Every token wants both nodes with q picks each, since it picks every expert: 2·q of 2·q."""
    for ratio, pays in ((0.99 * threshold, False), (1.01 * threshold, True)):
        bandwidths = Bandwidths(across=1.0, node=ratio)
        assert (
            two_hops_pay(
                experts_per_node=[q, q], top_k=2 * q, ranks_per_node=8, bandwidths=bandwidths, row_element_size=4
            )
            is pays
        )


def test_sums_that_go_home_in_fp32_raise_the_threshold_of_narrow_rows() -> None:
    """q = 4, R = 2: 1 · ½ · 4/3 = 0.67 in fp32, 1.5 · ½ · 4/2.5 = 1.2 in bf16."""
    shape: dict[str, Any] = {"experts_per_node": [4, 4], "top_k": 8, "ranks_per_node": 2}
    for size, threshold in ((4, 2 / 3), (2, 1.2)):
        for ratio, pays in ((0.99 * threshold, False), (1.01 * threshold, True)):
            bandwidths = Bandwidths(across=1.0, node=ratio)
            assert two_hops_pay(bandwidths=bandwidths, row_element_size=size, **shape) is pays


@given(
    experts=st.integers(1, 64),
    nodes=st.integers(1, 8),
    top_k=st.integers(1, 8),
    ranks=st.integers(1, 8),
    ratio=st.floats(0.01, 1000),
)
def test_two_hops_pay_just_where_they_take_less_time(
    experts: int, nodes: int, top_k: int, ranks: int, ratio: float
) -> None:
    top_k = min(top_k, experts * nodes)
    q = picks_per_wanted_node([experts] * nodes, top_k)
    flat, two_hops = q, 1 + (1 - 1 / ranks) * q / ratio
    pays = two_hops_pay(
        experts_per_node=[experts] * nodes,
        top_k=top_k,
        ranks_per_node=ranks,
        bandwidths=Bandwidths(across=1.0, node=ratio),
    )
    if nodes == 1:
        assert not pays
    elif not math.isclose(flat, two_hops, rel_tol=1e-9):
        assert pays == (two_hops < flat)


def grid(num_nodes: int, node_size: int) -> Topology:
    return Topology(
        ranks_per_node=node_size, num_nodes=num_nodes, node_size=node_size, node_group=None, cross_group=None
    )


def test_auto_goes_by_ranks_nodes_and_links() -> None:
    fast_inside = Bandwidths(across=1.0, node=50.0)
    even = {"experts_per_rank": [4] * 8, "top_k": 8}
    assert choose_mode(experts_per_rank=[8], top_k=2, topology=grid(1, 1), bandwidths=None) is DispatchMode.local
    assert choose_mode(topology=grid(1, 8), bandwidths=None, **even) is DispatchMode.all_to_all  # type: ignore[arg-type]
    for bandwidths, mode in (
        (fast_inside, DispatchMode.two_hop),
        (Bandwidths(across=1.0, node=0.9), DispatchMode.all_to_all),
    ):
        assert choose_mode(topology=grid(2, 4), bandwidths=bandwidths, **even) is mode  # type: ignore[arg-type]
    one_pick = choose_mode(experts_per_rank=[4] * 8, top_k=1, topology=grid(2, 4), bandwidths=fast_inside)
    assert one_pick is DispatchMode.all_to_all


def measured(ranks_per_node: int) -> tuple[float, float]:
    assert dist.group.WORLD is not None
    topology = build_topology(dist.group.WORLD, ranks_per_node)
    bandwidths = measure_bandwidths(topology, torch.device("cpu"))
    topology.close()
    return bandwidths.across, bandwidths.node


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (4, 2)])
def test_all_ranks_measure_the_same_bandwidths(
    process_pool: Callable[[int], ProcessPool], world_size: int, ranks_per_node: int
) -> None:
    results = process_pool(world_size).run(measured, ranks_per_node)
    assert len(set(results)) == 1
    across, node = results[0]
    assert 0 < across < math.inf
    assert node > 0
    assert math.isinf(node) == (ranks_per_node == 1)
