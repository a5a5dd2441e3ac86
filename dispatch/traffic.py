"""What dispatch moves and how long the step waited for it: counted where rows move, read once a step.

Seconds: an exchange is under way from the call that starts it until it is complete on this rank, waiting for late peers
included; where several are under way at once, that time counts once. It is *exposed* while the step does nothing but
wait for it. So hidden fraction = 1 − exposed / seconds.

Phases: a forward that backward runs again (activation checkpointing) is real traffic, so it is counted, and as a phase
of its own: `recompute`. Counts of rows that ranks tell each other before rows move are in the bytes, not in the rows.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from backends.clock import Clock, clock_for


class Link(Enum):
    """What lies between two ranks."""

    self = "self"
    """The same rank: a copy."""
    node = "node"
    """Another rank of the same node."""
    across = "across"
    """A rank of another node."""


class Phase(Enum):
    """When a row moves."""

    forward = "forward"
    recompute = "recompute"
    """A forward inside backward."""
    backward = "backward"


def links_from(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[Link, ...]:
    """The link from this rank to each rank of the group.

    ranks_per_node: consecutive ranks of the whole job that share a node.
    """
    own = dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    return tuple(
        Link.self if rank == own else Link.node if rank // ranks_per_node == own // ranks_per_node else Link.across
        for rank in ranks
    )


def forward_phase() -> Phase:
    """`recompute` inside backward, else `forward`."""
    # A private name of torch (2.13), the one that activation checkpointing itself asks; tests/dispatch/test_traffic.py
    # notices when it goes.
    return Phase.forward if torch._C._current_graph_task_id() == -1 else Phase.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRecord:
    """What one rank sent and waited for since the record before."""

    rows: Mapping[tuple[Phase, Link], int]
    """Rows sent, a row of [D] being one however wide it is."""
    num_bytes: Mapping[tuple[Phase, Link], int]
    """Bytes sent: rows, weights that travel beside them, and counts."""
    seconds: Mapping[Phase, float]
    """Time with at least one exchange under way."""
    exposed_seconds: Mapping[Phase, float]
    """Time that the step spent waiting for exchanges."""

    def rows_over(self, link: Link, phase: Phase | None = None) -> int:
        """Rows sent over links of one class; of all phases when None."""
        return sum(n for (of, over), n in self.rows.items() if over is link and phase in (None, of))

    def bytes_over(self, link: Link, phase: Phase | None = None) -> int:
        """Bytes sent over links of one class; of all phases when None."""
        return sum(n for (of, over), n in self.num_bytes.items() if over is link and phase in (None, of))

    @property
    def total_seconds(self) -> float:
        """Communication of all phases."""
        return sum(self.seconds.values())

    @property
    def total_exposed_seconds(self) -> float:
        """Waiting of all phases."""
        return sum(self.exposed_seconds.values())

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the communication that ran beside other work; None when there was none."""
        return 1 - self.total_exposed_seconds / self.total_seconds if self.total_seconds > 0 else None


@dataclass(slots=True)
class Ticket:
    """One exchange under way."""

    phase: Phase
    issued: Any
    done: Any = None


@dataclass(slots=True)
class _Seconds:
    """Running sums of one phase."""

    under_way: float = 0.0
    exposed: float = 0.0
    covered_until: Any = None


@dataclass(slots=True)
class Traffic:
    """The running counters of one dispatcher. Bounded whether or not anyone reads them."""

    _rows: dict[tuple[Phase, Link], int] = field(default_factory=dict)
    _bytes: dict[tuple[Phase, Link], int] = field(default_factory=dict)
    _seconds: dict[Phase, _Seconds] = field(default_factory=lambda: {phase: _Seconds() for phase in Phase})
    _tickets: deque[Ticket] = field(default_factory=deque)
    _waits: deque[tuple[Phase, Any, Any]] = field(default_factory=deque)
    _clock: Clock | None = None

    def count(self, phase: Phase, links: Sequence[Link], rows: Sequence[int], bytes_per_row: int) -> None:
        """Add rows sent to each rank: rows[p] over links[p]."""
        of_link: dict[Link, int] = {}
        for link, number in zip(links, rows, strict=True):
            of_link[link] = of_link.get(link, 0) + number
        for link, number in of_link.items():
            self._rows[phase, link] = self._rows.get((phase, link), 0) + number
            self._bytes[phase, link] = self._bytes.get((phase, link), 0) + number * bytes_per_row

    def count_bytes(self, phase: Phase, links: Sequence[Link], num_bytes: Sequence[int]) -> None:
        """Add bytes that are no rows."""
        for link, number in zip(links, num_bytes, strict=True):
            self._bytes[phase, link] = self._bytes.get((phase, link), 0) + number

    def issue(self, phase: Phase, device: torch.device, start: Callable[[], dist.Work]) -> "TimedWork":
        """Start an exchange and its clock."""
        clock = self._clock = self._clock or clock_for(device)
        ticket = Ticket(phase=phase, issued=clock.mark())
        work = start()

        def complete(_: object) -> None:
            # On a library's thread; on a device, with a stream current that follows the exchange.
            if ticket.done is None:
                ticket.done = clock.mark()

        watched = True
        try:
            work.get_future().add_done_callback(complete)
        except RuntimeError:  # a collective library without futures: complete when waited for
            watched = False
        if watched:
            self._tickets.append(ticket)
        return TimedWork(self, ticket, work, watched)

    def collect(self) -> TrafficRecord:
        """Return what was counted since the last call, and begin anew. The device must be idle (after a synchronize)."""
        self._fold()
        record = TrafficRecord(
            rows=dict(self._rows),
            num_bytes=dict(self._bytes),
            seconds={phase: sums.under_way for phase, sums in self._seconds.items()},
            exposed_seconds={phase: sums.exposed for phase, sums in self._seconds.items()},
        )
        self._rows.clear()
        self._bytes.clear()
        for sums in self._seconds.values():
            sums.under_way = sums.exposed = 0.0
        return record

    def _waited(self, ticket: Ticket, watched: bool, before: Any, after: Any) -> None:
        if not watched:
            self._tickets.append(ticket)
        self._waits.append((ticket.phase, before, after))
        self._fold()

    def _fold(self) -> None:
        """Add up what is over, in the order of issue, so that a point in time counts once."""
        clock = self._clock
        while clock and self._tickets and (done := self._tickets[0].done) is not None and clock.reached(done):
            ticket = self._tickets.popleft()
            sums = self._seconds[ticket.phase]
            start = ticket.issued
            if sums.covered_until is not None and clock.seconds(start, sums.covered_until) > 0:
                start = sums.covered_until
            if (seconds := clock.seconds(start, done)) > 0:
                sums.under_way += seconds
                sums.covered_until = done
        while clock and self._waits and clock.reached(self._waits[0][2]):
            phase, before, after = self._waits.popleft()
            self._seconds[phase].exposed += clock.seconds(before, after)


@dataclass(slots=True)
class TimedWork:
    """An exchange under way, whose end is noted, and the wait for it."""

    _traffic: Traffic
    _ticket: Ticket
    _work: dist.Work
    _watched: bool

    def wait(self) -> None:
        """Until the received rows may be read (on a device: by work given to it from now on)."""
        clock = self._traffic._clock
        assert clock is not None
        under_way = self._ticket.done is None
        before = clock.mark()
        self._work.wait()
        after = clock.mark()
        if under_way:
            # Over for this rank when it goes on, which is a moment after the library's thread noted the end.
            self._ticket.done = after
        self._traffic._waited(self._ticket, self._watched, before, after)
