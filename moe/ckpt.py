"""`switchyard ckpt ls|verify|diff`: look at checkpoints without loading a model. Torch-free."""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from moe.errors import CheckpointError, ExitCode
from moe.train.checkpoint.folder import CHECKPOINTS, find_checkpoints, read_latest
from moe.train.checkpoint.manifest import MANIFEST, Manifest, read_state, verify_folder
from moe.train.checkpoint.tensor_file import Entry, RawTensor, read_header, read_tensor

_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """The arguments of `switchyard ckpt`; each verb is put into `verb`."""
    verbs = parser.add_subparsers(metavar="ls|verify|diff", required=True)
    listing = verbs.add_parser("ls", help="what checkpoints there are")
    listing.add_argument("path", metavar="RUN|DIR", type=Path, help="a run folder, or a folder of checkpoints")
    listing.set_defaults(verb=list_checkpoints)
    verifying = verbs.add_parser("verify", help="hold every byte against its sum; exit code 4 when one differs")
    verifying.add_argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, a run folder, a folder of checkpoints"
    )
    verifying.set_defaults(verb=verify_checkpoints)
    differing = verbs.add_parser("diff", help="what differs between two checkpoints of any two layouts")
    differing.add_argument("a", metavar="A", type=Path)
    differing.add_argument("b", metavar="B", type=Path)
    differing.set_defaults(verb=diff_checkpoints)


def list_checkpoints(arguments: argparse.Namespace) -> int:
    """Print a row for each folder; sizes and the list of files are checked, contents are not."""
    root = _root_of(arguments.path)
    latest, problem = read_latest(root)
    console = Console()
    table = Table("checkpoint", "step", "written (UTC)", "GB", "ranks", "expert", "state")
    for path in sorted(path for path in root.iterdir() if path.name.startswith("step-")):
        mark = " (latest)" if path == latest else ""
        try:
            manifest = verify_folder(path, (), root=root)
        except CheckpointError as error:
            table.add_row(path.name + mark, "", "", "", "", "", str(error).replace(f"{path}", path.name))
            continue
        layout = manifest.layout
        numbers = (f"{manifest.size / 1e9:.3f}", f"{layout.get('world_size')}", f"{layout.get('expert')}")
        table.add_row(path.name + mark, str(manifest.step), manifest.created[:19], *numbers, "whole")
    console.print(table)
    if problem is not None:
        console.print(problem, markup=False)
    return int(ExitCode.done)


def verify_checkpoints(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint, and the speed. Returns 4 when one is damaged."""
    paths = [arguments.path] if (arguments.path / MANIFEST).exists() else find_checkpoints(_root_of(arguments.path))
    if not paths:
        raise CheckpointError(f"{arguments.path} holds no checkpoint; give a run folder or a checkpoint")
    code = ExitCode.done
    for path in paths:
        started = time.perf_counter()
        try:
            manifest = verify_folder(path)
        except CheckpointError as error:
            print(f"{path}: DAMAGED\n  " + str(error).replace("; ", "\n  "))
            code = ExitCode.bad_checkpoint
            continue
        seconds = time.perf_counter() - started
        rate = manifest.size / 1e9 / seconds
        print(f"{path}: good, {len(manifest.files)} files, {manifest.size / 1e9:.3f} GB, {rate:.2f} GB/s")
    return int(code)


def diff_checkpoints(arguments: argparse.Namespace) -> int:
    """Print what differs. Returns 0 whether anything does or not."""
    a, b = _Tensors(arguments.a), _Tensors(arguments.b)
    lines = [
        *_mapping_differences("", a.facts(), b.facts()),
        *tensor_differences(a, b),
    ]
    for line in lines or ["the same settings, position and tensors"]:
        print(line)
    return int(ExitCode.done)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a tensor, or one expert of a stack, lies."""

    file: str
    key: str
    entry: Entry
    row: int | None


class _Tensors:
    """A checkpoint's tensors by key and global expert id, read one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = verify_folder(folder, ())
        self.pieces: dict[str, _Piece] = {}
        for file, listed in self.manifest.files.items():
            if file.endswith(".json") or file.startswith("rank-"):
                continue
            for key, entry in read_header(folder / file).entries.items():
                if listed.expert_ids is None:
                    self.pieces[key] = _Piece(file, key, entry, None)
                for row, expert in enumerate(listed.expert_ids or ()):
                    self.pieces[f"{key}[expert {expert}]"] = _Piece(file, key, entry, row)
        self._stack: tuple[tuple[str, str], NDArray[Any]] | None = None

    def facts(self) -> dict[str, Any]:
        """What is not a tensor."""
        state = read_state(self.folder)
        return {
            "step": state.step, "next_sample": state.next_sample, "layout": dict(self.manifest.layout),
            "fingerprints": dict(state.fingerprints), "settings": dict(state.settings), "extra": dict(state.extra),
        }  # fmt: skip

    def kind(self, name: str) -> str:
        piece = self.pieces[name]
        shape = piece.entry.shape if piece.row is None else piece.entry.shape[1:]
        return f"{list(shape)} {piece.entry.dtype}"

    def values(self, name: str) -> NDArray[Any]:
        piece = self.pieces[name]
        # Neighbours are often experts of one stack: it is read once.
        if self._stack is None or self._stack[0] != (piece.file, piece.key):
            expected = self.manifest.files[piece.file].sum.tensors.get(piece.key)
            raw = read_tensor(self.folder / piece.file, piece.key, piece.entry, expected)
            self._stack = (piece.file, piece.key), _to_array(raw)
        return self._stack[1] if piece.row is None else self._stack[1][piece.row]


def tensor_differences(a: _Tensors, b: _Tensors) -> Iterator[str]:
    """A line for each tensor, or expert of one, that only one side has or that differs."""
    for name in sorted(a.pieces.keys() | b.pieces.keys()):
        if name not in a.pieces or name not in b.pieces:
            side, held = ("A", a) if name in a.pieces else ("B", b)
            yield f"{name}: only in {side}, {held.kind(name)}"
        elif a.kind(name) != b.kind(name):
            yield f"{name}: {a.kind(name)} in A, {b.kind(name)} in B"
        else:
            left, right = a.values(name), b.values(name)
            if not np.array_equal(left, right):
                wide_left, wide_right = left.astype(np.float64), right.astype(np.float64)
                scale = float(np.max(np.abs(wide_right)))
                error = float(np.max(np.abs(wide_left - wide_right)))
                yield (
                    f"{name}: {int((left != right).sum())} of {left.size} values differ, largest |A − B| / max|B| = "
                    + (f"{error / scale:.2e}" if scale else "inf")
                )


def _mapping_differences(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _mapping_differences(f"{prefix}{key}.", left, right)
        elif left != right:
            yield f"{prefix}{key}: {left!r} in A, {right!r} in B"


def _to_array(raw: RawTensor) -> NDArray[Any]:
    if raw.dtype == "BF16":
        # bf16 is the upper half of fp32.
        return (raw.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(raw.shape)
    return raw.data.view(_NUMPY[raw.dtype]).reshape(raw.shape)


def _root_of(path: Path) -> Path:
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if not root.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a run folder or a folder of checkpoints")
    return root
