"""An all-to-all that writes down when it is issued and waited for, and takes as long as a test says."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


class SlowWork:
    """A work handle that is complete no earlier than `seconds` after it was issued."""

    def __init__(self, work: dist.Work, name: str, seconds: float, events: list[str]) -> None:
        self._work, self._name, self._events = work, name, events
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._over = threading.Event()
        self._timer = threading.Timer(seconds, self._finish)
        self._timer.start()

    def _finish(self) -> None:
        self._work.wait()
        self._future.set_result(None)
        self._over.set()

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")
        self._over.wait()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


@contextmanager
def slow_all_to_all(names: list[str], seconds: float = 0.0) -> Iterator[list[str]]:
    """Within the block, dispatch's i-th all-to-all is called names[i]; yields the list of events, which tests add to."""
    events: list[str] = []
    original = dist.all_to_all_single
    started = iter(names)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        name = next(started)
        if not kwargs.get("async_op"):
            events.append(f"{name} at once")
            return original(*args, **kwargs)
        events.append(f"issue {name}")
        return SlowWork(original(*args, **kwargs), name, seconds, events)

    with patch.object(dist, "all_to_all_single", recorded):
        yield events


def busy(seconds: float) -> None:
    """Stand for computation that takes no core."""
    time.sleep(seconds)
