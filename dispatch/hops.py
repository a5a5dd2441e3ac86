"""Routes for tokens whose partial sums are formed where their experts are: what `all_gather` and `two_hop` share.

A token visits other ranks, with its combine weights beside it; there its row is copied once per local expert, and the
weighted results are summed before they go home. A route is up to two hops, across nodes and then inside a node; a hop
is a linear map S of rows over ranks (`spread`) and its transpose Sᵀ (`collect`). So

    visitors = S·(x, weights)    y = Sᵀ · Σ_k weight · result    and in backward S brings dL/dy out, Sᵀ brings dL/dx home.

Rows go out in their own dtype; all that is summed (results, gradients) is fp32 until it is home, in a fixed order.

Legend: T tokens on this rank, D hidden, K picks per token, V visitors on this rank, C columns of what travels (D + K or
fewer), R rows of this rank's experts, g ranks of a hop's group.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.exchange import Channel, Pending, RowExchange, start_all_gather
from dispatch.permute import PickOrder
from dispatch.rows import sum_over_picks
from dispatch.traffic import Phase


class Then(Pending):
    """A pending exchange, and what is done with its rows when they are there."""

    def __init__(self, pending: Pending, after: Callable[[Tensor], Tensor]) -> None:
        self._pending = pending
        self._after = after

    def wait(self) -> Tensor:
        """The exchange's rows, worked on."""
        return self._after(self._pending.wait())


class Hop(Protocol):
    """Rows from each rank of a group to those that want them, and sums on the way back."""

    @property
    def channel(self) -> Channel:
        """Of the group."""
        ...

    def spread(self, rows: Tensor, phase: Phase) -> Pending:
        """[T, C] of any dtype to [V, C], by source rank."""
        ...

    def collect(self, rows: Tensor, phase: Phase) -> Pending:
        """The transpose: [V, C] fp32 to [T, C] fp32, each the sum over where it was spread to, by ascending rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectHop:
    """Each row goes to the ranks that want it, and to no other. A Hop."""

    order: PickOrder
    """Rows by target rank, then token."""
    exchange: RowExchange

    @property
    def channel(self) -> Channel:
        """The channel of the exchange."""
        return self.exchange.channel

    def spread(self, rows: Tensor, phase: Phase) -> Pending:
        """See Hop."""
        return self.exchange.start(rows.index_select(0, self.order.token_N), phase)

    def collect(self, rows: Tensor, phase: Phase) -> Pending:
        """See Hop."""
        return Then(self.exchange.inverse().start(rows, phase), lambda home: sum_over_picks(home, None, self.order))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherHop:
    """Every row goes to every rank. Those with fewer rows than the fullest fill up with zeros. A Hop.

    Sums come back through an exchange and are formed here by ascending rank: the same bits in every run, and gloo's own
    reduce-scatter took three times as long (3.3 ms against 1.3 for 256 × 512 fp32 per rank, 2 ranks; 11 against 3.5 on 4).
    """

    channel: Channel
    num_rows: int
    """Rows of the fullest rank: V = g · num_rows."""
    own_rows: int
    """Rows of this rank, T."""

    def spread(self, rows: Tensor, phase: Phase) -> Pending:
        """See Hop."""
        channel = self.channel
        rows = F.pad(rows, (0, 0, 0, self.num_rows - self.own_rows))
        channel.traffic.count(
            phase, channel.links_P, [self.num_rows] * channel.num_ranks, rows.shape[1] * rows.element_size()
        )
        return start_all_gather(rows, channel, phase)

    def collect(self, rows: Tensor, phase: Phase) -> Pending:
        """See Hop."""
        splits = (self.num_rows,) * self.channel.num_ranks
        exchange = RowExchange(send_rows_P=splits, receive_rows_P=splits, channel=self.channel)
        return Then(exchange.start(rows, phase), self._sum)

    def _sum(self, rows: Tensor) -> Tensor:
        total, *others = rows.split(self.num_rows) if self.num_rows else (rows,)
        total = total.clone()
        for other in others:
            total += other
        return total[: self.own_rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Up to two hops; what is under way between the halves of an exchange is the first hop out and the last hop home.

    That is the one across nodes, where there is one: the slow one.
    """

    hops: tuple[Hop, ...]
    """In the order of the way out, at least one."""

    def spread(self, rows: Tensor, phase: Phase) -> Pending:
        """All hops out, in one dtype."""
        first, *rest = self.hops

        def go_on(rows: Tensor) -> Tensor:
            for hop in rest:
                rows = hop.spread(rows, phase).wait()
            return rows

        return Then(first.spread(rows, phase), go_on)

    def collect(self, rows: Tensor, phase: Phase) -> Pending:
        """All hops home, summing."""
        first, *rest = self.hops
        for hop in reversed(rest):
            rows = hop.collect(rows, phase).wait()
        return first.collect(rows, phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outward:
    """fp32 [T, C] to fp32 [V, C]; the first `row_width` columns travel in `row_dtype`, the others in fp32. A Transfer."""

    route: Route
    row_width: int
    row_dtype: torch.dtype

    @property
    def channel(self) -> Channel:
        """The channel of the first hop."""
        return self.route.hops[0].channel

    def start(self, rows: Tensor, phase: Phase) -> Pending:
        """Spread."""
        return Then(self.route.spread(self._encode(rows), phase), self._decode)

    def start_reverse(self, grad: Tensor) -> Pending:
        """Sum gradients at home."""
        return self.route.collect(grad, Phase.backward)

    def _encode(self, rows: Tensor) -> Tensor:
        if self.row_dtype is torch.float32 or self.row_width == 0:
            return rows
        narrow = rows[:, : self.row_width].to(self.row_dtype)
        if self.row_width == rows.shape[1]:
            return narrow
        wide = rows[:, self.row_width :].contiguous()
        return torch.cat((narrow.view(torch.uint8), wide.view(torch.uint8)), 1)

    def _decode(self, received: Tensor) -> Tensor:
        if received.dtype is not torch.uint8:
            return received.float()
        num_bytes = self.row_width * self.row_dtype.itemsize
        narrow = received[:, :num_bytes].contiguous().view(self.row_dtype)
        wide = received[:, num_bytes:].contiguous().view(torch.float32)
        return torch.cat((narrow.float(), wide), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Homeward:
    """fp32 [V, D] partial sums to fp32 [T, D]. A Transfer."""

    route: Route
    row_dtype: torch.dtype
    """Of the results; their gradient has it already, so it travels in it."""

    @property
    def channel(self) -> Channel:
        """The channel of the first hop."""
        return self.route.hops[0].channel

    def start(self, rows: Tensor, phase: Phase) -> Pending:
        """Sum at home."""
        return self.route.collect(rows, phase)

    def start_reverse(self, grad: Tensor) -> Pending:
        """Spread gradients."""
        return Then(self.route.spread(grad.to(self.row_dtype), Phase.backward), lambda received: received.float())


def split_visitors(visitors_VC: Tensor, order: PickOrder, row_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows [R, D] by local expert, in dtype; weights [V, K] fp32) of what arrived, [V, D + K] fp32.

    Backward sums a visitor's gradients over its local picks, in fp32.
    """
    rows_RD, weights_VK = _SplitVisitors.apply(visitors_VC, order, row_width, dtype)
    return rows_RD, weights_VK


def partial_sums(rows_RD: Tensor, weights_VK: Tensor, order: PickOrder) -> Tensor:
    """Σ over a visitor's local picks of weight · row: [V, D] fp32. Differentiable with respect to both."""
    sums_VD: Tensor = _PartialSums.apply(rows_RD, weights_VK, order)
    return sums_VD


def renumber_tokens(order: PickOrder, place_of_token_V: Tensor, token_of_place_V: Tensor) -> PickOrder:
    """The same rows in the same order, of tokens that lie elsewhere: token v at place_of_token_V[v].

    token_of_place_V: the inverse.
    """
    top_k = order.row_of_pick_KT.shape[0]
    token_N = place_of_token_V[order.token_N]
    return replace(
        order,
        token_N=token_N,
        pick_N=token_N * top_k + order.pick_N % top_k,
        row_of_pick_KT=order.row_of_pick_KT.index_select(1, token_of_place_V),
    )


class _SplitVisitors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, visitors_VC: Tensor, order: PickOrder, row_width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.order = order
        rows_RD = visitors_VC[:, :row_width].index_select(0, order.token_N).to(dtype)
        return rows_RD, visitors_VC[:, row_width:].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor, grad_VK: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.cat((sum_over_picks(grad_RD, None, ctx.order), grad_VK), 1), None, None, None


class _PartialSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_VK: Tensor, order: PickOrder) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_VK)
        ctx.order = order
        return sum_over_picks(rows_RD, weights_VK, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_VD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, weights_VK = ctx.saved_tensors
        order: PickOrder = ctx.order
        grad_of_row_RD = grad_VD.index_select(0, order.token_N)
        grad_weights_M = torch.zeros(weights_VK.numel(), dtype=torch.float32, device=rows_RD.device)
        grad_weights_M[order.pick_N] = torch.linalg.vecdot(rows_RD.float(), grad_of_row_RD)
        weight_R = weights_VK.flatten().index_select(0, order.pick_N)
        grad_rows_RD = grad_of_row_RD.mul_(weight_R.unsqueeze(1)).to(rows_RD.dtype)
        return grad_rows_RD, grad_weights_M.view_as(weights_VK), None
