"""Exchanges between ranks, with their backward: on the token path, in the middle of dispatch and of combine.

An exchange has two halves, `begin` and `end`, and work done between them overlaps with it. Its backward has the same two
halves in the opposite order: the backward of `end` begins the reverse exchange, the backward of `begin` ends it. What
was computed between the halves in forward has its backward between them too, since autograd runs, of the nodes that
are ready, the one that was made last (torch 2.13, csrc/autograd/engine.cpp, ReadyQueue; tests/dispatch/test_overlap.py
holds the order). Only speed hangs on this order, never a result: each half finds its partner through the graph.

Legend: D hidden, N rows sent by this rank, R rows received, P ranks of the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.check import check_pieces, check_splits, fill_with_nan
from dispatch.traffic import Link, Phase, TimedWork, Traffic, forward_phase, links_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A group, what its links are, who counts, and whether exchanges may be left under way."""

    group: dist.ProcessGroup
    links_P: tuple[Link, ...]
    """From this rank to each rank of the group."""
    traffic: Traffic
    forward_async: bool = True
    """Whether `begin` returns before the exchange is over; if not, it waits there."""
    backward_async: bool = True
    """The same of backward."""
    check: bool = False
    """Whether splits and checksums are compared; see dispatch/check.py."""

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.links_P)


def open_channel(
    group: dist.ProcessGroup,
    *,
    ranks_per_node: int,
    traffic: Traffic,
    forward_async: bool = True,
    backward_async: bool = True,
    check: bool = False,
) -> Channel:
    """A channel over the group. ranks_per_node: consecutive ranks of the job that share a node."""
    return Channel(
        group=group,
        links_P=links_from(group, ranks_per_node),
        traffic=traffic,
        forward_async=forward_async,
        backward_async=backward_async,
        check=check,
    )


class Pending:
    """One direction of an exchange, under way. Keeps both buffers: neither may be reused or freed before `wait`."""

    def __init__(self, sent: Tensor, received: Tensor, work: TimedWork) -> None:
        self._sent: Tensor | None = sent
        self._received: Tensor | None = received
        self._work = work

    def wait(self) -> Tensor:
        """What was received. Only once."""
        received = self._received
        assert received is not None, "an exchange was waited for twice"
        self._work.wait()
        self._sent = self._received = None
        return received


class Transfer(Protocol):
    """A linear map of rows over ranks, and its transpose: what begin and end do, and what their backward does."""

    @property
    def channel(self) -> Channel:
        """Over which it goes."""
        ...

    def start(self, rows_ND: Tensor, phase: Phase) -> Pending:
        """Start the collective; return without waiting."""
        ...

    def start_reverse(self, grad_RD: Tensor) -> Pending:
        """Start the transposed collective on the gradient of what `start` received."""
        ...


class Flight:
    """One exchange between its halves."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.token = torch.empty(0)
        """Ties `end` to `begin` in the graph, in place of rows that are not there yet."""
        self.there: Pending | Tensor | None = None
        self.back: Pending | Tensor | None = None


def begin(rows_ND: Tensor, transfer: Transfer) -> Flight:
    """Start an exchange; all ranks of the group call together. The rows must not be written to before its `end`.

    Backward is collective too, so it must not depend on whether this rank happens to want a gradient: what `end` returns
    always requires one, even of rows that do not.
    """
    flight = Flight(transfer)
    anchor = torch.zeros((), device=rows_ND.device, requires_grad=True)
    token: Tensor = _Begin.apply(rows_ND, anchor, flight)
    flight.token = token
    return flight


def end(flight: Flight) -> Tensor:
    """Wait for the exchange and return what was received."""
    token, flight.token = flight.token, torch.empty(0)
    rows_RD: Tensor = _End.apply(token, flight)
    return rows_RD


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExchange:
    """All-to-all with uneven splits. A Transfer.

    send_rows_P[p] consecutive rows go to rank p, receive_rows_P[p] come from it; zeros are fine. What arrives lies by
    source rank. The splits of all ranks must agree (gloo alone would leave stale memory in the receiver without a word).
    """

    send_rows_P: Sequence[int]
    receive_rows_P: Sequence[int]
    channel: Channel

    def start(self, rows_ND: Tensor, phase: Phase) -> Pending:
        """Send the rows."""
        return _start_all_to_all(rows_ND, self.send_rows_P, self.receive_rows_P, self.channel, phase)

    def start_reverse(self, grad_RD: Tensor) -> Pending:
        """Send gradients back where the rows came from."""
        return _start_all_to_all(grad_RD, self.receive_rows_P, self.send_rows_P, self.channel, Phase.backward)

    def inverse(self) -> "RowExchange":
        """The exchange that brings every row back."""
        return RowExchange(send_rows_P=self.receive_rows_P, receive_rows_P=self.send_rows_P, channel=self.channel)


def exchange_rows(
    rows_ND: Tensor, send_rows_P: Sequence[int], receive_rows_P: Sequence[int], channel: Channel
) -> Tensor:
    """A RowExchange in one piece: [R, D]."""
    return end(begin(rows_ND, RowExchange(send_rows_P=send_rows_P, receive_rows_P=receive_rows_P, channel=channel)))


def move_rows(
    rows_ND: Tensor, send_rows_P: Sequence[int], receive_rows_P: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """An exchange without gradient, asynchrony and counters, for functions that bring their own. Any dtype."""
    received_RD = rows_ND.new_empty((sum(receive_rows_P), rows_ND.shape[1]))
    dist.all_to_all_single(received_RD, rows_ND.contiguous(), list(receive_rows_P), list(send_rows_P), group=group)
    return received_RD


def exchange_counts(
    counts_N: Tensor, send_numbers_P: Sequence[int], receive_numbers_P: Sequence[int], channel: Channel
) -> Tensor:
    """Tell each rank some integers (no gradient), waiting for the answer: what rows move next depends on it."""
    received_R = counts_N.new_empty(sum(receive_numbers_P))
    phase = forward_phase()
    size = counts_N.element_size()
    channel.traffic.count_bytes(phase, channel.links_P, [size * number for number in send_numbers_P])
    start_timed(
        channel,
        phase,
        counts_N.contiguous(),
        received_R,
        lambda sent, received: dist.all_to_all_single(
            received, sent, list(receive_numbers_P), list(send_numbers_P), group=channel.group, async_op=True
        ),
    ).wait()
    return received_R


def start_timed(
    channel: Channel,
    phase: Phase,
    sent: Tensor,
    received: Tensor,
    collective: Callable[[Tensor, Tensor], dist.Work | None],
) -> Pending:
    """Start `collective(sent, received)`, an asynchronous one, on the channel's clock."""

    def start() -> dist.Work:
        work = collective(sent, received)
        assert work is not None
        return work

    return Pending(sent, received, channel.traffic.issue(phase, sent.device, start))


def start_all_gather(part: Tensor, channel: Channel, phase: Phase) -> Pending:
    """Every rank's part ([A, ...], the same shape everywhere), one after the other by rank: [P · A, ...]. Counts no rows."""
    part = part.contiguous()
    received = part.new_empty((channel.num_ranks * part.shape[0], *part.shape[1:]))
    pending = start_timed(
        channel,
        phase,
        part,
        fill_with_nan(received) if channel.check else received,
        lambda sent, received: dist.all_gather_single(received, sent, group=channel.group, async_op=True),
    )
    if not channel.check:
        return pending
    parts = part.repeat(channel.num_ranks, *[1] * (part.dim() - 1))
    return _Checked(pending, parts, [part.shape[0]] * channel.num_ranks, [part.shape[0]] * channel.num_ranks, channel)


def _start_all_to_all(
    rows_ND: Tensor, send_rows_P: Sequence[int], receive_rows_P: Sequence[int], channel: Channel, phase: Phase
) -> Pending:
    assert sum(send_rows_P) == rows_ND.shape[0], (list(send_rows_P), rows_ND.shape)
    rows_ND = rows_ND.contiguous()
    received_RD = rows_ND.new_empty((sum(receive_rows_P), rows_ND.shape[1]))
    if channel.check:
        check_splits(send_rows_P, receive_rows_P, channel.group, rows_ND.device)
        fill_with_nan(received_RD)
    channel.traffic.count(phase, channel.links_P, send_rows_P, rows_ND.shape[1] * rows_ND.element_size())
    pending = start_timed(
        channel,
        phase,
        rows_ND,
        received_RD,
        lambda sent, received: dist.all_to_all_single(
            received, sent, list(receive_rows_P), list(send_rows_P), group=channel.group, async_op=True
        ),
    )
    return _Checked(pending, rows_ND, send_rows_P, receive_rows_P, channel) if channel.check else pending


class _Checked(Pending):
    """An exchange whose pieces are compared with what was sent."""

    def __init__(
        self,
        pending: Pending,
        sent: Tensor,
        send_rows_P: Sequence[int],
        receive_rows_P: Sequence[int],
        channel: Channel,
    ) -> None:
        self._pending = pending
        self._given = sent, send_rows_P, receive_rows_P, channel

    def wait(self) -> Tensor:
        received = self._pending.wait()
        sent, send_rows_P, receive_rows_P, channel = self._given
        check_pieces(sent, send_rows_P, received, receive_rows_P, channel.group)
        return received


def _settled(half: "Pending | Tensor | None") -> Tensor:
    assert half is not None, "an exchange ended before it began"
    return half.wait() if isinstance(half, Pending) else half


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, anchor: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        pending = flight.transfer.start(rows_ND.detach(), forward_phase())
        flight.there = pending if flight.transfer.channel.forward_async else pending.wait()
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor, None, None]:
        flight: Flight = ctx.flight
        back, flight.back = flight.back, None
        return _settled(back), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        there, flight.there = flight.there, None
        return _settled(there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        pending = flight.transfer.start_reverse(grad_RD)
        flight.back = pending if flight.transfer.channel.backward_async else pending.wait()
        return grad_RD.new_zeros((), dtype=torch.float32), None
