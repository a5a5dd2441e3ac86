"""Packing: hand-worked boundaries, then the reference in loops."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.packing import DocumentTable, TokenStream
from moe.data.shards import TokenShard
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from tests.data.make import make_shard, same
from tests.data.reference import pack

NONE = IGNORE_LABEL


def stream_of(shards: list[TokenShard], order: list[int] | None = None) -> TokenStream:
    table = DocumentTable([shard.document_offsets for shard in shards])
    return TokenStream(shards, table, np.array(range(len(table.length_D)) if order is None else order, dtype=np.int64))


def rows(stream: TokenStream, starts: list[int], seq_len: int) -> TokenBatch:
    return stream.rows(np.array(starts, dtype=np.int64), seq_len)


def test_three_documents_in_three_rows(tmp_path: Path) -> None:
    """Rows of 4 over the stream of a (11 12 13 14 0), b (21 0) and c (31 32 0):

    stream     11 12 13 14 |  0 21  0 31 | 32  0
    labels     12 13 14  0 |  –  0  – 32 |  0  –
    positions   0  1  2  3 |  0  0  1  0 |  0  1     a and c are cut, and begin again in the next row
    documents   0  0  0  0 |  0  1  1  2 |  0  0     the last row ends in two tokens of padding
    """
    stream = stream_of([make_shard(tmp_path / "a", [[11, 12, 13, 14, 0], [21, 0], [31, 32, 0]])])
    batch = rows(stream, [0, 4, 8], 4)
    assert stream.num_tokens == 10
    assert batch.input_ids_BS.tolist() == [[11, 12, 13, 14], [0, 21, 0, 31], [32, 0, 0, 0]]
    assert batch.labels_BS.tolist() == [[12, 13, 14, 0], [NONE, 0, NONE, 32], [0, NONE, NONE, NONE]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3], [0, 0, 1, 0], [0, 1, 0, 0]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 0], [0, 1, 1, 2], [0, 0, -1, -1]]
    assert PADDING_DOCUMENT == -1
    assert all(tensor.dtype == torch.int64 for tensor in batch)


def test_documents_of_one_token_have_no_label(tmp_path: Path) -> None:
    batch = rows(stream_of([make_shard(tmp_path / "a", [[0], [0], [0]])]), [0], 3)
    assert batch.labels_BS.tolist() == [[NONE] * 3]
    assert batch.positions_BS.tolist() == [[0, 0, 0]]
    assert batch.document_ids_BS.tolist() == [[0, 1, 2]]


def test_giant_document_fills_row_after_row_and_loses_no_label(tmp_path: Path) -> None:
    """A document of 100,001 tokens in rows of 1,000: positions begin again in each row, and each label is the token
    that follows, also over the rows' edges; after the end token there is padding."""
    document = [*(1 + i % 900 for i in range(100_000)), 0]
    batch = rows(stream_of([make_shard(tmp_path / "a", [document])]), list(range(0, 101_000, 1000)), 1000)
    flat = batch.labels_BS.flatten()
    assert flat[:100_000].tolist() == document[1:]
    assert (flat[100_000:] == NONE).all()
    assert (batch.positions_BS[:100] == torch.arange(1000)).all()
    assert (batch.document_ids_BS[:100] == 0).all()
    assert batch.document_ids_BS[100].tolist() == [0] + [PADDING_DOCUMENT] * 999


def test_row_that_ends_with_a_document_does_not_predict_the_next(tmp_path: Path) -> None:
    """Stream 1 0 | 2 0 in rows of 2: the end token at a row's edge has no target although a token follows."""
    batch = rows(stream_of([make_shard(tmp_path / "a", [[1, 0], [2, 0]])]), [0, 2], 2)
    assert batch.labels_BS.tolist() == [[0, NONE], [0, NONE]]


def test_rows_behind_the_end_are_padding(tmp_path: Path) -> None:
    batch = rows(stream_of([make_shard(tmp_path / "a", [[1, 0]])]), [2, 50], 2)
    assert batch.input_ids_BS.tolist() == [[0, 0], [0, 0]]
    assert (batch.labels_BS == NONE).all()
    assert (batch.positions_BS == 0).all()
    assert (batch.document_ids_BS == PADDING_DOCUMENT).all()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    cut=st.integers(1, 3),
    seq_len=st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_equals_the_reference_for_any_documents_shards_and_places(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, seq_len: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(len(lengths) * 100 + seq_len)
    documents = [[*rng.integers(1, 999, size=length - 1).tolist(), 0] for length in lengths]
    folder = tmp_path_factory.mktemp("shards")
    parts = [part for part in (documents[i::cut] for i in range(cut)) if part]
    shards = [make_shard(folder / str(number), part) for number, part in enumerate(parts)]
    numbered = [document for part in parts for document in part]
    order = data.draw(st.permutations(range(len(numbered))))
    starts = data.draw(st.lists(st.integers(0, sum(lengths) + 5), min_size=1, max_size=6))

    batch = rows(stream_of(shards, list(order)), starts, seq_len)

    assert same(batch, pack([numbered[number] for number in order], starts, seq_len))
    assert all(tensor.is_contiguous() for tensor in batch)
