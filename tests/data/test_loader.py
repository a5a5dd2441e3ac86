"""The order of samples: pure, complete, disjoint between ranks; held-out rows fixed."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.loader import HeldoutData, TrainingData, sample_index_for
from moe.data.shards import TokenShard
from moe.errors import DataError
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT
from tests.data.make import distinct_documents, make_shard, same

LENGTHS = ([5, 1, 17, 2, 9, 30], [3, 8, 1, 4])  # 64 tokens and 16: with rows of 8, an epoch of 10 samples


@pytest.fixture
def shards(tmp_path: Path) -> list[TokenShard]:
    """Two domains whose 80 tokens are all different."""
    return [
        make_shard(tmp_path / "a", distinct_documents(LENGTHS[0])),
        make_shard(tmp_path / "b", distinct_documents(LENGTHS[1], first=64)),
    ]


def training(shards: list[TokenShard], seq_len: int = 8, seed: int = 3) -> TrainingData:
    return TrainingData(shards, seq_len, seed, 1000)


def test_epoch_uses_every_token_of_all_domains_once(shards: list[TokenShard]) -> None:
    data = training(shards)
    assert data.samples_per_epoch == 10
    for epoch in range(3):
        batch = data.batch(epoch * 10, 10)
        assert sorted(batch.input_ids_BS.flatten().tolist()) == list(range(80))
        assert (batch.document_ids_BS != PADDING_DOCUMENT).all()


def test_every_token_but_each_documents_first_is_a_target_once(shards: list[TokenShard]) -> None:
    firsts = {int(shard.document(i)[0]) for shard in shards for i in range(shard.num_documents)}
    labels = training(shards).batch(0, 10).labels_BS
    assert sorted(labels[labels != IGNORE_LABEL].tolist()) == sorted(set(range(80)) - firsts)


def test_remainder_is_less_than_a_sample_and_differs_between_epochs(shards: list[TokenShard]) -> None:
    """80 tokens in rows of 13: 6 samples and 2 tokens that fill none."""
    data = training(shards, seq_len=13)
    assert data.samples_per_epoch == 6
    missing = []
    for epoch in range(4):
        used = Counter(data.batch(epoch * 6, 6).input_ids_BS.flatten().tolist())
        assert set(used.values()) == {1}
        missing.append(tuple(sorted(set(range(80)) - set(used))))
    assert all(len(tokens) == 2 for tokens in missing)
    assert len(set(missing)) > 1


def test_labels_follow_their_tokens_inside_a_document(shards: list[TokenShard]) -> None:
    """All tokens count upwards inside a document, so a label must be its token plus one."""
    for batch in (training(shards).batch(0, 10), training(shards, seq_len=13).batch(0, 6)):
        labelled = batch.labels_BS != IGNORE_LABEL
        assert (batch.labels_BS == batch.input_ids_BS + 1)[labelled].all()
        assert (batch.positions_BS[:, 0] == 0).all()
        assert (batch.document_ids_BS[:, 0] == 0).all()


@given(requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_sample_depends_on_seed_and_index_alone(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int]]
) -> None:
    """Whatever was asked before, in which order, in batches of any size, over epochs' edges: the same rows."""
    folder = tmp_path_factory.mktemp("order")
    shards = [make_shard(folder / "a", distinct_documents(LENGTHS[0]))]
    used = training(shards)
    for start, count in requests:
        batch = used.batch(start, count)
        singles = [training(shards).batch(start + row, 1) for row in range(count)]
        for name in batch._fields:
            assert torch.equal(getattr(batch, name), torch.cat([getattr(single, name) for single in singles]))


def test_order_differs_between_epochs_and_seeds(shards: list[TokenShard]) -> None:
    """A38: the order of the second epoch is another one."""
    data = training(shards)
    epochs = [data.batch(10 * epoch, 10).input_ids_BS for epoch in range(3)]
    seeds = [training(shards, seed=seed).batch(0, 10).input_ids_BS for seed in range(3)]
    for first, second in [*itertools.combinations(epochs, 2), *itertools.combinations(seeds, 2)]:
        assert not torch.equal(first, second)


def test_order_is_the_one_that_checkpoints_rely_on(tmp_path: Path) -> None:
    """Documents 0–1, 2–4, 5, 6–9 and seed 0 in rows of 2. Another order needs another ORDER_VERSION, as a resumed run
    would read other samples than it left out."""
    shard = make_shard(tmp_path / "a", distinct_documents([2, 3, 1, 4]))
    first, second = (TrainingData([shard], 2, 0, 1000).batch(start, 5).input_ids_BS.tolist() for start in (0, 5))
    assert first == [[2, 3], [0, 1], [6, 7], [8, 9], [4, 5]]
    assert second == [[0, 1], [7, 8], [9, 5], [4, 6], [2, 3]]


def test_samples_of_one_long_document_are_spread(tmp_path: Path) -> None:
    """A book among leaflets: a batch must not be nothing but pages of the book, next to each other."""
    shard = make_shard(tmp_path / "a", distinct_documents([400, *[10] * 40]))
    firsts = TrainingData([shard], 10, 0, 1000).batch(0, 80).input_ids_BS[:, 0]
    book = firsts < 400
    assert all(0 < int(book[i : i + 16].sum()) < 16 for i in range(0, 80, 16))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_nothing_and_miss_nothing(shards: list[TokenShard], world_size: int, accumulation: int) -> None:
    """A38: in any layout the ranks' parts of a step are disjoint and together the step's 16 samples, in order; five
    steps of 16 samples are exactly eight epochs of 10, each token eight times."""
    used: Counter[int] = Counter()
    readers = [training(shards) for _ in range(world_size)]
    for step in range(5):
        indices = []
        for micro_step, rank in itertools.product(range(accumulation), range(world_size)):
            part = sample_index_for(
                step, micro_step, rank, batch_size=16, accumulation=accumulation, data_size=world_size
            )
            assert len(part) == 16 // (accumulation * world_size)
            indices += list(part)
            used.update(readers[rank].batch(part.start, len(part)).input_ids_BS.flatten().tolist())
        assert indices == list(range(step * 16, step * 16 + 16))
    assert used == dict.fromkeys(range(80), 8)


def rank_part(rank: int, world_size: int) -> range:
    return sample_index_for(3, 1, rank, batch_size=24, accumulation=2, data_size=world_size)


def test_rank_takes_its_contiguous_part_of_the_micro_step() -> None:
    """Step 3 of 24 samples begins at 72; its second micro-step of two takes 84 … 95; rank 1 of 3 takes 88 … 91."""
    assert [rank_part(rank, 3) for rank in range(3)] == [range(84, 88), range(88, 92), range(92, 96)]
    assert rank_part(0, 1) == range(84, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 10}, r"trainer\.batch_size \(10\) must be a multiple .* \(2 \* 2\); choose 12"),
        ({"batch_size": 0}, "must each be at least 1"),
        ({"accumulation": 0}, "must each be at least 1"),
        ({"data_rank": 2}, "data rank 2: must lie in"),
        ({"micro_step": 2}, "micro-step 2, data rank 0: must lie in"),
        ({"step": -1}, "step -1"),
    ],
)
def test_sizes_that_do_not_multiply_out_are_refused(changes: dict[str, int], message: str) -> None:
    good = {"step": 0, "micro_step": 0, "data_rank": 0, "batch_size": 8, "accumulation": 2, "data_size": 2}
    with pytest.raises(ValueError, match=message):
        sample_index_for(**{**good, **changes})


def test_vocabulary_smaller_than_the_shards_is_refused(shards: list[TokenShard]) -> None:
    message = r"a\.bin has token ids up to 999, but .* model\.vocab_size \(999\) rows; set model\.vocab_size=1000"
    with pytest.raises(DataError, match=message):
        TrainingData(shards, 8, 0, 999)
    with pytest.raises(DataError, match=message):
        HeldoutData({"a": shards[0]}, 8, 999)


def test_text_shorter_than_a_sample_is_refused(shards: list[TokenShard]) -> None:
    assert training(shards, seq_len=80).samples_per_epoch == 1
    with pytest.raises(DataError, match=r"has 80 tokens, fewer than one sample of data\.seq_len \(81\)"):
        training(shards, seq_len=81)


def test_wrong_arguments_are_refused(shards: list[TokenShard]) -> None:
    with pytest.raises(ValueError, match=r"trainer\.seed \(-1\)"):
        training(shards, seed=-1)
    with pytest.raises(ValueError, match=r"data\.seq_len \(0\)"):
        training(shards, seq_len=0)
    with pytest.raises(DataError, match="no token shard"):
        training([])
    for start, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="must be ≥"):
            training(shards).batch(start, count)


def test_heldout_rows_hold_every_token_once_and_end_in_padding(shards: list[TokenShard]) -> None:
    """64 and 16 tokens in rows of 5, four rows a batch: 13 rows in 4 batches, the last with three rows of padding and
    one token of it in row 13; 4 rows in one batch."""
    data = HeldoutData({"a": shards[0], "b": shards[1]}, 5, 1000)
    assert data.domains == ["a", "b"]
    assert (data.num_samples("a"), data.num_samples("b")) == (13, 4)
    for domain, first, count in (("a", 0, 64), ("b", 64, 16)):
        batches = list(data.batches(domain, 4))
        assert all(tensor.shape == (4, 5) for batch in batches for tensor in batch)
        tokens = torch.cat([batch.input_ids_BS for batch in batches]).flatten()
        valid = torch.cat([batch.document_ids_BS for batch in batches]).flatten() != PADDING_DOCUMENT
        assert tokens[valid].tolist() == list(range(first, first + count))
        assert not valid[count:].any()
        assert all(same(a, b) for a, b in zip(batches, data.batches(domain, 4), strict=True))


def test_heldout_labels_do_not_depend_on_the_batch_size(shards: list[TokenShard]) -> None:
    data = HeldoutData({"a": shards[0]}, 8, 1000)
    small = torch.cat([batch.labels_BS for batch in data.batches("a", 1)])
    large = next(iter(data.batches("a", 100))).labels_BS
    assert torch.equal(small, large[:8])
    assert (large[8:] == IGNORE_LABEL).all()
    assert int((large != IGNORE_LABEL).sum()) == 64 - 6  # all but the last token of six documents
