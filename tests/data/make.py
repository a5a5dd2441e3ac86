"""Small shards, texts and batches that the tests of this folder share."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe.data.config import DataConfig
from moe.data.shards import ShardWriter, TokenShard
from moe.model.batch import TokenBatch
from moe.model.config import ModelConfig

WORDS = ("the", "switchyard", "sorts", "cars", "of", "mixed", "trains", "onto", "tracks", "in", "the", "right", "order")


def make_shard(stem: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000) -> TokenShard:
    with ShardWriter(stem, vocab_size) as writer:
        for number, ids in enumerate(documents):
            writer.add(f"number {number}", ids)
    return TokenShard(stem)


def distinct_documents(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Documents of the given lengths in which every token is another number, counting up from `first`."""
    numbers = itertools.count(first)
    return [list(itertools.islice(numbers, length)) for length in lengths]


def write_texts(folder: Path, count: int = 12, seed: int = 0) -> Path:
    """A folder of `count` short .txt files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        words = rng.choice(WORDS, size=rng.integers(20, 60))
        (folder / f"text-{number:02}.txt").write_text(" ".join(words) + ".\n", encoding="utf-8")
    return folder


def tiny_configs(folder: Path, cache: Path, **changes: object) -> tuple[DataConfig, ModelConfig]:
    """One domain of text files below `folder`, a vocabulary of 300, rows of 16 tokens."""
    settings = {"sources": [f"text:{folder}"], "seq_len": 16, "heldout_fraction": 0.2, "cache_dir": str(cache)}
    data = DataConfig(**{**settings, **changes})  # type: ignore[arg-type]
    return data, ModelConfig(vocab_size=300)


def same(first: TokenBatch, second: TokenBatch) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))
