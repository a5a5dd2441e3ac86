"""Which rank holds which expert: plain integers, decided once when a dispatcher is built.

An expert's *slot* is its place when experts are listed rank by rank, each rank's in the order of its stacked weights.
Rows travel in slot order, so that what one rank gets lies together.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Experts by rank; ranks may hold different numbers of them, each at least one."""

    expert_ids_by_rank: tuple[tuple[int, ...], ...]
    """Global expert ids of each rank, in the order of its stacked weights."""

    @property
    def num_experts(self) -> int:
        """Experts in all."""
        return sum(len(expert_ids) for expert_ids in self.expert_ids_by_rank)

    @property
    def experts_per_rank(self) -> list[int]:
        """How many experts each rank holds."""
        return [len(expert_ids) for expert_ids in self.expert_ids_by_rank]

    @property
    def rank_of_expert(self) -> list[int]:
        """Rank of each global expert id."""
        holders = {expert: rank for rank, expert_ids in enumerate(self.expert_ids_by_rank) for expert in expert_ids}
        return [holders[expert] for expert in range(self.num_experts)]

    @property
    def slot_of_expert(self) -> list[int]:
        """Slot of each global expert id."""
        experts_by_slot = [expert for expert_ids in self.expert_ids_by_rank for expert in expert_ids]
        return sorted(range(len(experts_by_slot)), key=experts_by_slot.__getitem__)


def place_experts(num_experts: int, num_ranks: int, placement: Sequence[int] | None = None) -> Placement:
    """Decide which rank holds which expert.

    placement: rank of each global expert id; None: rank r holds the contiguous experts [⌊r·E/P⌋, ⌊(r+1)·E/P⌋).

    Raises ValueError when a rank would have no expert, or when the map does not fit the number of experts or ranks.
    """
    if num_ranks > num_experts:
        raise ValueError(
            f"parallel.expert ({num_ranks}) must not exceed moe.num_experts ({num_experts}), since each rank of an "
            f"expert group holds at least one expert; choose parallel.expert <= {num_experts} or more experts"
        )
    if placement is None:
        bounds = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
        return Placement(
            expert_ids_by_rank=tuple(tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(num_ranks))
        )
    if len(placement) != num_experts:
        raise ValueError(
            f"the expert placement names {len(placement)} experts, but moe.num_experts is {num_experts}; "
            "give one rank per expert"
        )
    strays = [(expert, rank) for expert, rank in enumerate(placement) if not 0 <= rank < num_ranks]
    if strays:
        raise ValueError(
            f"the expert placement puts expert {strays[0][0]} on rank {strays[0][1]}, but the expert group has ranks "
            f"0 to {num_ranks - 1}; correct {len(strays)} such entries or set parallel.expert"
        )
    by_rank = tuple(tuple(e for e, rank in enumerate(placement) if rank == r) for r in range(num_ranks))
    idle = [rank for rank, expert_ids in enumerate(by_rank) if not expert_ids]
    if idle:
        raise ValueError(
            f"the expert placement gives ranks {idle} no expert; each of the {num_ranks} ranks of an expert group "
            "needs at least one: move an expert there or lower parallel.expert"
        )
    return Placement(expert_ids_by_rank=by_rank)
