"""Dispatch by slow, obvious loops: the definition that every other mode is compared with, in outputs and in gradients.

Every rank gets every token of every rank, finds by looking at each pick which rows its experts need, and after the
experts gets every rank's rows and picks out its own.

    rows of a rank = [x_s[t] for expert e on the rank, for source rank s, for token t, for pick k, if ids_s[t, k] = e]
    y[t]           = Σ_k weight[t, k] · (expert ids[t, k])(x[t]), over k with ids[t, k] ≠ NOT_DISPATCHED, in fp32

Legend: T tokens on this rank, D hidden, K picks per token, R rows of this rank's experts, P ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.agreement import Status, fingerprint, gather_numbers, terms_of
from dispatch.exchange import open_channel
from dispatch.interface import NOT_DISPATCHED, Dispatched, ExpertFunction
from dispatch.placement import Placement
from dispatch.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceState:
    """Where each row of every rank comes from."""

    layout: tuple[tuple[tuple[int, int, int], ...], ...]
    """layout[rank][row] = (source rank, token, pick)."""
    topk_expert_ids_TK: Tensor
    """This rank's picks."""


class ReferenceDispatcher:
    """A TokenDispatcher that anyone can check by reading it. For tests and small doubts, not for training."""

    def __init__(
        self, placement: Placement, group: dist.ProcessGroup | None, *, layer_index: int | None = None
    ) -> None:
        """group None: one rank, which holds every expert. layer_index: named in errors."""
        self.traffic = Traffic()
        """Stays empty: what the reference moves says nothing about any mode."""
        self._rank = 0 if group is None else dist.get_rank(group)
        self._group = group
        self._placement = placement
        self._layer_index = layer_index
        self.num_experts = placement.num_experts
        self.local_expert_ids = placement.expert_ids_by_rank[self._rank]

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """See TokenDispatcher."""
        self._agree(x_TD, top_k, Status.not_finite)

    def _agree(self, x_TD: Tensor, top_k: int, status: Status) -> None:
        if self._group is None:
            return
        terms = terms_of(x_TD, top_k, layer_index=self._layer_index, placement=fingerprint(self._placement), chunks=1)
        channel = open_channel(self._group, ranks_per_node=dist.get_world_size(), traffic=Traffic())
        gather_numbers(torch.zeros(0, dtype=torch.int64, device=x_TD.device), terms, channel, status)

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Rows of this rank's experts from all ranks, sorted by local expert, source rank, token, pick."""
        self._agree(x_TD, topk_expert_ids_TK.shape[1], Status.ready)
        # fp32, so that a token's gradient is the fp32 sum over its picks.
        x_of_rank = from_every_rank(x_TD.float(), self._group)
        ids_of_rank = [ids_TK.tolist() for ids_TK in from_every_rank(topk_expert_ids_TK, self._group)]
        layout: list[tuple[tuple[int, int, int], ...]] = []
        for expert_ids in self._placement.expert_ids_by_rank:
            rows = []
            for expert in expert_ids:
                for source, ids in enumerate(ids_of_rank):
                    for token, picks in enumerate(ids):
                        for pick, picked in enumerate(picks):
                            if picked == expert:
                                rows.append((source, token, pick))
            layout.append(tuple(rows))
        first_of_rank = [sum(x_SD.shape[0] for x_SD in x_of_rank[:source]) for source in range(len(x_of_rank))]
        wanted = [first_of_rank[source] + token for source, token, _ in layout[self._rank]]
        rows_RD = torch.cat(x_of_rank)[torch.tensor(wanted, dtype=torch.int64, device=x_TD.device)].to(x_TD.dtype)
        counts = [sum(picks.count(expert) for ids in ids_of_rank for picks in ids) for expert in self.local_expert_ids]
        tokens_per_local_expert_e = torch.tensor(counts, dtype=torch.int64, device=x_TD.device)
        state = ReferenceState(layout=tuple(layout), topk_expert_ids_TK=topk_expert_ids_TK)
        return Dispatched(rows_RD, tokens_per_local_expert_e, state)

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Weighted sum over each token's kept picks, taken from the rows of all ranks."""
        assert isinstance(state, ReferenceState)
        all_rows_ND = torch.cat(from_every_rank(rows_RD, self._group))
        row_of = {place: row for row, place in enumerate(place for rows in state.layout for place in rows)}
        ids_TK = state.topk_expert_ids_TK.tolist()
        y_T = []
        for token, picks in enumerate(ids_TK):
            # Empty sums: a token without a kept pick gets exact zeros that are still connected to the graph.
            y_D = all_rows_ND[:0].float().sum(0) + topk_weights_TK[token, :0].float().sum()
            for pick, expert in enumerate(picks):
                if expert != NOT_DISPATCHED:
                    row_D = all_rows_ND[row_of[self._rank, token, pick]].float()
                    y_D = y_D + topk_weights_TK[token, pick].float() * row_D
            y_T.append(y_D.to(rows_RD.dtype))
        return torch.stack(y_T) if y_T else all_rows_ND[:0] * topk_weights_TK.sum().to(rows_RD.dtype)

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine, in one piece."""
        rows_RD, tokens_per_local_expert_e, state = self.dispatch(x_TD, topk_expert_ids_TK)
        y_TD = self.combine(experts(rows_RD, tokens_per_local_expert_e), topk_weights_TK, state)
        return y_TD if beside is None else y_TD + beside()


def from_every_rank(part_AB: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's [A, B] (A may differ), by rank; the gradient of a part is the sum of what all ranks say of it."""
    if group is None:
        return [part_AB]
    # The anchor makes every rank take part in backward; see dispatch/exchange.py.
    anchor = torch.zeros((), device=part_AB.device, requires_grad=part_AB.is_floating_point())
    return list(_FromEveryRank.apply(part_AB, anchor, group))


class _FromEveryRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_AB: Tensor, anchor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group = group
        lengths = [torch.zeros(1, dtype=torch.int64, device=part_AB.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, torch.tensor([part_AB.shape[0]], device=part_AB.device), group=group)
        parts = []
        for rank, length in enumerate(lengths):
            part = part_AB.new_empty((int(length), part_AB.shape[1]))
            if rank == dist.get_rank(group):
                part.copy_(part_AB)
            dist.broadcast(part, group_src=rank, group=group)
            parts.append(part)
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_of_parts: Tensor) -> tuple[Tensor, None, None]:
        own = torch.empty(0)
        for rank, grad in enumerate(grad_of_parts):
            total = grad.float().contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            if rank == dist.get_rank(ctx.group):
                own = total.to(grad.dtype)
        return own, None, None
