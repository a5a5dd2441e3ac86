"""One job a run folder: whoever writes checkpoints there holds its lock for the length of the run."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from moe.errors import EnvironmentProblem
from moe.train.checkpoint.folder import CHECKPOINTS, sweep
from moe.train.checkpoint.protocol import Gather

LOCK = ".lock"


@contextlib.contextmanager
def lock_folder(root: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Hold root/.lock for the length of the block; then sweep what killed writers left.

    The lock is the kernel's (flock), so it ends with its process and is never stale; the file says who holds it.
    Raises EnvironmentProblem when somebody does, or when the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise EnvironmentProblem(f"{root} cannot be used ({error}); choose another run.dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip()
            raise EnvironmentProblem(
                f"{root} is in use by another job ({owner or 'owner unknown'}); wait for it or choose another run.dir"
            ) from None
        except OSError as error:
            say(f"WARNING: {root / LOCK} cannot be locked ({error.strerror}); see to it that only one job writes there")
        owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _now()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        swept = sweep(root)
        if swept:
            say(f"removed what a killed run left unfinished: {', '.join(swept)}")
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_run_folder(run_dir: Path, *, rank: int, gather: Gather, say: Callable[[str], None] = print) -> Iterator[None]:
    """Rank 0 locks the run's checkpoints; every rank learns whether it could (collective).

    Raises EnvironmentProblem on every rank.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if rank == 0:
            try:
                stack.enter_context(lock_folder(run_dir / CHECKPOINTS, say))
            except (EnvironmentProblem, OSError) as error:
                problem = str(error)
        problem = gather(problem)[0]
        if problem is not None:
            raise EnvironmentProblem(problem)
        yield


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
