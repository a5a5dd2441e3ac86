"""A stop that is asked for, not suffered: signals become a flag that the trainer reads between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """True once SIGINT or SIGTERM has come."""

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None

    def request(self, name: str) -> None:
        """Ask for a stop after the current step."""
        self.requested = True
        self.signal_name = self.signal_name or name


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into the flag while the block runs; the former handlers come back after it.

    For the training loop alone: only between its steps is the flag read.

    Repeated signals change nothing (a terminal's Ctrl-C reaches a worker twice: from the terminal and from its
    launcher); whoever cannot wait sends SIGKILL, as the supervisor does at the second Ctrl-C.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        flag.request(signal.Signals(number).name)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
