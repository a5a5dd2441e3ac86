"""Files of tensors in the safetensors format, written in pieces and checked to the last byte. Torch-free.

    8 bytes: length of the header, little endian | header: JSON | the tensors, one behind the other

The library writes and reads the same format, but maps files into memory (a file cut short meanwhile kills the process),
keeps no sums, and cannot be interrupted at a chosen byte by a test. Nothing here believes a number that it has read: a
header is bounded by the file's size before it is read, and must describe every byte of the file exactly once.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from moe.errors import CheckpointError

PIECE_BYTES = 1 << 22
"""Largest piece that is summed or written at once: about a millisecond, in which other threads wait for Python."""
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library allows, too."""
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

Fault = Callable[[str], None]
"""Called with the name of a place in the protocol; tests kill or raise there."""


def no_fault(place: str) -> None:
    """What stands in for a Fault outside of tests."""


class DamagedCheckpointError(CheckpointError):
    """What lies on disk is not what was written: an older checkpoint may serve."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor as bytes."""

    dtype: str
    """One of DTYPE_BYTES."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """Its bytes, [size], row-major."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    entries: dict[str, Entry]
    """In the order of their place."""
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """Size and sums of a file: what the manifest keeps of it."""

    size: int
    crc32c: int
    tensors: Mapping[str, int]
    """CRC32C of each tensor's bytes; empty for other files."""


def write_tensors(
    path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str], fault: Fault = no_fault
) -> FileSum:
    """Write a new file and bring it to the disk; returns its sums, taken on the way.

    Raises FileExistsError rather than write over anything, and OSError.
    """
    # Wide types first, so that each tensor begins at a multiple of its element (the header is padded to eight bytes).
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    description: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.data.nbytes
        description[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    header = json.dumps(description, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    total = len(head) + offset
    writer = _Writer(path, total, fault)
    with writer.file:
        writer.write(np.frombuffer(head, np.uint8))
        sums = {name: writer.write(tensors[name].data) for name in order}
        os.fsync(writer.file.fileno())
    return FileSum(size=total, crc32c=writer.crc32c, tensors=sums)


def write_bytes(path: Path, content: bytes, fault: Fault = no_fault) -> FileSum:
    """Write a new file of any content and bring it to the disk; as `write_tensors`."""
    writer = _Writer(path, len(content), fault)
    with writer.file:
        writer.write(np.frombuffer(content, np.uint8))
        os.fsync(writer.file.fileno())
    return FileSum(size=len(content), crc32c=writer.crc32c, tensors={})


class _Writer:
    """A new file that grows piece by piece; the places `write NAME 5%`, `50%` and `95%` are faults' places."""

    def __init__(self, path: Path, total: int, fault: Fault) -> None:
        self.crc32c = 0
        # "x": never an existing file.
        self.file = FileIO(path, "x")
        self._name, self._total, self._fault = path.name, total, fault
        self._marks = [mark for mark in (5, 50, 95) if fault is not no_fault]
        self._written = 0
        self._piece = min(PIECE_BYTES, total) if fault is no_fault else max(1, total // 40)

    def write(self, data: NDArray[np.uint8]) -> int:
        """Append; returns the CRC32C of data."""
        own = 0
        for piece in pieces(data, self._piece):
            own = google_crc32c.extend(own, piece)
            self.crc32c = google_crc32c.extend(self.crc32c, piece)
            left = piece.data
            while left:
                left = left[self.file.write(left) :]
            self._written += len(piece)
            while self._marks and self._written * 100 >= self._marks[0] * self._total:
                self._fault(f"write {self._name} {self._marks.pop(0)}%")
        return own


def pieces(data: NDArray[np.uint8], size: int = PIECE_BYTES) -> Iterator[NDArray[np.uint8]]:
    """Cut into views of at most `size` bytes."""
    for start in range(0, len(data), max(size, 1)):
        yield data[start : start + size]


def checksum(data: NDArray[np.uint8]) -> int:
    """CRC32C of bytes in memory."""
    value = 0
    for piece in pieces(data):
        value = google_crc32c.extend(value, piece)
    return value


def file_checksum(path: Path, start: int = 0, end: int | None = None) -> int:
    """CRC32C of a file, or of its bytes from start to end. Raises DamagedCheckpointError when it ends before `end`."""
    buffer = np.empty(PIECE_BYTES, np.uint8)
    value, position = 0, start
    with _open(path) as file:
        file.seek(start)
        while end is None or position < end:
            wanted = buffer if end is None else buffer[: end - position]
            count = file.readinto(wanted.data)
            if not count:
                break
            value = google_crc32c.extend(value, wanted[:count])
            position += count
    if end is not None and position < end:
        raise DamagedCheckpointError(f"{path} ends at byte {position}, {end} are needed")
    return value


def read_header(path: Path) -> Header:
    """Read and check what a file says of itself; allocates no more than the file is long.

    Raises DamagedCheckpointError, naming file and fault.
    """
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise DamagedCheckpointError(
                    f"{path}: its header claims {length} bytes, but the file has {size} (at most {MAX_HEADER_BYTES})"
                )
            description = json.loads(file.read(length))
        return _checked(path, description, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: its header cannot be read ({error})") from error


def _checked(path: Path, description: Any, data_start: int, size: int) -> Header:
    if not isinstance(description, dict):
        raise DamagedCheckpointError(f"{path}: its header is not an object")
    metadata = description.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedCheckpointError(f"{path}: __metadata__ must map names to text")
    entries = {name: _entry(path, name, value, data_start) for name, value in description.items()}
    position = data_start
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    for name, entry in ordered.items():
        if entry.start != position:
            raise DamagedCheckpointError(f"{path}: {name} begins at byte {entry.start}, not at {position}")
        position = entry.end
    if position != size:
        raise DamagedCheckpointError(f"{path} has {size} bytes, its header describes {position}")
    return Header(ordered, metadata)


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    fault = DamagedCheckpointError(f"{path}: the entry of {name} is not a dtype, a shape and its bytes: {value!r:.200}")
    if not isinstance(value, dict) or value.get("dtype") not in DTYPE_BYTES:
        raise fault
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise fault
    if len(offsets) != 2:
        raise fault
    count = DTYPE_BYTES[value["dtype"]]
    for extent in shape:
        count *= extent
    if offsets[1] - offsets[0] != count:
        raise fault
    return Entry(value["dtype"], tuple(shape), data_start + offsets[0], data_start + offsets[1])


def read_tensor(path: Path, name: str, entry: Entry, expected_crc32c: int | None) -> RawTensor:
    """Read one tensor and hold its bytes against their sum.

    Raises DamagedCheckpointError, naming file and tensor.
    """
    data = np.empty(entry.end - entry.start, np.uint8)
    value = 0
    with _open(path) as file:
        file.seek(entry.start)
        for piece in pieces(data):
            left = piece.data
            while left:
                count = file.readinto(left)
                if not count:
                    raise DamagedCheckpointError(f"{path} ends inside {name}")
                left = left[count:]
            value = google_crc32c.extend(value, piece)
    if expected_crc32c is not None and value != expected_crc32c:
        raise DamagedCheckpointError(
            f"{path}: {name} was changed after it was written: CRC32C {value:08x}, not {expected_crc32c:08x}"
        )
    return RawTensor(entry.dtype, entry.shape, data)


def _open(path: Path) -> FileIO:
    """Open for reading; a link is not followed, wherever it leads, and a pipe is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}); links are not followed") from error
    return FileIO(descriptor, "r")
