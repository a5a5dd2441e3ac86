"""Points in time on a device, for measuring how long an exchange took without making the host wait for it."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks are cheap to take; the time between two can be read once both have been reached."""

    def mark(self) -> Any:
        """This point in the work given to the device so far."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to that point."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Time from start to end; both must have been reached. Negative when end came first."""
        ...


class HostClock:
    """For the CPU, where work is done when the call returns."""

    def mark(self) -> float:
        """Seconds on the monotonic clock."""
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        """Always."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Difference of the two readings."""
        return end - start


class EventClock:
    """For devices with queues of work: an event on the stream that is current when the mark is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        """Record an event."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.Event) -> bool:
        """Ask the event; never waits."""
        return mark.query()

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """Elapsed device time; the events count in milliseconds."""
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock for work on this device."""
    return HostClock() if device.type == "cpu" else EventClock(device)
