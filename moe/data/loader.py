"""Batches for the trainer, the end of the data path: which sample comes when, and for which rank.

The order is a pure function of (seed, sample index), so ranks share nothing, any rank can produce any sample, and
resuming takes one integer.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from moe.data.packing import DocumentTable, TokenStream
from moe.data.shards import TokenShard
from moe.errors import DataError
from moe.model.batch import TokenBatch

ORDER_VERSION = 1
"""Raised when the same (seed, index) would give another sample; part of the data fingerprint."""


def sample_index_for(
    step: int, micro_step: int, data_rank: int, *, batch_size: int, accumulation: int, data_size: int
) -> range:
    """Samples of one rank's micro-batch.

    `step` counts from 0 and begins at sample step · batch_size. Micro-step m takes batch_size / accumulation samples in
    order, data rank r the r-th of data_size equal contiguous parts. So the samples of a step are the same in every layout.

    Raises: ValueError when data_size · accumulation does not divide batch_size, or an argument is out of range.
    """
    parts = data_size * accumulation
    if min(batch_size, accumulation, data_size) < 1:
        raise ValueError(
            f"trainer.batch_size ({batch_size}), trainer.accumulation ({accumulation}) and the number of data ranks "
            f"({data_size}) must each be at least 1"
        )
    if batch_size % parts:
        raise ValueError(
            f"trainer.batch_size ({batch_size}) must be a multiple of data ranks * trainer.accumulation "
            f"({data_size} * {accumulation}); choose {-(-batch_size // parts) * parts}"
        )
    if step < 0 or not 0 <= micro_step < accumulation or not 0 <= data_rank < data_size:
        raise ValueError(
            f"step {step}, micro-step {micro_step}, data rank {data_rank}: must lie in 0 …, 0 … {accumulation - 1}, "
            f"0 … {data_size - 1}"
        )
    count = batch_size // parts
    start = step * batch_size + (micro_step * data_size + data_rank) * count
    return range(start, start + count)


class TrainingData:
    """An endless sequence of packed samples over all domains, addressed by index.

    Epoch e is samples e · n … e · n + n − 1, with n = N // seq_len for N training tokens. Inside an epoch the documents
    of all domains are shuffled by (seed, e), laid end to end, cut into n samples, and the samples shuffled again, so
    that neighbours in a batch are not pieces of one long document. Each token is used exactly once an epoch, except the
    last N mod seq_len tokens of that epoch's stream, which fill no sample.
    """

    def __init__(self, shards: Sequence[TokenShard], seq_len: int, seed: int, vocab_size: int) -> None:
        """`shards`: one or more; their order matters. `seed` ≥ 0. `vocab_size`: rows of the model's embedding.

        Raises: DataError when a shard's ids may reach beyond `vocab_size`, or all tokens do not fill one sample;
        ValueError for a seed or length out of range.
        """
        if seed < 0 or seq_len < 1:
            raise ValueError(f"trainer.seed ({seed}) must be ≥ 0 and data.seq_len ({seq_len}) must be ≥ 1")
        _check_vocabulary(shards, vocab_size)
        self.seq_len = seq_len
        self._seed = seed
        self._shards = list(shards)
        self._table = DocumentTable([shard.document_offsets for shard in self._shards])
        self.num_tokens = int(self._table.length_D.sum())
        self.samples_per_epoch = self.num_tokens // seq_len
        if self.samples_per_epoch == 0:
            raise DataError(
                f"the training text has {self.num_tokens} tokens, fewer than one sample of data.seq_len ({seq_len}); "
                "bring more text or choose a smaller data.seq_len"
            )
        self._epoch = -1  # of the two fields below; only the latest is kept
        self._stream: TokenStream | None = None
        self._slots = np.empty(0, dtype=np.int64)

    def batch(self, start: int, count: int) -> TokenBatch:
        """Samples start … start + count − 1 as rows, int64 [count, seq_len]. Any start ≥ 0, in any order."""
        if start < 0 or count < 1:
            raise ValueError(f"start ({start}) must be ≥ 0 and count ({count}) ≥ 1")
        parts = []
        index, end = start, start + count
        while index < end:
            epoch, first = divmod(index, self.samples_per_epoch)
            last = min(first + end - index, self.samples_per_epoch)
            stream = self._enter(epoch)
            parts.append(stream.rows(self._slots[first:last] * self.seq_len, self.seq_len))
            index += last - first
        return parts[0] if len(parts) == 1 else _join(parts)

    def _enter(self, epoch: int) -> TokenStream:
        """Lay out an epoch, unless it is the latest one."""
        if self._stream is None or epoch != self._epoch:
            # Sorting raw bits, not Generator.permutation: numpy promises the bits of PCG64 and SeedSequence for ever,
            # but not what its Generator makes of them.
            num_documents = len(self._table.length_D)
            bits = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(epoch,)))
            order_D = np.argsort(bits.random_raw(num_documents), kind="stable")
            self._slots = np.argsort(bits.random_raw(self.samples_per_epoch), kind="stable")
            self._stream = TokenStream(self._shards, self._table, order_D)
            self._epoch = epoch
        return self._stream


class HeldoutData:
    """The held-out documents of each domain, packed in the order of the shard, all tokens, never shuffled."""

    def __init__(self, shards: Mapping[str, TokenShard], seq_len: int, vocab_size: int) -> None:
        """Raises: DataError when a shard's ids may reach beyond `vocab_size`."""
        _check_vocabulary(list(shards.values()), vocab_size)
        self.seq_len = seq_len
        self._streams = {
            domain: TokenStream([shard], DocumentTable([shard.document_offsets]), np.arange(shard.num_documents))
            for domain, shard in shards.items()
        }

    @property
    def domains(self) -> list[str]:
        """In the order of the recipe."""
        return list(self._streams)

    def num_samples(self, domain: str) -> int:
        """Rows that hold at least one token; the last may end in padding."""
        return -(-self._streams[domain].num_tokens // self.seq_len)

    def batch(self, domain: str, start: int, count: int) -> TokenBatch:
        """Rows start … start + count − 1, int64 [count, seq_len]; rows from num_samples on are padding throughout."""
        if start < 0 or count < 1:
            raise ValueError(f"start ({start}) must be ≥ 0 and count ({count}) ≥ 1")
        return self._streams[domain].rows(np.arange(start, start + count) * self.seq_len, self.seq_len)

    def batches(self, domain: str, batch_size: int) -> Iterator[TokenBatch]:
        """All rows of a domain, `batch_size` at a time; the last batch is filled up with rows of padding, so that every
        rank gets an equal part of it (and perhaps nothing but padding: sums and counts are then 0)."""
        for start in range(0, self.num_samples(domain), batch_size):
            yield self.batch(domain, start, batch_size)


def _join(parts: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _check_vocabulary(shards: Sequence[TokenShard], vocab_size: int) -> None:
    if not shards:
        raise DataError("no token shard was given; name at least one source in data.sources")
    for shard in shards:
        if shard.vocab_size > vocab_size:
            raise DataError(
                f"{shard.stem}.bin has token ids up to {shard.vocab_size - 1}, but the model's embedding has only "
                f"model.vocab_size ({vocab_size}) rows; set model.vocab_size={shard.vocab_size} or more, or prepare "
                "the data again"
            )
