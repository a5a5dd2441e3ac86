"""The manifest of a checkpoint: what it is, and every file with size and sum. Torch-free.

It carries its own sum, so that a change to the manifest is found like a change to any other file.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import google_crc32c

from moe.errors import CheckpointError
from moe.train.checkpoint.tensor_file import (
    DamagedCheckpointError,
    FileSum,
    file_checksum,
    read_header,
)

FORMAT = "switchyard-checkpoint-2"
MANIFEST = "manifest.json"
STATE = "state.json"
MAX_JSON_BYTES = 1 << 28
"""Of a manifest or a state: beyond it a file is refused unread."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What a run must know to go on, beside tensors: the content of state.json."""

    step: int
    """Optimizer steps done; the learning rate is a function of it."""
    next_sample: int
    """Data position: index of the first sample not yet used."""
    fingerprints: Mapping[str, Any]
    """Of data and tokenizer; a resume on other data is refused."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration of the run that wrote it, for people and `ckpt diff`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What other parts of the trainer keep, by name, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint."""

    sum: FileSum
    expert_ids: tuple[int, ...] | None = None
    """Global ids along the first dimension of its tensors; None for a file without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    run: str
    """Identity of the run that wrote it."""
    step: int
    next_sample: int
    created: str
    """UTC, ISO 8601."""
    layout: Mapping[str, int]
    """world_size, and the parallel sizes expert and sequence, of the writer; any other can read it."""
    settings_hash: str
    """Of state.json's settings."""
    versions: Mapping[str, str]
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.sum.size for entry in self.files.values())


def settings_of(config: Any) -> Any:
    """A configuration dataclass as plain JSON values; an enum becomes its name."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: settings_of(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.name
    if isinstance(config, Mapping):
        return {str(settings_of(key)): settings_of(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [settings_of(value) for value in config]
    return config


def settings_hash(settings: Mapping[str, Any]) -> str:
    """SHA-256 of settings, independent of their order."""
    return hashlib.sha256(_canonical(settings)).hexdigest()


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content."""
    body = {
        "format": FORMAT,
        **{f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest) if f.name != "files"},
        "files": {
            name: {
                "size": entry.sum.size,
                "crc32c": f"{entry.sum.crc32c:08x}",
                "tensors": {key: f"{value:08x}" for key, value in entry.sum.tensors.items()},
                **({} if entry.expert_ids is None else {"expert_ids": list(entry.expert_ids)}),
            }
            for name, entry in manifest.files.items()
        },
    }
    return json.dumps({"manifest": body, "crc32c": _json_sum(body)}, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises DamagedCheckpointError when it is missing, cut short or changed, CheckpointError when another version wrote it.
    """
    path = folder / MANIFEST
    whole = read_json(path)
    body = whole.get("manifest")
    if not isinstance(body, dict) or whole.get("crc32c") != _json_sum(body):
        raise DamagedCheckpointError(
            f"{path} does not have the sum that it states: it was changed after it was written"
        )
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {body.get('format')!r}, this version reads {FORMAT!r}")
    try:
        files = {_plain(name): _file_entry(value) for name, value in body["files"].items()}
        values = {f.name: body[f.name] for f in dataclasses.fields(Manifest) if f.name != "files"}
        manifest = Manifest(**values, files=files)
        if type(manifest.step) is not int or type(manifest.next_sample) is not int:
            raise ValueError("step and next_sample must be integers")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is not a manifest ({type(error).__name__}: {error})") from error
    if STATE not in files:
        raise DamagedCheckpointError(f"{path} does not list {STATE}")
    return manifest


def read_state(folder: Path) -> TrainState:
    """Read state.json (its content is verified with the other files)."""
    content = read_json(folder / STATE)
    try:
        return TrainState(**content)
    except TypeError as error:
        raise DamagedCheckpointError(f"{folder / STATE} is not a state ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file of at most MAX_JSON_BYTES. Raises DamagedCheckpointError."""
    try:
        if path.is_symlink() or not path.is_file():
            raise OSError("there is no such file; links are not followed")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"longer than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error}); choose an older checkpoint") from error
    return value


def verify_folder(folder: Path, names: Collection[str] | None = None, *, root: Path | None = None) -> Manifest:
    """Hold a checkpoint against its manifest: its list of files, their sizes, and the content of `names` (None: of all).

    root: the folder that it must lie in. No file that the manifest does not list is opened.
    Raises DamagedCheckpointError naming every fault, down to the tensor.
    """
    check_place(folder, root)
    manifest = read_manifest(folder)
    if re.fullmatch(r"step-\d+", folder.name) and int(folder.name[5:]) != manifest.step:
        raise DamagedCheckpointError(
            f"{folder / MANIFEST} is of step {manifest.step}: it belongs to another checkpoint"
        )
    faults = list(_list_faults(folder, manifest))
    for name in sorted(manifest.files if names is None else names):
        path, entry = folder / name, manifest.files[name]
        if not any(fault.startswith(f"{path} ") for fault in faults):
            faults += content_faults(path, entry.sum)
    if faults:
        raise DamagedCheckpointError("; ".join(faults))
    return manifest


def check_place(folder: Path, root: Path | None) -> None:
    """Refuse what is no checkpoint's folder, or lies elsewhere than it seems."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a checkpoint folder; trainer.resume takes auto, never, or such a folder"
        )
    if ".tmp" in folder.name:
        raise CheckpointError(f"{folder} was never finished; choose a folder without .tmp")
    if root is not None and folder.resolve().parent != root.resolve():
        raise DamagedCheckpointError(f"{folder} leads out of {root}, to {folder.resolve()}; links are not followed")


def _list_faults(folder: Path, manifest: Manifest) -> list[str]:
    faults = []
    # Hidden files are droppings of file systems and editors; they are not opened either.
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {MANIFEST}
    for name in sorted(there - manifest.files.keys()):
        faults.append(f"{folder / name} does not belong to the checkpoint (and was not opened); take it away")
    for name, entry in manifest.files.items():
        path = folder / name
        if name not in there:
            faults.append(f"{path} cannot be read (it is missing)")
        elif path.is_symlink() or not path.is_file():
            faults.append(f"{path} is not a regular file; links are not followed")
        elif (size := path.stat().st_size) != entry.sum.size:
            faults.append(f"{path} cannot be read ({size} bytes, {entry.sum.size} were written)")
    return faults


def content_faults(path: Path, expected: FileSum) -> list[str]:
    """What is wrong with a file's content: nothing, or its changed tensors by name. One pass when all is well."""
    try:
        found = file_checksum(path)
        if found == expected.crc32c:
            return []
        changed = []
        if expected.tensors:
            entries = read_header(path).entries
            changed = [
                name
                for name, value in expected.tensors.items()
                if name not in entries or file_checksum(path, entries[name].start, entries[name].end) != value
            ]
        what = f"tensors {', '.join(changed)}" if changed else "header" if expected.tensors else "content"
        return [f"{path} was changed after it was written: {what} (CRC32C {found:08x}, not {expected.crc32c:08x})"]
    except CheckpointError as error:
        return [str(error)]


def _file_entry(value: Any) -> FileEntry:
    ids = value.get("expert_ids")
    return FileEntry(
        sum=FileSum(
            size=int(value["size"]),
            crc32c=int(value["crc32c"], 16),
            tensors={name: int(text, 16) for name, text in value["tensors"].items()},
        ),
        expert_ids=None if ids is None else tuple(int(number) for number in ids),
    )


def _plain(name: str) -> str:
    """A name inside the folder, never a path."""
    if not _PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _json_sum(value: Any) -> str:
    return f"{google_crc32c.value(_canonical(value)):08x}"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict).encode()
