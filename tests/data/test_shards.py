"""Token shards: what is written is read again, 64-bit offsets, and refusal of every odd file by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.packing import DocumentTable
from moe.data.shards import ShardWriter, TokenShard, byte_offsets, offsets_of, token_dtype
from moe.errors import DataError
from tests.data.make import make_shard


@given(documents=st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_documents_come_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    shard = make_shard(tmp_path_factory.mktemp("shard") / "a", documents)
    shard.verify()
    assert [shard.document(i).tolist() for i in range(shard.num_documents)] == documents
    assert shard.num_tokens == sum(map(len, documents))
    assert shard.document_offsets.dtype == np.int64


def test_byte_offsets_are_64_bit() -> None:
    """A37: three documents of 2³⁰ tokens at 4 bytes. In 32 bits the sums would wrap to 0, 0, 0."""
    lengths = np.full(3, 2**30, dtype=np.int32)
    assert byte_offsets(lengths, 4).tolist() == [0, 4294967296, 8589934592, 12884901888]
    assert byte_offsets(lengths, 4).dtype == np.int64
    assert byte_offsets([2**30] * 3, 4).tolist() == byte_offsets(lengths, 4).tolist()


def test_joined_shards_number_their_documents_through() -> None:
    """A37: an index of 2 documents joined with one of 3: documents 0 … 4, and places behind 2³² tokens stay right."""
    first, second = offsets_of([2**31, 2**31]), offsets_of([5, 2**32, 7])
    table = DocumentTable([first, second])
    assert table.length_D.tolist() == [2**31, 2**31, 5, 2**32, 7]
    assert table.shard_D.tolist() == [0, 0, 1, 1, 1]
    assert table.begin_D.tolist() == [0, 2**31, 0, 5, 2**32 + 5]
    assert offsets_of(table.length_D).tolist() == [0, 2**31, 2**32, 2**32 + 5, 2**33 + 5, 2**33 + 12]


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(257, 2), (65536, 2), (65537, 4), (2**32, 4)])
def test_type_is_the_narrowest_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, bytes_each: int) -> None:
    shard = make_shard(tmp_path / "a", [[vocab_size - 1, 0]], vocab_size)
    assert (tmp_path / "a.bin").stat().st_size == 2 * bytes_each
    assert shard.document(0).tolist() == [vocab_size - 1, 0]


def test_vocabulary_beyond_the_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin: ids of a vocabulary of 65537 do not fit in uint16; use uint32"):
        ShardWriter(tmp_path / "a", 65537, np.uint16)
    with pytest.raises(DataError, match="do not fit in int16"):
        ShardWriter(tmp_path / "a", 300, np.int16)
    with pytest.raises(DataError, match="does not fit in 32-bit"):
        token_dtype(2**32 + 1)


@pytest.mark.parametrize("wrong", [300, 65536 + 5, -1])
def test_id_outside_the_vocabulary_names_the_document(tmp_path: Path, wrong: int) -> None:
    """An id of 65541 would wrap to 5 in uint16."""
    documents = [[299, 0], [7, wrong, 0]]
    with pytest.raises(DataError, match=rf"id {wrong} at position 1 of document number 1 is outside .*\(0 … 299\)"):
        make_shard(tmp_path / "a", documents, vocab_size=300)
    assert not (tmp_path / "a.idx").exists()


def test_empty_document_and_empty_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin: document number 1 has no tokens"):
        make_shard(tmp_path / "a", [[1], []])
    with pytest.raises(DataError, match=r"a\.bin: a shard must hold at least one document"):
        make_shard(tmp_path / "a", [])


def rewrite_header(path: Path, **changes: object) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[8:16])
    header = json.dumps({**json.loads(raw[16 : 16 + size]), **changes}).encode()
    path.write_bytes(raw[:8] + struct.pack("<Q", len(header)) + header + raw[16 + size :])


def rewrite_offsets(path: Path, offsets: list[int]) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: -8 * len(offsets)] + np.array(offsets, dtype="<i8").tobytes())


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "tokens cut": (lambda b, i: b.write_bytes(b.read_bytes()[:-2]), r"a\.bin has 12 bytes, but its index says 14"),
    "half a token": (lambda b, i: b.write_bytes(b.read_bytes() + b"\0"), r"a\.bin has 15 bytes"),
    "tokens empty": (lambda b, i: b.write_bytes(b""), r"a\.bin has 0 bytes"),
    "tokens missing": (lambda b, i: b.unlink(), r"a\.bin cannot be read \(No such file"),
    "index missing": (lambda b, i: i.unlink(), r"a\.idx cannot be read \(No such file"),
    "index empty": (lambda b, i: i.write_bytes(b""), r"a\.idx must begin with SWYDIDX1"),
    "index of another kind": (lambda b, i: i.write_bytes(b"PK\3\4" * 50), r"a\.idx must begin with SWYDIDX1"),
    "index cut": (lambda b, i: i.write_bytes(i.read_bytes()[:-3]), r"a\.idx holds 29 bytes of offsets.* need 32"),
    "header cut": (lambda b, i: i.write_bytes(i.read_bytes()[:40]), r"a\.idx: its header is damaged"),
    "header length absurd": (
        lambda b, i: i.write_bytes(i.read_bytes()[:8] + b"\xff" * 8 + i.read_bytes()[16:]),
        r"a\.idx: its header is damaged",
    ),
    "type unknown": (lambda b, i: rewrite_header(i, dtype="<f2"), r"a\.idx: its header is damaged"),
    "count negative": (lambda b, i: rewrite_header(i, num_documents=-1), r"a\.idx: its header is damaged"),
    "count absurd": (lambda b, i: rewrite_header(i, num_documents=2**61), r"a\.idx holds 32 bytes of offsets"),
    "more tokens than there are": (lambda b, i: rewrite_header(i, num_tokens=8), r"a\.idx: offsets must rise"),
    "offsets fall": (lambda b, i: rewrite_offsets(i, [0, 5, 4, 7]), r"a\.idx: offsets must rise"),
    "document empty": (lambda b, i: rewrite_offsets(i, [0, 3, 3, 7]), r"a\.idx: offsets must rise"),
    "offsets negative": (lambda b, i: rewrite_offsets(i, [-1, 3, 5, 7]), r"a\.idx: offsets must rise"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_odd_file_is_refused_naming_file_and_rule(tmp_path: Path, damage: str) -> None:
    make_shard(tmp_path / "a", [[1, 2, 0], [3, 0], [4, 0]])
    harm, message = DAMAGES[damage]
    harm(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(DataError, match=message):
        TokenShard(tmp_path / "a")


@pytest.mark.parametrize("damage", ["token", "offset"])
def test_changed_contents_are_found(tmp_path: Path, damage: str) -> None:
    make_shard(tmp_path / "a", [[1, 2, 0], [3, 0], [4, 0]])
    if damage == "token":
        raw = bytearray((tmp_path / "a.bin").read_bytes())
        raw[4] ^= 1
        (tmp_path / "a.bin").write_bytes(raw)
    else:
        rewrite_offsets(tmp_path / "a.idx", [0, 2, 5, 7])
    shard = TokenShard(tmp_path / "a")
    with pytest.raises(DataError, match=r"a\.bin: contents do not match the hash"):
        shard.verify()


def test_fingerprint_depends_on_tokens_and_boundaries(tmp_path: Path) -> None:
    contents = {"a": [[1, 0], [2, 0]], "b": [[1, 0], [3, 0]], "c": [[1, 0, 2], [0]]}
    prints = {make_shard(tmp_path / name, documents).fingerprint for name, documents in contents.items()}
    assert len(prints) == 3
    assert (
        make_shard(tmp_path / "d", contents["a"]).fingerprint == make_shard(tmp_path / "a", contents["a"]).fingerprint
    )
