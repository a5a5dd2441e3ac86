"""Which dispatcher a configuration gives, who holds which expert, and what is refused."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.local import LocalDispatcher
from dispatch.placement import place_experts
from dispatch.reference import ReferenceDispatcher
from tests.process_pool import ProcessPool


def build_on_rank(mode: str, num_experts: int, placement: list[int] | None) -> tuple[str, tuple[int, ...]]:
    dispatcher = build_dispatcher(
        DispatchConfig(mode=DispatchMode[mode]), num_experts=num_experts, group=dist.group.WORLD, placement=placement
    )
    return type(dispatcher).__name__, dispatcher.local_expert_ids


def message_on_rank(mode: str, num_experts: int) -> str:
    with pytest.raises(ValueError, match=r"dispatch|parallel") as caught:
        build_on_rank(mode, num_experts, None)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "local", "all_to_all"])
def test_one_rank_needs_no_exchange(mode: str) -> None:
    dispatcher = build_dispatcher(DispatchConfig(mode=DispatchMode[mode]), num_experts=3, group=None)
    assert isinstance(dispatcher, LocalDispatcher)
    assert dispatcher.local_expert_ids == (0, 1, 2)


def test_reference_works_on_one_rank() -> None:
    dispatcher = build_dispatcher(DispatchConfig(mode=DispatchMode.reference), num_experts=3, group=None)
    assert isinstance(dispatcher, ReferenceDispatcher)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("auto", "AllToAllDispatcher"), ("all_to_all", "AllToAllDispatcher"), ("reference", "ReferenceDispatcher")],
)
def test_two_ranks_share_the_experts(process_pool: Callable[[int], ProcessPool], mode: str, name: str) -> None:
    assert process_pool(2).run(build_on_rank, mode, 64, None) == [
        (name, tuple(range(32))),
        (name, tuple(range(32, 64))),
    ]
    assert process_pool(2).run(build_on_rank, mode, 5, [1, 1, 0, 1, 0]) == [(name, (2, 4)), (name, (0, 1, 3))]


def test_what_cannot_work_is_refused_with_a_way_out(process_pool: Callable[[int], ProcessPool]) -> None:
    local, too_few = (process_pool(2).run(message_on_rank, mode, n)[0] for mode, n in (("local", 4), ("auto", 1)))
    assert "dispatch.mode (local)" in local
    assert "choose dispatch.mode=auto or parallel.expert=1" in local
    assert "parallel.expert (2) must not exceed moe.num_experts (1)" in too_few


def test_experts_are_split_contiguously_even_when_uneven() -> None:
    placed = place_experts(192, 7)
    assert placed.experts_per_rank == [27, 27, 28, 27, 28, 27, 28]
    assert [expert for ids in placed.expert_ids_by_rank for expert in ids] == list(range(192))


def test_slots_count_experts_rank_by_rank() -> None:
    """Experts 0 and 3 on rank 1, 1 and 2 on rank 0: listed rank by rank that is 1 2 | 0 3."""
    placed = place_experts(4, 2, [1, 0, 0, 1])
    assert placed.expert_ids_by_rank == ((1, 2), (0, 3))
    assert placed.slot_of_expert == [2, 0, 1, 3]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ([0, 1, 0], r"names 3 experts, but moe\.num_experts is 4"),
        ([0, 1, 2, 0], r"puts expert 2 on rank 2, but the expert group has ranks 0 to 1"),
        ([1, 1, 1, 1], r"gives ranks \[0\] no expert"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place_experts(4, 2, placement)
