"""Static shapes: every rank sends every expert exactly its capacity of rows, filled up with zeros. On the token path.

The sizes follow from the number of tokens alone, so no counts are exchanged and the host waits for no device: it can run
ahead, and a captured graph can be replayed. The price is rows of zeros: capacity_factor − 1 of the even load and more,
which travel and are computed. The limit (dispatch/capacity.py, scope local) must have been applied before.

Legend: T tokens, D hidden, K picks per token, E experts, e local experts, P ranks, c rows per source and expert,
N = E·c rows sent, R = P·e·c rows received. A slot is an expert's place when experts are listed rank by rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.agreement import Terms, fingerprint, gather_numbers, terms_of
from dispatch.capacity import ExpertLimit, places_in_bins
from dispatch.exchange import Channel, RowExchange, begin, end
from dispatch.interface import NOT_DISPATCHED, Dispatched, ExpertFunction
from dispatch.placement import Placement
from dispatch.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedPlan:
    """Where each pick goes."""

    row_of_pick_KT: Tensor
    """int64: row of pick (t, k) among the N sent, or NOT_DISPATCHED."""
    token_N: Tensor
    """int64: token of a row; T for a row of zeros."""
    weight_place_N: Tensor
    """int64: flat pick t · K + k of a row; T · K for a row of zeros."""
    rows_per_expert: int
    """c."""


class PaddedDispatcher:
    """A TokenDispatcher whose shapes do not depend on the routing."""

    def __init__(
        self,
        placement: Placement,
        limit: ExpertLimit,
        channel: Channel | None,
        *,
        traffic: Traffic,
        overlap_shared: bool = True,
        layer_index: int | None = None,
    ) -> None:
        """limit: gives c. channel: the expert group; None with one rank."""
        rank = 0 if channel is None else dist.get_rank(channel.group)
        self.num_experts = placement.num_experts
        self.local_expert_ids = placement.expert_ids_by_rank[rank]
        self.traffic = traffic
        self._limit = limit
        self._channel = channel
        self._overlap_shared = overlap_shared
        self._layer_index = layer_index
        self._placement = fingerprint(placement)
        self._experts_per_rank = placement.experts_per_rank
        self._slot_table = torch.tensor([*placement.slot_of_expert, NOT_DISPATCHED], dtype=torch.int64)
        self._agreed: set[tuple[int, Terms]] = set()

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Rows sorted by local expert, source rank, token, pick, then zeros up to c; counts are P · c."""
        plan = self._plan(x_TD, topk_expert_ids_TK)
        rows = _Fill.apply(x_TD, plan)
        if self._channel is not None:
            rows = end(begin(rows, self._exchange(plan)))
        return Dispatched(self._by_expert(rows, plan), self._counts(plan, rows.device), plan)

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Send all rows back; weighted sum over the token's kept picks."""
        assert isinstance(state, PaddedPlan)
        rows = self._by_source(rows_RD, state)
        if self._channel is not None:
            rows = end(begin(rows, self._exchange(state).inverse()))
        y_TD: Tensor = _Sum.apply(rows, topk_weights_TK, state)
        return y_TD

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine; `beside` while the rows are on their way."""
        plan = self._plan(x_TD, topk_expert_ids_TK)
        rows = _Fill.apply(x_TD, plan)
        flight = None if self._channel is None else begin(rows, self._exchange(plan))
        y_beside = beside() if beside is not None and self._overlap_shared else None
        rows = rows if flight is None else end(flight)
        results = experts(self._by_expert(rows, plan), self._counts(plan, rows.device))
        y_TD = self.combine(results, topk_weights_TK, plan)
        if beside is not None and y_beside is None:
            y_beside = beside()
        return y_TD if y_beside is None else y_TD + y_beside

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """Nothing: no agreement goes before, so a router whose output is not finite must be found by the step's sums."""

    def _plan(self, x_TD: Tensor, ids_TK: Tensor) -> PaddedPlan:
        num_tokens, top_k = ids_TK.shape
        self._agree(x_TD, num_tokens, top_k)
        rows_per_expert = int(self._limit.capacity(num_tokens))
        self._slot_table = self._slot_table.to(ids_TK.device)
        slot_M = self._slot_table[ids_TK.flatten()]
        place_M = places_in_bins(slot_M, self.num_experts)
        fits_M = (slot_M != NOT_DISPATCHED) & (place_M < rows_per_expert)
        row_M = (slot_M * rows_per_expert + place_M).where(fits_M, NOT_DISPATCHED)
        # One row more than there are takes what goes nowhere.
        num_rows = self.num_experts * rows_per_expert
        pick_N = torch.full((num_rows + 1,), num_tokens * top_k, dtype=torch.int64, device=slot_M.device)
        pick_N[row_M.where(fits_M, num_rows)] = torch.arange(slot_M.shape[0], device=slot_M.device)
        pick_N = pick_N[:num_rows]
        return PaddedPlan(
            row_of_pick_KT=row_M.view(num_tokens, top_k).t().contiguous(),
            token_N=torch.div(pick_N, max(top_k, 1), rounding_mode="floor"),
            weight_place_N=pick_N,
            rows_per_expert=rows_per_expert,
        )

    def _agree(self, x_TD: Tensor, num_tokens: int, top_k: int) -> None:
        """Once for every number of tokens: all ranks must have the same, or no size would fit."""
        terms = terms_of(x_TD, top_k, layer_index=self._layer_index, placement=self._placement, chunks=1)
        if self._channel is None or (num_tokens, terms) in self._agreed:
            return
        told = torch.tensor([num_tokens], dtype=torch.int64, device=x_TD.device)
        tokens_P = gather_numbers(told, terms, self._channel).flatten().tolist()
        if len(set(tokens_P)) > 1:
            raise ValueError(
                f"dispatch.pad_to_capacity needs equally many tokens on all ranks of an expert group, but they have "
                f"{tokens_P}; give them equal batches or set dispatch.pad_to_capacity=false"
            )
        self._agreed.add((num_tokens, terms))

    def _exchange(self, plan: PaddedPlan) -> RowExchange:
        assert self._channel is not None
        own = len(self.local_expert_ids) * plan.rows_per_expert
        return RowExchange(
            send_rows_P=[count * plan.rows_per_expert for count in self._experts_per_rank],
            receive_rows_P=[own] * self._channel.num_ranks,
            channel=self._channel,
        )

    def _by_expert(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        """[P, e, c, D] to [e, P, c, D]."""
        num_local, rows_per_expert = len(self.local_expert_ids), plan.rows_per_expert
        blocks = rows.view(len(self._experts_per_rank), num_local, rows_per_expert, rows.shape[1])
        return blocks.transpose(0, 1).reshape(rows.shape)

    def _by_source(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        num_local, rows_per_expert = len(self.local_expert_ids), plan.rows_per_expert
        blocks = rows.view(num_local, len(self._experts_per_rank), rows_per_expert, rows.shape[1])
        return blocks.transpose(0, 1).reshape(rows.shape)

    def _counts(self, plan: PaddedPlan, device: torch.device) -> Tensor:
        rows = len(self._experts_per_rank) * plan.rows_per_expert
        return torch.full((len(self.local_expert_ids),), rows, dtype=torch.int64, device=device)


def _sum(rows_ND: Tensor, weights_TK: Tensor | None, row_of_pick_KT: Tensor) -> Tensor:
    """Σ_k weight · row over kept picks in fp32, by ascending k: [T, D]."""
    total_TD = rows_ND.new_zeros((row_of_pick_KT.shape[1], rows_ND.shape[1]), dtype=torch.float32)
    if rows_ND.shape[0] == 0:
        return total_TD
    for k, row_T in enumerate(row_of_pick_KT):
        # Masking rather than a zero weight: 0 · NaN of some other token's row would be NaN.
        absent_T1 = (row_T < 0).unsqueeze(1)
        picked_TD = rows_ND.index_select(0, row_T.clamp(min=0)).float().masked_fill(absent_T1, 0)
        if weights_TK is not None:
            picked_TD = picked_TD * weights_TK[:, k : k + 1].masked_fill(absent_T1, 0)
        total_TD += picked_TD
    return total_TD


def _with_zeros(x_TD: Tensor) -> Tensor:
    """One more row, of zeros: what a row without a token is read from."""
    return torch.cat((x_TD, x_TD.new_zeros((1, x_TD.shape[1]))))


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.plan = plan
        return _with_zeros(x_TD).index_select(0, plan.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return _sum(grad_ND, None, ctx.plan.row_of_pick_KT).to(grad_ND.dtype), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, topk_weights_TK: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.save_for_backward(rows_ND, topk_weights_TK)
        ctx.plan = plan
        return _sum(rows_ND, topk_weights_TK.float(), plan.row_of_pick_KT).to(rows_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_ND, topk_weights_TK = ctx.saved_tensors
        plan: PaddedPlan = ctx.plan
        # A row of zeros has grad 0 and weight 0, so an expert gets nothing from it.
        grad_of_row_ND = _with_zeros(grad_TD).index_select(0, plan.token_N).float()
        flat = torch.cat((topk_weights_TK.float().flatten(), grad_of_row_ND.new_zeros(1)))
        grad_weights = torch.zeros_like(flat)
        grad_weights[plan.weight_place_N] = torch.linalg.vecdot(rows_ND.float(), grad_of_row_ND)
        grad_rows_ND = grad_of_row_ND * flat.index_select(0, plan.weight_place_N).unsqueeze(1)
        return (
            grad_rows_ND.to(rows_ND.dtype),
            grad_weights[:-1].view_as(topk_weights_TK).to(topk_weights_TK.dtype),
            None,
        )
