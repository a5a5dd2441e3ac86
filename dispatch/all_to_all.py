"""Flat all-to-all: each rank sends every rank just the rows it needs. On the token path, across an expert group.

Legend: T tokens, D hidden, K picks per token, N kept picks of this rank, E experts, P ranks, C chunks, e local experts,
R received rows. A slot is an expert's place when experts are listed rank by rank (dispatch/placement.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.agreement import (
    HEADER_LENGTH,
    Meeting,
    Status,
    Terms,
    check_headers,
    fingerprint,
    put_headers,
    terms_of,
)
from dispatch.exchange import RowExchange, exchange_counts, open_channel
from dispatch.interface import NOT_DISPATCHED, Dispatched, ExpertFunction
from dispatch.memory import attach_weights, detach_weights
from dispatch.overlap import Overlap, combine_stages, dispatch_stages, run_stages
from dispatch.permute import PickOrder, Reordering, by_expert_then_source, check_ids, sort_picks
from dispatch.placement import Placement
from dispatch.rows import add_rows, gather_rows, reorder_rows, sum_rows
from dispatch.traffic import Traffic


@dataclass(slots=True, kw_only=True)
class AllToAllPlan:
    """Where the rows of one chunk go."""

    order: PickOrder
    """Sent rows, by slot, token, pick."""
    exchange: RowExchange
    """Rows to each rank, and from each."""
    reordering: Reordering | None
    """From arrival order (source, expert, token) to expert order (expert, source, token); None with one expert."""
    tokens_per_local_expert_e: Tensor
    hidden_size: int
    weights_TK: Tensor | None
    """Weights that travel with the rows; None when they stay at home."""
    weight_R: Tensor | None = None
    """Those that came with the rows."""


class AllToAllDispatcher:
    """A TokenDispatcher with uneven all-to-all; ranks may hold different numbers of experts, and any rows may be zero.

    One call exchanges E · C counts per rank first, so that every receiver knows what comes, then the rows.
    """

    def __init__(
        self,
        placement: Placement,
        group: dist.ProcessGroup,
        *,
        ranks_per_node: int | None = None,
        overlap: Overlap | None = None,
        save_memory: bool = False,
        layer_index: int | None = None,
        check: bool = False,
    ) -> None:
        """ranks_per_node: consecutive ranks of the job that share a node; None: all do. save_memory: see memory.py.

        layer_index: named in errors. check: see dispatch/check.py.
        """
        self.num_experts = placement.num_experts
        self.local_expert_ids = placement.expert_ids_by_rank[dist.get_rank(group)]
        self.traffic = Traffic()
        self._overlap = Overlap() if overlap is None else overlap
        self._save_memory = save_memory
        self._channel = open_channel(
            group,
            ranks_per_node=dist.get_world_size() if ranks_per_node is None else ranks_per_node,
            traffic=self.traffic,
            forward_async=self._overlap.forward,
            backward_async=self._overlap.backward,
            check=check,
        )
        self._layer_index = layer_index
        self._placement = fingerprint(placement)
        self._meeting = Meeting()
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
        return dispatch_stages(self, x_TD, topk_expert_ids_TK)

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Send each row back to where its token lives; weighted sum over the token's kept picks there."""
        return combine_stages(self, rows_RD, topk_weights_TK, state)

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine, in chunks."""
        return run_stages(self, self._overlap, x_TD, topk_expert_ids_TK, topk_weights_TK, experts, beside)

    def plan(
        self,
        x_TD: Tensor,
        topk_expert_ids_of_chunk: Sequence[Tensor],
        topk_weights_of_chunk: Sequence[Tensor] | None = None,
    ) -> list[AllToAllPlan]:
        """Sort the picks of every chunk, and tell each rank how many rows of each chunk its experts get."""
        num_chunks, num_ranks, num_local = (
            len(topk_expert_ids_of_chunk),
            len(self._experts_per_rank),
            len(self.local_expert_ids),
        )
        terms = self._terms(x_TD, topk_expert_ids_of_chunk[0].shape[1], num_chunks)
        try:
            orders = [sort_picks(self._slots(ids_TK), self.num_experts) for ids_TK in topk_expert_ids_of_chunk]
        except ValueError:
            self._announce(x_TD, terms, Status.failed)
            raise
        self._meeting.hold(x_TD, terms, self._channel)
        # By slot, then chunk: what one rank is told lies together.
        counts_EC = torch.stack([order.tokens_per_expert_E for order in orders], 1)
        told = self._tell(counts_EC, terms)
        headers, received_PeC = told[:, :HEADER_LENGTH], told[:, HEADER_LENGTH:].view(num_ranks, num_local, num_chunks)
        # One copy to the host for all: the splits must be integers there.
        numbers = torch.cat((headers.flatten(), counts_EC.t().flatten(), received_PeC.sum(1).t().flatten())).tolist()
        end = num_ranks * HEADER_LENGTH
        check_headers(
            [numbers[start : start + HEADER_LENGTH] for start in range(0, end, HEADER_LENGTH)], self._channel.group
        )
        numbers = numbers[end:]
        plans = []
        weights_travel = self._save_memory and topk_weights_of_chunk is not None
        for chunk, order in enumerate(orders):
            sent = numbers[chunk * self.num_experts : (chunk + 1) * self.num_experts]
            start = num_chunks * self.num_experts + chunk * num_ranks
            exchange = RowExchange(
                send_rows_P=_sums_of_pieces(sent, self._experts_per_rank),
                receive_rows_P=tuple(numbers[start : start + num_ranks]),
                channel=self._channel,
            )
            received_Pe = received_PeC[:, :, chunk]
            plans.append(
                AllToAllPlan(
                    order=order,
                    exchange=exchange,
                    reordering=by_expert_then_source(received_Pe, sum(exchange.receive_rows_P))
                    if num_local > 1
                    else None,
                    tokens_per_local_expert_e=received_Pe.sum(0),
                    hidden_size=x_TD.shape[1],
                    weights_TK=topk_weights_of_chunk[chunk] if weights_travel and topk_weights_of_chunk else None,
                )
            )
        return plans

    def pack(self, x_TD: Tensor, plan: AllToAllPlan) -> Tensor:
        """Each token's row once per kept pick, with its weight behind it if weights travel."""
        rows_ND = gather_rows(x_TD, plan.order)
        if plan.weights_TK is None:
            return rows_ND
        return attach_weights(rows_ND, plan.weights_TK.float().flatten().index_select(0, plan.order.pick_N))

    def outward(self, plan: AllToAllPlan) -> RowExchange:
        """To the ranks of the experts."""
        return plan.exchange

    def unpack(self, rows: Tensor, plan: AllToAllPlan) -> tuple[Tensor, Tensor]:
        """By expert."""
        rows_RD = rows if plan.reordering is None else reorder_rows(rows, plan.reordering)
        if plan.weights_TK is not None:
            rows_RD, plan.weight_R = detach_weights(rows_RD, plan.hidden_size)
        return rows_RD, plan.tokens_per_local_expert_e

    def repack(self, rows_RD: Tensor, plan: AllToAllPlan) -> Tensor:
        """By source rank again."""
        return rows_RD if plan.reordering is None else reorder_rows(rows_RD, plan.reordering.inverse())

    def homeward(self, plan: AllToAllPlan) -> RowExchange:
        """To the ranks of the tokens."""
        return plan.exchange.inverse()

    def finish(self, rows: Tensor, topk_weights_TK: Tensor, plan: AllToAllPlan) -> Tensor:
        """Weighted sum over picks."""
        if plan.weights_TK is not None:
            return add_rows(rows, plan.order).to(rows.dtype)
        return sum_rows(rows, topk_weights_TK, plan.order)

    def row_weights(self, plan: AllToAllPlan) -> Tensor | None:
        """Weights of the rows that came."""
        return plan.weight_R

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """See TokenDispatcher."""
        self._announce(x_TD, self._terms(x_TD, top_k, self._overlap.chunks), Status.not_finite)

    def _announce(self, x_TD: Tensor, terms: Terms, status: Status) -> None:
        """Bad news in place of counts."""
        if self._meeting.hold(x_TD, terms, self._channel, status):
            return
        counts_EC = torch.zeros((self.num_experts, terms.chunks), dtype=torch.int64, device=x_TD.device)
        self._tell(counts_EC, terms, status)

    def _tell(self, counts_EC: Tensor, terms: Terms, status: Status = Status.ready) -> Tensor:
        """Tell each rank how many rows of each chunk each of its experts gets from here.

        Returns what this rank is told: [P, header and numbers], by expert, then chunk.
        """
        num_chunks, num_ranks = counts_EC.shape[1], len(self._experts_per_rank)
        numbers_P = [count * num_chunks for count in self._experts_per_rank]
        own = HEADER_LENGTH + len(self.local_expert_ids) * num_chunks
        return exchange_counts(
            put_headers(counts_EC.flatten(), numbers_P, terms, status),
            [HEADER_LENGTH + numbers for numbers in numbers_P],
            [own] * num_ranks,
            self._channel,
        ).view(num_ranks, own)

    def _terms(self, x_TD: Tensor, top_k: int, num_chunks: int) -> Terms:
        return terms_of(x_TD, top_k, layer_index=self._layer_index, placement=self._placement, chunks=num_chunks)

    def _slots(self, topk_expert_ids_TK: Tensor) -> Tensor:
        if self._slot_table is None:
            return topk_expert_ids_TK
        check_ids(topk_expert_ids_TK, self.num_experts)
        self._slot_table = self._slot_table.to(topk_expert_ids_TK.device)
        return self._slot_table[topk_expert_ids_TK]


def _sums_of_pieces(counts: Sequence[int], piece_lengths: Sequence[int]) -> tuple[int, ...]:
    """Sums over consecutive pieces of the given lengths."""
    sums, start = [], 0
    for length in piece_lengths:
        sums.append(sum(counts[start : start + length]))
        start += length
    return tuple(sums)
