"""Flat all-to-all: each rank sends every rank just the rows it needs. On the token path, across an expert group.

Legend: T tokens, D hidden, K picks per token, N kept picks of this rank, E experts, P ranks, e local experts,
R received rows. A slot is an expert's place when experts are listed rank by rank (dispatch/placement.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.exchange import exchange_rows
from dispatch.interface import NOT_DISPATCHED, Dispatched, ExpertFunction
from dispatch.permute import PickOrder, Reordering, by_expert_then_source, sort_picks
from dispatch.placement import Placement
from dispatch.rows import gather_rows, reorder_rows, sum_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllState:
    """What combine needs to undo dispatch."""

    order: PickOrder
    """Sent rows, by slot, token, pick."""
    send_rows_P: tuple[int, ...]
    """Rows this rank sent to each rank."""
    receive_rows_P: tuple[int, ...]
    """Rows this rank got from each rank."""
    reordering: Reordering | None
    """From arrival order (source, expert, token) to expert order (expert, source, token); None with one expert."""


class AllToAllDispatcher:
    """A TokenDispatcher with uneven all-to-all; ranks may hold different numbers of experts, and any rows may be zero.

    One call exchanges E counts per rank first, so that every receiver knows what comes, then the rows.
    """

    def __init__(self, placement: Placement, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        self.num_experts = placement.num_experts
        self.local_expert_ids = placement.expert_ids_by_rank[rank]
        self._group = group
        self._experts_per_rank = placement.experts_per_rank
        slot_of_expert = placement.slot_of_expert
        # The last entry serves NOT_DISPATCHED (index −1). No table when slots are the expert ids.
        self._slot_table = (
            None
            if slot_of_expert == list(range(self.num_experts))
            else torch.tensor([*slot_of_expert, NOT_DISPATCHED], dtype=torch.int64)
        )

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Rows of this rank's experts from all ranks, sorted by local expert, source rank, token, pick."""
        order = sort_picks(self._slots(topk_expert_ids_TK), self.num_experts)
        num_ranks, num_local_experts = len(self._experts_per_rank), len(self.local_expert_ids)
        received_Pe = order.tokens_per_expert_E.new_empty(num_ranks * num_local_experts)
        dist.all_to_all_single(
            received_Pe,
            order.tokens_per_expert_E.contiguous(),
            [num_local_experts] * num_ranks,
            self._experts_per_rank,
            group=self._group,
        )
        received_Pe = received_Pe.view(num_ranks, num_local_experts)
        # One copy to the host for both: the splits must be integers there.
        counts = torch.cat((order.tokens_per_expert_E, received_Pe.sum(1))).tolist()
        send_rows_P = _sums_of_pieces(counts[: self.num_experts], self._experts_per_rank)
        receive_rows_P = tuple(counts[self.num_experts :])
        rows_RD = exchange_rows(gather_rows(x_TD, order), send_rows_P, receive_rows_P, self._group)
        reordering = None
        if num_local_experts > 1:
            reordering = by_expert_then_source(received_Pe, rows_RD.shape[0])
            rows_RD = reorder_rows(rows_RD, reordering)
        state = AllToAllState(
            order=order, send_rows_P=send_rows_P, receive_rows_P=receive_rows_P, reordering=reordering
        )
        return Dispatched(rows_RD, received_Pe.sum(0), state)

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Send each row back to where its token lives; weighted sum over the token's kept picks there."""
        assert isinstance(state, AllToAllState)
        if state.reordering is not None:
            rows_RD = reorder_rows(rows_RD, state.reordering.inverse())
        rows_ND = exchange_rows(rows_RD, state.receive_rows_P, state.send_rows_P, self._group)
        return sum_rows(rows_ND, topk_weights_TK, state.order)

    def run(self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: ExpertFunction) -> Tensor:
        """dispatch, experts, combine, in one piece."""
        rows_RD, tokens_per_local_expert_e, state = self.dispatch(x_TD, topk_expert_ids_TK)
        return self.combine(experts(rows_RD, tokens_per_local_expert_e), topk_weights_TK, state)

    def _slots(self, topk_expert_ids_TK: Tensor) -> Tensor:
        if self._slot_table is None:
            return topk_expert_ids_TK
        self._slot_table = self._slot_table.to(topk_expert_ids_TK.device)
        return self._slot_table[topk_expert_ids_TK]


def _sums_of_pieces(counts: list[int], piece_lengths: list[int]) -> tuple[int, ...]:
    """Sums over consecutive pieces of the given lengths."""
    ends = torch.tensor(piece_lengths).cumsum(0).tolist()
    return tuple(sum(counts[end - length : end]) for end, length in zip(ends, piece_lengths, strict=True))
