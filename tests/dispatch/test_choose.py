"""dispatch.mode=auto: the criterion by its published values, and a measurement that all ranks agree on."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dispatch import choose
from dispatch.build import build_dispatcher
from dispatch.choose import (
    Bandwidths,
    StepSize,
    choose_mode,
    measure_bandwidths,
    picks_per_wanted_node,
    resolve_auto,
    time_dispatchers,
    two_hops_pay,
)
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import TokenDispatcher
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


def resolved(ranks_per_node: int, trial: dict[str, float] | None, top_k: int) -> tuple[str, int]:
    """(what auto becomes, how many trials were made), where links inside are 50 × as fast and a trial says `trial`."""
    assert dist.group.WORLD is not None
    topology = build_topology(dist.group.WORLD, ranks_per_node)
    trials = []

    def time_dispatchers(candidates: list[TokenDispatcher], **_: object) -> list[float]:
        assert trial is not None
        trials.append(len(candidates))
        return [trial["all_to_all"], trial["two_hop"]]

    with (
        patch.object(choose, "measure_bandwidths", lambda *_: Bandwidths(across=1.0, node=50.0)),
        patch.object(choose, "time_dispatchers", time_dispatchers),
    ):
        config = resolve_auto(
            DispatchConfig(chunks=2),
            num_experts=8,
            top_k=top_k,
            group=dist.group.WORLD,
            topology=topology,
            device=torch.device("cpu"),
            size=StepSize(0 if trial is None else 16, 8, torch.float32),
        )
    topology.close()
    assert config.chunks == 2
    return config.mode.value, len(trials)


def test_a_trial_confirms_what_the_criterion_says(process_pool: Callable[[int], ProcessPool]) -> None:
    def run(*args: Any) -> tuple[str, int]:
        results = process_pool(2).run(resolved, *args)
        assert len(set(results)) == 1
        return results[0]  # type: ignore[no-any-return]

    assert run(1, {"all_to_all": 2.0, "two_hop": 1.0}, 4) == ("two_hop", 1)
    assert run(1, {"all_to_all": 1.0, "two_hop": 2.0}, 4) == ("all_to_all", 1)
    # The criterion stands where the trial is too close to tell.
    assert run(1, {"all_to_all": 0.97, "two_hop": 1.0}, 4) == ("two_hop", 1)
    assert run(1, {"all_to_all": 0.94, "two_hop": 1.0}, 4) == ("all_to_all", 1)
    # Nothing is tried where the criterion says no, where there is one node, or where the size is not known.
    assert run(1, {"all_to_all": 2.0, "two_hop": 1.0}, 1) == ("all_to_all", 0)
    assert run(2, {"all_to_all": 2.0, "two_hop": 1.0}, 4) == ("all_to_all", 0)
    assert run(1, None, 4) == ("two_hop", 0)


def tried() -> list[float]:
    assert dist.group.WORLD is not None
    topology = build_topology(dist.group.WORLD, 1)
    candidates = [
        build_dispatcher(DispatchConfig(mode=mode), num_experts=4, group=dist.group.WORLD, topology=topology)
        for mode in (DispatchMode.all_to_all, DispatchMode.two_hop)
    ]
    size = StepSize(32, 16, torch.bfloat16)
    return time_dispatchers(candidates, num_experts=4, top_k=2, size=size, device=torch.device("cpu"))


def test_a_trial_times_both_modes_alike_on_all_ranks(process_pool: Callable[[int], ProcessPool]) -> None:
    one, other = process_pool(2).run(tried)
    assert one == other
    assert min(one) > 0


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
