"""The work of preparing: read every source once, learn the tokenizer from the training documents, write both splits of
every domain as shards. On the data path between sources and shards; `moe.data.prepare` decides when and where.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.data.config import DataConfig
from moe.data.shards import ShardWriter
from moe.data.sources import Document, Source, open_sources
from moe.data.tokenizer import Tokenizer, train_tokenizer
from moe.errors import DataError

TOKENIZER_TRAINING_BYTES = 16 << 20
"""The tokenizer learns from at most so much text (about 2 s on two cores), shared between domains by their size."""
_ENCODE_CHARACTERS = 4 << 20  # handed to the tokenizer at once; bounds memory, not results
SPLITS = ("train", "heldout")

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """How much one domain gives to one split."""

    domain: str
    split: str
    """train or heldout."""
    documents: int
    tokens: int
    """End tokens included."""
    text_bytes: int
    """UTF-8 bytes."""

    @property
    def bytes_per_token(self) -> float:
        """Turns a loss in nats per token into one in bits per byte: loss / (bytes_per_token · ln 2)."""
        return self.text_bytes / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """One reading of a source."""

    source: Source
    digest: str
    """Over names and texts."""
    text_bytes: dict[str, int]
    """By document name, in the source's order."""
    skipped: list[str]


def heldout_names(names: Sequence[str], fraction: float) -> set[str]:
    """Which documents of a domain are held out: those whose name's hash, read as a number in [0, 1), is below
    `fraction`. At least one, and not all: the lowest hash is always held out, the highest never.

    Raises: DataError for fewer than two documents.
    """
    if len(names) < 2:
        raise DataError(
            f"a domain needs at least two documents, one of them held out, but it has {len(names)} "
            f"({', '.join(names)}); cut the text into several files, or into the lines of a .jsonl"
        )
    by_hash = sorted(names, key=_name_hash)
    chosen = {name for name in by_hash[1:-1] if _name_hash(name) < fraction * 2.0**64}
    return chosen | {by_hash[0]}


def _name_hash(name: str) -> int:
    # Surrogate escapes: file names need not be UTF-8.
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _checked(source: Source, skipped: list[str], digest: Any) -> Iterator[tuple[Document, int]]:
    """The documents of a source with their size in bytes, fed to a running hash on the way."""
    for document in source.documents(skipped):
        raw = document.text.encode("utf-8")
        digest.update(f"{len(document.name)}:{len(raw)}:".encode() + document.name.encode("utf-8", "surrogateescape"))
        digest.update(raw)
        yield document, len(raw)


def survey_sources(data: DataConfig) -> list[Survey]:
    """Read all sources of a recipe once. Raises: DataError for an unknown source, or one without any text."""
    surveys = []
    for source in open_sources(data.sources):
        skipped: list[str] = []
        digest = hashlib.sha256()
        text_bytes = {document.name: size for document, size in _checked(source, skipped, digest)}
        if not text_bytes:
            raise DataError(
                f"data.sources: {source.domain} ({source.description}) has no text"
                + (f"; left out: {', '.join(skipped[:3])}" if skipped else "")
                + "; give it at least two documents that are not empty, or drop it"
            )
        surveys.append(Survey(source=source, digest=digest.hexdigest(), text_bytes=text_bytes, skipped=skipped))
    return surveys


def learn_tokenizer(
    surveys: Sequence[Survey], heldout: Mapping[str, set[str]], vocab_size: int, progress: Progress
) -> Tokenizer:
    """Learn the tokenizer from training documents alone, and say from how much."""
    started = time.perf_counter()
    shares = _tokenizer_shares(surveys, heldout)
    total = sum(
        size
        for survey in surveys
        for name, size in survey.text_bytes.items()
        if name not in heldout[survey.source.domain]
    )
    used = sum(sum(share.values()) for share in shares.values())
    texts = (
        document.text.encode()[: shares[survey.source.domain][document.name]].decode("utf-8", "ignore")
        for survey in surveys
        for document in survey.source.documents([])
        if document.name in shares[survey.source.domain]
    )
    tokenizer = train_tokenizer(texts, vocab_size)
    amount = f"{used / 1e6:.1f} MB" if used == total else f"{used / 1e6:.1f} of {total / 1e6:.1f} MB (a fair sample)"
    seconds = time.perf_counter() - started
    progress(f"data: tokenizer of {tokenizer.vocab_size:,} ids learned from {amount} in {seconds:.1f} s")
    if tokenizer.vocab_size < vocab_size:
        progress(
            f"data: the text gives only {tokenizer.vocab_size:,} of model.vocab_size = {vocab_size:,} ids; "
            "the other rows of the embedding stay unused"
        )
    return tokenizer


def _tokenizer_shares(surveys: Sequence[Survey], heldout: Mapping[str, set[str]]) -> dict[str, dict[str, int]]:
    """By domain and document: from how many bytes of it the tokenizer learns. All together at most
    TOKENIZER_TRAINING_BYTES, each domain in proportion to its size."""
    training = {
        survey.source.domain: {
            name: size for name, size in survey.text_bytes.items() if name not in heldout[survey.source.domain]
        }
        for survey in surveys
    }
    total = sum(sum(sizes.values()) for sizes in training.values())
    shares: dict[str, dict[str, int]] = {}
    for domain, sizes in training.items():
        domain_bytes = sum(sizes.values())
        left = domain_bytes if total <= TOKENIZER_TRAINING_BYTES else domain_bytes * TOKENIZER_TRAINING_BYTES // total
        shares[domain] = {}
        # In the order of their hash, so that the documents of a share are a fair sample.
        for name in sorted(sizes, key=_name_hash):
            shares[domain][name] = min(sizes[name], left)
            left -= shares[domain][name]
            if left == 0:
                break
    return shares


def encode_source(survey: Survey, heldout: set[str], tokenizer: Tokenizer, folder: Path) -> list[SplitSize]:
    """Write both shards of one domain; sizes of train, then heldout."""
    domain = survey.source.domain
    counts = {split: {"documents": 0, "tokens": 0, "text_bytes": 0} for split in SPLITS}
    digest = hashlib.sha256()
    with (
        ShardWriter(folder / f"{domain}.train", tokenizer.vocab_size) as train,
        ShardWriter(folder / f"{domain}.heldout", tokenizer.vocab_size) as kept,
    ):
        for group in _groups(_checked(survey.source, [], digest)):
            encoded = tokenizer.encode_documents([document.text for document, _ in group])
            for (document, size), ids in zip(group, encoded, strict=True):
                is_kept = document.name in heldout
                (kept if is_kept else train).add(document.name, ids)
                count = counts["heldout" if is_kept else "train"]
                count["documents"] += 1
                count["tokens"] += ids.size
                count["text_bytes"] += size
    if digest.hexdigest() != survey.digest:
        raise DataError(f"data.sources: {domain} changed while it was being read; run again when it is complete")
    return [SplitSize(domain=domain, split=split, **counts[split]) for split in SPLITS]


def _groups(documents: Iterable[tuple[Document, int]]) -> Iterator[list[tuple[Document, int]]]:
    """Runs of documents of about _ENCODE_CHARACTERS together."""
    group: list[tuple[Document, int]] = []
    characters = 0
    for document, size in documents:
        group.append((document, size))
        characters += len(document.text)
        if characters >= _ENCODE_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
