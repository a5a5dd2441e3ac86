"""The folder of a run's checkpoints: names, what is there, what may go. Torch-free.

checkpoints/step-000010/               a whole checkpoint: it got its name in one rename
checkpoints/step-000015.tmp-3f2a9c01/  one that is being written, or was when its writer was killed
checkpoints/step-000005.bad-1/         one that was found damaged, put aside
checkpoints/latest                     name of the newest
checkpoints/run.json                   identity of the run
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from moe.train.checkpoint.manifest import MANIFEST, read_json
from moe.train.checkpoint.tensor_file import DamagedCheckpointError, Fault, no_fault, write_bytes

CHECKPOINTS = "checkpoints"
"""The folder of a run folder that holds them."""
LATEST = "latest"
RUN = "run.json"
_WHOLE = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"(step-\d{6,}|latest|run\.json)\.tmp.*")


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return root / f"step-{step:06d}"


def step_of_path(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for another name."""
    match = _WHOLE.fullmatch(path.name)
    return int(match[1]) if match else None


def find_checkpoints(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first: whole when written, not yet verified."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if (step := step_of_path(path)) is not None and path.is_dir()}
    return [steps[step] for step in sorted(steps)]


def read_latest(root: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that `latest` names, and what is wrong with it if it cannot be followed.

    It is a name in this folder and nothing else: a path or a link is not followed.
    """
    pointer = root / LATEST
    if not pointer.is_symlink() and not pointer.exists():
        return None, None
    try:
        if pointer.is_symlink() or not pointer.is_file() or pointer.stat().st_size > 1000:
            raise ValueError("it is not a short regular file")
        name = pointer.read_text("utf-8").strip()
        if not _WHOLE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint in this folder")
        if not (root / name).is_dir():
            raise ValueError(f"there is no {name}")
    except (OSError, ValueError) as error:
        return None, f"{pointer} is not followed: {error}"
    return root / name, None


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint with a manifest; None without any. Its content is not looked at."""
    return next((path for path in reversed(find_checkpoints(root)) if (path / MANIFEST).is_file()), None)


def publish(work: Path, final: Path, fault: Fault = no_fault) -> None:
    """Give a finished folder its name, then point `latest` to it. Killed anywhere inside, old or new is whole."""
    root = final.parent
    sync_folder(work)
    fault("before rename")
    work.rename(final)
    fault("after rename")
    sync_folder(root)
    write_small(root / LATEST, f"{final.name}\n".encode(), fault)


def write_small(path: Path, content: bytes, fault: Fault = no_fault) -> None:
    """Replace a small file in one step, and bring it to the disk."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_bytes(temporary, content)
        fault(f"before {path.name}")
        temporary.rename(path)
        fault(f"after {path.name}")
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def run_identity(root: Path) -> str | None:
    """Identity of the run that this folder belongs to; None when it is not known (any more)."""
    try:
        value = read_json(root / RUN).get("run")
    except DamagedCheckpointError:
        return None
    return value if isinstance(value, str) else None


def sweep(root: Path) -> list[str]:
    """Remove what killed writers left; returns the names. Only for whoever holds the folder's lock."""
    names = []
    for path in sorted(root.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            remove(path)
            names.append(path.name)
    return names


def superseded(steps: Sequence[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Which of these steps' checkpoints may go: not the newest keep_last, and no multiple of keep_every.

    keep_last, keep_every: 0 keeps all; 0 keeps none beyond the newest.
    """
    if keep_last == 0:
        return []
    return [step for step in sorted(steps)[:-keep_last] if not (keep_every and step % keep_every == 0)]


def delete_checkpoint(path: Path, fault: Fault = no_fault) -> None:
    """Remove a checkpoint; killed anywhere inside, it is whole or swept at the next start."""
    doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    fault(f"before delete {path.name}")
    path.rename(doomed)
    fault(f"after delete {path.name}")
    remove(doomed)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that its name is free and its content can be looked at; returns the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.bad-{number}")).exists() or aside.is_symlink():
        number += 1
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def remove(path: Path) -> None:
    """Remove a file, a link (never what it leads to) or a folder."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
