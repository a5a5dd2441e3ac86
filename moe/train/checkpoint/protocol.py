"""How ranks write a checkpoint together: all of it or none of it. Torch-free, and without a collective of its own.

    measure -> free space, new folder step-N.tmp-<attempt> -> every rank: files, sums, fsync, read back
            -> rank 0: state, manifest, fsync, rename, latest -> older ones that may go

After each arrow the ranks exchange what came of it; a rank that failed makes every rank raise the same error, and
rank 0 takes the unfinished folder away. What was there before is touched only by the last part.
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moe.errors import CheckpointError
from moe.train.checkpoint.folder import (
    RUN,
    checkpoint_path,
    delete_checkpoint,
    find_checkpoints,
    publish,
    remove,
    run_identity,
    step_of_path,
    superseded,
    write_small,
)
from moe.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    FileEntry,
    Manifest,
    TrainState,
    content_faults,
    manifest_bytes,
    read_manifest,
    settings_hash,
)
from moe.train.checkpoint.tensor_file import Fault, RawTensor, no_fault, write_bytes, write_tensors

Gather = Callable[[Any], list[Any]]
"""Every rank's value, on every rank, by rank."""


def alone(value: Any) -> list[Any]:
    """The Gather of a single rank."""
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A file that one rank is to write."""

    tensors: Mapping[str, RawTensor]
    metadata: Mapping[str, str]
    expert_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint, in host memory: training may go on while it is written."""

    state: TrainState
    files: Mapping[str, TensorFile]
    layout: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.data.nbytes for file in self.files.values() for tensor in file.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay."""

    last: int = 0
    """The newest ones; 0 = all."""
    every: int = 0
    """Those whose step is a multiple of it, for good; 0 = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that stands."""

    path: Path
    size: int
    alarms: tuple[str, ...]
    """What went wrong after it had its name: an older one that could not be deleted."""


def write_checkpoint(
    root: Path,
    snapshot: Snapshot,
    *,
    rank: int,
    gather: Gather,
    keep: Keep,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    fault: Fault = no_fault,
) -> Written:
    """Write a checkpoint into root and make it the latest (every rank calls it; `gather` is the only exchange).

    Raises CheckpointError on every rank, naming the first rank that failed; what was there before stays untouched.
    """
    final = checkpoint_path(root, snapshot.state.step)
    attempt = secrets.token_hex(4)
    sizes, attempts = zip(*gather((snapshot.size, attempt)), strict=True)
    work = final.with_name(f"{final.name}.tmp-{attempts[0]}")
    what = f"saving {final}"

    def prepare() -> None:
        if rank == 0:
            _refuse_existing(final)
            root.mkdir(parents=True, exist_ok=True)
            if run_identity(root) is None:
                write_small(root / RUN, json.dumps({"run": _identity(root)}).encode())
            require_space(root, sum(sizes), free_bytes)
            work.mkdir()
            fault("after mkdir")

    def write() -> dict[str, FileEntry]:
        written = {name: _write_file(work / name, file, fault) for name, file in snapshot.files.items()}
        for name, entry in written.items():
            if faults := content_faults(work / name, entry.sum):
                raise CheckpointError(f"read back after writing: {faults[0]}")
        return written

    try:
        agree(prepare, gather, what)
        parts = agree(write, gather, what)
        files = {name: entry for part in parts for name, entry in part.items()}

        def finish() -> int:
            return _finish(work, final, snapshot, files, fault) if rank == 0 else 0

        size = agree(finish, gather, what)[0]
    except CheckpointError:
        if rank == 0:
            # Another rank may still be closing a file on a network file system; the next start sweeps what stays.
            with contextlib.suppress(OSError):
                remove(work)
        raise
    alarms = _delete_old(root, snapshot.state.step, keep, fault) if rank == 0 else ()
    return Written(path=final, size=size, alarms=alarms)


def agree(phase: Callable[[], Any], gather: Gather, what: str) -> list[Any]:
    """Run phase on every rank; its results by rank. If any rank fails, raise on all, so that nobody waits for it."""
    result, error, own = None, None, None
    try:
        result = phase()
    except Exception as exception:
        own = exception
        error = str(own) if isinstance(own, CheckpointError) else f"{type(own).__name__}: {own}"
    outcomes = gather((result, error))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise CheckpointError(f"{what}: rank {rank}: {message}") from own
    return [value for value, _ in outcomes]


def require_space(root: Path, size: int, free_bytes: Callable[[Path], int]) -> None:
    """Refuse to begin with less than twice the room: others write too, and a full disk stops more than us."""
    free = free_bytes(root)
    if free < 2 * size:
        raise CheckpointError(
            f"{free} bytes are free, a checkpoint takes {size} and is begun with twice that; free some, or keep fewer "
            "with trainer.keep_last"
        )


def _refuse_existing(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists already and is never written over; choose another run.dir, or move it")


def _identity(root: Path) -> str:
    """That of the newest checkpoint that tells (run.json was lost), or a new one."""
    for path in reversed(find_checkpoints(root)):
        with contextlib.suppress(CheckpointError):
            return read_manifest(path).run
    return secrets.token_hex(8)


def _write_file(path: Path, file: TensorFile, fault: Fault) -> FileEntry:
    metadata = dict(file.metadata)
    if file.expert_ids is not None:
        metadata["expert_ids"] = json.dumps(list(file.expert_ids))
    return FileEntry(sum=write_tensors(path, file.tensors, metadata, fault), expert_ids=file.expert_ids)


def _finish(work: Path, final: Path, snapshot: Snapshot, files: Mapping[str, FileEntry], fault: Fault) -> int:
    """State, manifest, name, pointer; returns the size."""
    fault("before state")
    state = {f.name: getattr(snapshot.state, f.name) for f in fields(snapshot.state)}
    content = json.dumps(state, indent=1, default=dict).encode()
    files = {**files, STATE: FileEntry(sum=write_bytes(work / STATE, content, fault))}
    manifest = Manifest(
        run=run_identity(final.parent) or "",
        step=snapshot.state.step,
        next_sample=snapshot.state.next_sample,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        layout=snapshot.layout,
        settings_hash=settings_hash(snapshot.state.settings),
        versions=snapshot.versions,
        files=files,
    )
    fault("before manifest")
    write_bytes(work / MANIFEST, manifest_bytes(manifest), fault)
    _refuse_existing(final)
    publish(work, final, fault)
    return manifest.size


def _delete_old(root: Path, newest: int, keep: Keep, fault: Fault) -> tuple[str, ...]:
    """The new one was read back and has its name; so older ones may go. A failure is no failure of the save."""
    try:
        steps = [step for path in find_checkpoints(root) if (step := step_of_path(path)) is not None]
        for step in superseded(steps, keep_last=keep.last, keep_every=keep.every):
            if step < newest:
                delete_checkpoint(checkpoint_path(root, step), fault)
    except OSError as error:
        return (f"{root}: an old checkpoint could not be deleted ({error})",)
    return ()
