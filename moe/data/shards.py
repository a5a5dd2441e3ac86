"""Token shards: the documents of one domain and split as two files, on the data path between tokenizer and packing.

    <stem>.bin   all tokens, one document after the other: little-endian uint16 (vocabulary up to 65,536) or uint32
    <stem>.idx   8 bytes "SWYDIDX1" · uint64 length of the header · header (JSON) · int64 offsets [documents + 1]

Offsets count tokens from the start of the .bin file: document d is tokens[offsets[d] : offsets[d + 1]], never empty.
The header repeats what the files' sizes and contents must agree with. Tokens are memory-mapped, never read whole.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moe.errors import DataError

_MAGIC = b"SWYDIDX1"
_WAY_OUT = "delete its folder, and it is built again from the text"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Narrowest type that holds every id below `vocab_size`. Raises: DataError when uint32 does not."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    if vocab_size <= 1 << 32:
        return np.dtype("<u4")
    raise DataError(f"a vocabulary of {vocab_size} does not fit in 32-bit token ids; choose a smaller model.vocab_size")


def offsets_of(lengths: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 [n + 1]: where each of n documents starts when they stand one after the other, and the end of the last.

    Summed in 64 bits whatever the type of the lengths, as a 32-bit sum wraps at 2³¹ tokens.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def byte_offsets(lengths: Sequence[int] | npt.NDArray[Any], item_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [n + 1]: the same in bytes, for tokens of `item_bytes` bytes."""
    return offsets_of(lengths) * np.int64(item_bytes)


class ShardWriter:
    """Writes one shard, a document at a time; a context manager. The index comes last, so half a shard has none."""

    def __init__(self, stem: Path, vocab_size: int, dtype: npt.DTypeLike | None = None) -> None:
        """`dtype`: uint16 or uint32; the narrowest that fits the vocabulary by default.

        Raises: DataError when ids below `vocab_size` do not fit in `dtype`.
        """
        self._stem = stem
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size) if dtype is None else np.dtype(dtype).newbyteorder("<")
        if self._dtype.str not in ("<u2", "<u4") or self._dtype.itemsize < token_dtype(vocab_size).itemsize:
            raise DataError(
                f"{stem}.bin: ids of a vocabulary of {vocab_size} do not fit in {self._dtype}; "
                f"use {token_dtype(vocab_size)}"
            )
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        self._file: BinaryIO = Path(f"{stem}.bin").open("wb")  # noqa: SIM115 (closed in __exit__)

    def add(self, name: str, token_ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append a document of at least one token.

        Raises: DataError naming the document when it is empty or holds an id outside the vocabulary.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        if ids.size == 0:
            raise DataError(
                f"{self._stem}.bin: document {name} has no tokens; leave it out, or end it with an end token"
            )
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if wrong.size:
            raise DataError(
                f"{self._stem}.bin: token id {ids[wrong[0]]} at position {wrong[0]} of document {name} is outside the "
                f"vocabulary (0 … {self._vocab_size - 1}); set model.vocab_size to the tokenizer's, or tokenize again"
            )
        raw = ids.astype(self._dtype).tobytes()
        self._digest.update(raw)
        self._file.write(raw)
        self._lengths.append(ids.size)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None:
            return
        if not self._lengths:
            raise DataError(
                f"{self._stem}.bin: a shard must hold at least one document; give it text or drop the domain"
            )
        offsets = offsets_of(self._lengths).astype("<i8")
        self._digest.update(offsets.tobytes())
        header = json.dumps(
            {
                "dtype": self._dtype.str,
                "vocab_size": self._vocab_size,
                "num_documents": len(self._lengths),
                "num_tokens": int(offsets[-1]),
                "sha256": self._digest.hexdigest(),
            }
        ).encode()
        with Path(f"{self._stem}.idx").open("wb") as file:
            file.write(_MAGIC + struct.pack("<Q", len(header)) + header + offsets.tobytes())


class TokenShard:
    """A shard opened for reading, its form checked: sizes agree, offsets rise. `verify` also checks the contents."""

    def __init__(self, stem: Path) -> None:
        """Raises: DataError naming the file and the rule it breaks."""
        self.stem = stem
        header, self.document_offsets = _read_index(Path(f"{stem}.idx"))
        self.vocab_size: int = header["vocab_size"]
        """Every id was checked to be below this when the shard was written."""
        self.num_tokens: int = header["num_tokens"]
        self.num_documents: int = header["num_documents"]
        self.fingerprint: str = header["sha256"]
        """SHA-256 of tokens and offsets."""
        self.tokens = _map_tokens(Path(f"{stem}.bin"), np.dtype(header["dtype"]), self.num_tokens)
        """[num_tokens] uint16 or uint32, read-only."""

    def document(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one document, a read-only view."""
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]

    def verify(self) -> None:
        """Read all tokens and compare with the recorded hash. Raises: DataError when the contents were changed."""
        digest = hashlib.sha256()
        step = 1 << 24  # tokens at a time: 32 or 64 MiB
        for start in range(0, self.num_tokens, step):
            digest.update(self.tokens[start : start + step].tobytes())
        digest.update(self.document_offsets.astype("<i8").tobytes())
        if digest.hexdigest() != self.fingerprint:
            raise DataError(f"{self.stem}.bin: contents do not match the hash in {self.stem}.idx; {_WAY_OUT}")


def _read_index(path: Path) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
    """Header and offsets of an index file, checked."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_WAY_OUT}") from error
    start = len(_MAGIC) + 8
    if len(raw) < start or not raw.startswith(_MAGIC):
        raise DataError(f"{path} must begin with {_MAGIC.decode()}, so it is no token index or was cut; {_WAY_OUT}")
    (header_bytes,) = struct.unpack("<Q", raw[len(_MAGIC) : start])
    try:
        header = json.loads(raw[start : start + header_bytes])
        numbers = [header[key] for key in ("vocab_size", "num_documents", "num_tokens")]
        good = all(type(n) is int and n > 0 for n in numbers) and header["dtype"] in ("<u2", "<u4")
        good = good and isinstance(header["sha256"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise DataError(f"{path}: its header is damaged; {_WAY_OUT}")
    rest = len(raw) - start - header_bytes
    expected = 8 * (header["num_documents"] + 1)
    if rest != expected:
        raise DataError(
            f"{path} holds {rest} bytes of offsets, but {header['num_documents']} documents need {expected}; {_WAY_OUT}"
        )
    offsets = np.frombuffer(raw, dtype="<i8", offset=start + header_bytes).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or not bool((np.diff(offsets) > 0).all()):
        raise DataError(f"{path}: offsets must rise from 0 to {header['num_tokens']} tokens; {_WAY_OUT}")
    return header, offsets


def _map_tokens(path: Path, dtype: np.dtype[Any], num_tokens: int) -> npt.NDArray[Any]:
    """Memory map of a token file whose size has been checked."""
    try:
        found = path.stat().st_size
        expected = num_tokens * dtype.itemsize
        if found != expected:
            raise DataError(
                f"{path} has {found} bytes, but its index says {expected} ({num_tokens} tokens); {_WAY_OUT}"
            )
        return np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_WAY_OUT}") from error
