"""What is left of a failed rank, and which rank failed first. Torch-free.

One failure makes others: when a rank dies, its peers lose their connections and fail a moment later. So every rank leaves
a record, and whoever supervises them looks for the one that needs no other to explain it.
"""

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe.errors import ExitCode, SwitchyardError, step_of

TRACEBACK_LINES = 6
MESSAGE_LINES = 12
LOG_LINES = 8

# How gloo, NCCL, HCCL and torch's store say that it was somebody else.
_COMMUNICATION = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|closed by peer|broken pipe|socket timeout|timed out waiting"
    r"|application timeout|pair closure|\bgloo\b|\bnccl\b|\bhccl\b|recvvalue failed|monitoredbarrier|peer has gone",
    re.IGNORECASE,
)
_COMMUNICATION_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRecord:
    """The content of crash/rank-N.json."""

    rank: int
    step: int | None
    """Optimizer step, from 1; None outside of the loop."""
    type: str
    message: str
    traceback: str
    exit_code: int
    communication: bool
    """Whether the error only says that another process could not be reached."""
    foreseen: bool
    """Whether the message says all that is to be said, so that nobody wants to see the code."""
    time: float
    """Seconds since the epoch."""
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one process ended, seen from outside."""

    rank: int
    pid: int
    returncode: int
    """As of subprocess: -N for signal N."""
    time: float
    log: Path | None
    """Where its output went, if not to the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The failure that explains the others."""

    rank: int
    exit_code: int
    text: str
    """Several lines: rank, step, end of the traceback where it helps, path of the record, class and message."""
    certain: bool
    """False when it may be the echo of another rank's failure that has not shown yet."""


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error: its own if it is ours, 6 for memory, files and peers, else 1."""
    if isinstance(error, SwitchyardError):
        return int(error.exit_code)
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, unimported
    if out_of_memory or isinstance(error, OSError) or _is_communication(error):
        return int(ExitCode.environment)
    return int(ExitCode.unforeseen)


def record_crash(run_dir: Path, rank: int, step: int | None, error: BaseException) -> Path:
    """Write crash/rank-N.json and return its path; step None takes what `moe.errors.note_step` left on the error.

    Raises OSError when the folder cannot be written.
    """
    record = CrashRecord(
        rank=rank,
        step=step_of(error) if step is None else step,
        type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code_of(error),
        communication=any(_is_communication(link) for link in _chain(error)),
        foreseen=isinstance(error, SwitchyardError),
        time=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    path = _record_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(asdict(record), indent=1) + "\n", "utf-8")
    os.replace(temporary, path)
    return path


def first_cause(run_dir: Path, world_size: int, endings: Sequence[Ending]) -> Cause:
    """Of the ranks that ended badly, the one that failed by itself first.

    endings: of ranks that failed, none of them stopped by the supervisor. Errors of their own and deaths by signal come
    before unexplained exits, those before lost connections; inside a class the earliest.
    """
    assert endings
    found = []
    for ending in endings:
        record = _read_record(run_dir, ending)
        found.append((_suspicion(ending, record), record.time if record else ending.time, ending.rank, ending, record))
    suspicion, _, _, ending, record = min(found, key=lambda item: item[:3])
    path = _record_path(run_dir, ending.rank)
    return Cause(
        rank=ending.rank,
        exit_code=_exit_code(ending, record),
        text="\n".join(_told(ending, record, path, world_size)),
        certain=suspicion == 0,
    )


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _suspicion(ending: Ending, record: CrashRecord | None) -> int:
    if record is not None:
        return 2 if record.communication else 0
    # Collective libraries abort a healthy rank when its peers are gone.
    return 0 if ending.returncode < 0 and ending.returncode != -signal.SIGABRT else 1


def _exit_code(ending: Ending, record: CrashRecord | None) -> int:
    if record is not None:
        return record.exit_code
    if ending.returncode < 0:
        return int(ExitCode.environment)
    return ending.returncode


def _told(ending: Ending, record: CrashRecord | None, path: Path, world_size: int) -> Iterator[str]:
    who = f"rank {ending.rank} of {world_size}"
    if record is not None:
        yield f"{who} failed" + (f" at step {record.step}" if record.step is not None else "")
        if not record.foreseen:
            frames = [line for line in record.traceback.splitlines() if line.startswith("  ")]
            yield from _indented(frames[-TRACEBACK_LINES:])
        yield f"  crash record: {path}"
    elif ending.returncode < 0:
        name = signal_name(-ending.returncode)
        guess = {
            "SIGKILL": "; often the kernel's out-of-memory killer: try a smaller trainer.batch_size or more accumulation",
            "SIGSEGV": "; a fault in native code",
            "SIGBUS": "; often a full /dev/shm or disk",
            "SIGABRT": "; native code gave up, often because another rank was lost",
        }.get(name, "")
        yield f"{who} was killed by {name}{guess}"
    else:
        yield f"{who} ended with exit code {ending.returncode} and left no crash record"
    if record is None and ending.log is not None:
        yield from _indented(_last_lines(ending.log))
    if ending.log is not None:
        yield f"  log: {ending.log}"
    if record is not None:
        # Last, where people look: what happened, and what to do.
        yield from _indented(f"{record.type}: {record.message}".rstrip(": ").splitlines()[:MESSAGE_LINES])


def _indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            return file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def _record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "crash" / f"rank-{rank}.json"


def _read_record(run_dir: Path, ending: Ending) -> CrashRecord | None:
    """The record of this very process: the folder may still hold one of an earlier start."""
    try:
        record = CrashRecord(**json.loads(_record_path(run_dir, ending.rank).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.pid == ending.pid else None


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, SwitchyardError):
        return False
    is_type = isinstance(error, ConnectionError) or type(error).__name__ in _COMMUNICATION_TYPES
    return is_type or (isinstance(error, RuntimeError | TimeoutError) and bool(_COMMUNICATION.search(str(error))))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
