"""From a recipe's sources to open shards: the whole data path up to packing, done once and kept in a cache.

    <cache_dir>/<key>/   tokenizer.json   <domain>.train.bin/.idx   <domain>.heldout.bin/.idx   manifest.json

The key is a hash of all that the result depends on: the texts themselves, their order, the split, the vocabulary size
and the tokenizer library. A folder appears whole, by one rename; a damaged one is built again.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from moe.data.config import DataConfig
from moe.data.encode import (
    SPLITS,
    TOKENIZER_TRAINING_BYTES,
    Progress,
    SplitSize,
    Survey,
    encode_source,
    heldout_names,
    learn_tokenizer,
    survey_sources,
)
from moe.data.loader import ORDER_VERSION
from moe.data.shards import TokenShard
from moe.data.tokenizer import Tokenizer
from moe.errors import DataError
from moe.model.config import ModelConfig

_FORMAT = 1  # raised when the same inputs would give other files
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """What the trainer needs to build its data."""

    tokenizer: Tokenizer
    train: list[TokenShard]
    """One per domain, in the order of data.sources."""
    heldout: dict[str, TokenShard]
    """By domain, in the order of data.sources."""
    sizes: list[SplitSize]
    folder: Path
    fingerprint: dict[str, Any]
    """JSON: whatever decides which sample an index means. Equal on all ranks, or they do not see the same data; equal
    after a resume, or the data position means something else."""


def prepare_data(data: DataConfig, model: ModelConfig, *, seed: int, progress: Progress) -> PreparedData:
    """Make tokenizer and shards, or open them when they are there already (their contents are then checked in full).

    For one rank per machine (local rank 0); the others call `open_data` after a barrier. Safe all the same when several
    processes or jobs prepare the same data at once: one builds, the others wait for it. `progress` gets sentences.

    Raises: DataError when a source gives no usable text, or the cache cannot be written; ValueError for a vocabulary
    without room for 256 bytes, or a held-out share outside (0, 1).
    """
    if not 0 < data.heldout_fraction < 1:
        raise ValueError(f"data.heldout_fraction ({data.heldout_fraction}) must lie between 0 and 1; choose 0.03")
    surveys = survey_sources(data)
    folder = _folder(data, model, surveys)
    with _cache_errors(data, folder):
        prepared, _ = _try_open(folder, surveys, data, seed)
        if prepared is None:
            with _lock(folder, progress):
                # Again, now alone: somebody may have built or mended it while we waited for the lock.
                prepared, damage = _try_open(folder, surveys, data, seed)
                if prepared is None:
                    if damage is not None:
                        progress(f"data: the cache is damaged and is built again: {damage}")
                        _remove(folder)
                    _build(folder, surveys, data, model, progress)
                    prepared = _open(folder, surveys, data, seed, verify=False)
    for line in describe(prepared):
        progress(line)
    return prepared


def open_data(data: DataConfig, model: ModelConfig, *, seed: int) -> PreparedData:
    """Open what `prepare_data` made on this machine. Only the form of the files is checked, not their contents.

    Raises: DataError when it is not there or its form is damaged.
    """
    surveys = survey_sources(data)
    folder = _folder(data, model, surveys)
    if not folder.is_dir():
        raise DataError(
            f"{folder} does not exist: the data was not prepared on this machine for these sources, or they "
            "changed since; call prepare_data on local rank 0 first, with the same data.cache_dir"
        )
    return _open(folder, surveys, data, seed, verify=False)


def describe(prepared: PreparedData) -> list[str]:
    """A line per domain: documents, tokens, bytes per token of both splits."""
    by_place = {(size.domain, size.split): size for size in prepared.sizes}
    lines = []
    for domain in prepared.heldout:
        train, heldout = (by_place[domain, split] for split in SPLITS)
        lines.append(
            f"data: {domain}: {train.documents:,} documents, {train.tokens:,} tokens to train on, "
            f"{heldout.documents:,} documents, {heldout.tokens:,} tokens held out; "
            f"{train.bytes_per_token:.2f} bytes per token"
        )
    return lines


def cache_root(data: DataConfig) -> Path:
    """data.cache_dir, or switchyard/data in the user's cache folder."""
    if data.cache_dir is not None:
        return Path(data.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "switchyard" / "data"


def _folder(data: DataConfig, model: ModelConfig, surveys: Sequence[Survey]) -> Path:
    depends_on = {
        "format": _FORMAT,
        "sources": [[survey.source.domain, survey.digest] for survey in surveys],
        "heldout_fraction": data.heldout_fraction,
        "vocab_size": model.vocab_size,
        "tokenizer_training_bytes": TOKENIZER_TRAINING_BYTES,
        "tokenizers": tokenizers.__version__,
    }
    return cache_root(data) / hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:20]


def _try_open(
    folder: Path, surveys: Sequence[Survey], data: DataConfig, seed: int
) -> tuple[PreparedData | None, DataError | None]:
    """The prepared data when it is whole; else why not (None when it is not there at all)."""
    if not folder.is_dir():
        return None, None
    try:
        return _open(folder, surveys, data, seed, verify=True), None
    except DataError as damage:
        return None, damage


def _open(folder: Path, surveys: Sequence[Survey], data: DataConfig, seed: int, *, verify: bool) -> PreparedData:
    """Open a folder. Raises: DataError for whatever does not agree with its manifest."""
    manifest_path = folder / "manifest.json"
    domains = [survey.source.domain for survey in surveys]
    try:
        manifest = json.loads(manifest_path.read_bytes())
        sizes = [SplitSize(**size) for size in manifest["sizes"]]
        recorded: dict[str, str] = dict(manifest["fingerprints"])
        if [(size.domain, size.split) for size in sizes] != [(d, split) for d in domains for split in SPLITS]:
            raise ValueError("other domains")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{manifest_path} is damaged ({error}); delete its folder, and it is built again") from error
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    found = {"tokenizer": tokenizer.fingerprint}
    shards: dict[str, TokenShard] = {}
    for domain in domains:
        for split in SPLITS:
            name = f"{domain}.{split}"
            shards[name] = TokenShard(folder / name)
            found[name] = shards[name].fingerprint
            if verify:
                shards[name].verify()
    wrong = [name for name in found if found[name] != recorded.get(name)]
    if wrong:
        raise DataError(f"{folder}: {wrong[0]} is not the one that {manifest_path.name} records; delete the folder")
    return PreparedData(
        tokenizer=tokenizer,
        train=[shards[f"{domain}.train"] for domain in domains],
        heldout={domain: shards[f"{domain}.heldout"] for domain in domains},
        sizes=sizes,
        folder=folder,
        fingerprint={
            "order_version": ORDER_VERSION,
            "seed": seed,
            "seq_len": data.seq_len,
            "sources": {survey.source.domain: survey.digest for survey in surveys},
            "tokenizer": tokenizer.fingerprint,
            "shards": {name: shard.fingerprint for name, shard in shards.items()},
        },
    )


def _build(folder: Path, surveys: Sequence[Survey], data: DataConfig, model: ModelConfig, progress: Progress) -> None:
    """Write a folder beside its place and rename it there."""
    for survey in surveys:
        if survey.skipped:
            shown = "; ".join(survey.skipped[:3]) + (" …" if len(survey.skipped) > 3 else "")
            progress(f"data: {survey.source.domain}: {len(survey.skipped)} files left out ({shown})")
    heldout = {}
    for survey in surveys:
        try:
            heldout[survey.source.domain] = heldout_names(list(survey.text_bytes), data.heldout_fraction)
        except DataError as error:
            raise DataError(f"data.sources: {survey.source.domain}: {error}") from error
    tokenizer = learn_tokenizer(surveys, heldout, model.vocab_size, progress)
    for stale in folder.parent.glob(f"{folder.name}.*.tmp"):  # left by a process that was killed
        if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(stale, ignore_errors=True)
    temporary = _beside(folder)
    temporary.mkdir()
    try:
        tokenizer.save(temporary / "tokenizer.json")
        started = time.perf_counter()
        sizes = [size for s in surveys for size in encode_source(s, heldout[s.source.domain], tokenizer, temporary)]
        tokens = sum(size.tokens for size in sizes)
        progress(f"data: {tokens:,} tokens written to {folder} in {time.perf_counter() - started:.1f} s")
        fingerprints = {
            f"{s.domain}.{s.split}": TokenShard(temporary / f"{s.domain}.{s.split}").fingerprint for s in sizes
        }
        manifest = {
            "sizes": [asdict(size) for size in sizes],
            "fingerprints": {"tokenizer": tokenizer.fingerprint, **fingerprints},
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            # Without a lock (a file system that has none) another process may have come first: its folder is as good.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _cache_errors(data: DataConfig, folder: Path) -> Iterator[None]:
    """Failures of the cache's file system become a DataError with a way out."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(
            f"data.cache_dir ({cache_root(data)}) cannot be used: {error.strerror or error}; "
            "set data.cache_dir to a folder you may write that has room"
        ) from error


@contextmanager
def _lock(folder: Path, progress: Progress) -> Iterator[None]:
    """One builder of a folder at a time. The kernel frees the lock of a process that dies."""
    with Path(f"{folder}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"data: waiting for another process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # No locks here (some network file systems): work may be done twice, but the rename keeps it right.
            progress(f"data: {folder.parent} has no file locks; processes that prepare at once each do the work")
        yield


def _remove(folder: Path) -> None:
    """Take a damaged folder out of the way at once, then delete it; whoever has mapped its files keeps them."""
    aside = _beside(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def _beside(folder: Path) -> Path:
    """A free name for something short-lived next to `folder`."""
    # Not tempfile, whose folders other users of a shared cache could not read.
    return folder.with_name(f"{folder.name}.{secrets.token_hex(6)}.tmp")
