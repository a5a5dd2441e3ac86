"""Contenders in processes of their own that take turns (A B C, B C A, ...), driven from one place.

Of their own, so that none runs in memory, or with kernels, that another has prepared or thrown away; in turns, so that
whatever slows a machine that others use slows all alike. A turn in which others computed more than a little is kept
apart: with enough quiet turns only those count, and without them the result says so.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.machine import machine_seconds

_ENOUGH = 3
"""Quiet turns that a median needs."""
_OTHERS = 0.08
"""Share of the machine that others may use in a quiet turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one rank saw of one turn."""

    wall_s: float
    busy_s: float
    """Time computed by all threads of its process."""


@dataclass(slots=True, kw_only=True)
class Turns:
    """All turns of one contender, ranks together."""

    wall_s: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    busy_s: list[float] = field(default_factory=list)
    """Of all ranks together."""
    quiet: list[bool] = field(default_factory=list)
    """Whether others left the machine alone."""

    def add(self, of_rank: Sequence[Sample], machine_s: float | None, cores: int) -> None:
        """One more turn. machine_s: time that all cores computed for anyone meanwhile; None when it is not known."""
        self.wall_s.append(max(sample.wall_s for sample in of_rank))
        self.busy_s.append(sum(sample.busy_s for sample in of_rank))
        # The machine counts in ticks of 10 ms: two of them, on a core each, prove nothing.
        allowed = _OTHERS * self.wall_s[-1] * cores + 0.02
        self.quiet.append(machine_s is not None and machine_s - self.busy_s[-1] <= allowed)

    def enough(self) -> bool:
        """Whether there are enough quiet ones."""
        return sum(self.quiet) >= _ENOUGH

    def median(self) -> "Median":
        """Of the quiet turns if they are enough, else of all."""
        chosen = [turn for turn, quiet in enumerate(self.quiet) if quiet or not self.enough()]
        return Median(
            wall_s=statistics.median(self.wall_s[turn] for turn in chosen),
            busy_s=statistics.median(self.busy_s[turn] for turn in chosen),
            quiet=self.enough(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """One contender in one row."""

    wall_s: float
    busy_s: float
    quiet: bool
    """If not, wall time tells little."""

    def clock(self, *, by_wall: bool) -> float:
        """The time to compare."""
        return self.wall_s if by_wall else self.busy_s


class Team:
    """The ranks of one contender: spawned processes that answer one request at a time, all ranks the same one."""

    def __init__(
        self,
        serve: Callable[[int, Any], Callable[[Any], Any]],
        argument: Any,
        num_ranks: int,
        environment: Mapping[str, str],
    ) -> None:
        """serve(rank, argument), a module-level function, runs once in each process and returns what answers requests."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        before = dict(os.environ)
        try:
            for rank in range(num_ranks):
                # Some libraries read their environment when a process starts: the spawned one inherits it.
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
                ours, theirs = context.Pipe()
                process = context.Process(target=_answer, args=(serve, rank, argument, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def ask(self, request: Any) -> list[Any]:
        """Answers by rank. Raises RuntimeError with the traceback of a rank that failed."""
        for pipe in self._pipes:
            pipe.send(request)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                well, answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without an answer to {request}") from None
            if not well:
                raise RuntimeError(f"rank {rank}:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _answer(serve: Callable[[int, Any], Callable[[Any], Any]], rank: int, argument: Any, pipe: Connection) -> None:
    try:
        answer = serve(rank, argument)
        while (request := pipe.recv()) is not None:
            pipe.send((True, answer(request)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def take_turns(teams: Mapping[str, Team], *, turns: int, seconds: float, cores: int) -> dict[str, Turns]:
    """Ask every team for turn 0, 1, ...: `turns` times, and on until enough are quiet or `seconds` have passed.

    A team gets ("prepare", turn), and then ("turn", turn), which its ranks answer with a Sample.
    """
    taken = {name: Turns() for name in teams}
    names = list(teams)
    begun, turn = time.perf_counter(), 0
    while True:
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            teams[name].ask(("prepare", turn))
            before = machine_seconds()
            of_rank = teams[name].ask(("turn", turn))
            after = machine_seconds()
            taken[name].add(of_rank, None if before is None or after is None else after - before, cores)
        turn += 1
        if turn >= turns and all(each.enough() for each in taken.values()):
            return taken
        if turn >= 2 and time.perf_counter() - begun > seconds:
            return taken
