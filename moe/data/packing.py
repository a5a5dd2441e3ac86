"""Documents laid end to end and cut into rows: on the data path between shards and batches.

Legend: D documents in a stream, N tokens in it, B rows, S tokens per row.

A stream of three documents a (5 tokens, the last of them the end token "."), b (2) and c (3), cut at S = 4:

    stream       a0 a1 a2 a3 .  b0 .  c0 c1 .         N = 10

                 row 0           row 1           row 2 (ends early)
    tokens       a0 a1 a2 a3     .  b0 .  c0     c1 .
    labels       a1 a2 a3 .      –  .  –  c1     .  –
    positions     0  1  2  3     0  0  1  0       0 1
    document      0  0  0  0     0  1  1  2       0 0

Rules, each visible above:
- A label is the next token of the same document, also when that token stands in the next row. So every token that is
  not the first of its document is a target exactly once, the end token included; an end token itself has no target
  (the next document must not be predicted).
- A document that is cut goes on in the next row as if it began there: positions start at 0 again, and it sees nothing
  of its first part. Positions and document ids count from 0 in each row.
- A row that the stream ends in is filled with padding (held-out text only; training drops that remainder).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moe.data.shards import TokenShard, offsets_of
from moe.data.tokenizer import END_ID
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch

_Int64Array = npt.NDArray[np.int64]


class DocumentTable:
    """The documents of several shards under one numbering: those of the first shard, then of the second, …"""

    def __init__(self, shard_offsets: Sequence[npt.NDArray[np.int64]]) -> None:
        """`shard_offsets`: for each shard its document offsets, int64 [documents + 1], in tokens."""
        self.shard_D: _Int64Array = np.concatenate(
            [np.full(len(offsets) - 1, number, dtype=np.int64) for number, offsets in enumerate(shard_offsets)]
        )
        """In which shard a document lies."""
        self.begin_D: _Int64Array = np.concatenate([offsets[:-1] for offsets in shard_offsets])
        """Its first token inside that shard."""
        self.length_D: _Int64Array = np.concatenate([np.diff(offsets) for offsets in shard_offsets])


class TokenStream:
    """Documents in a given order as one run of N tokens, from which rows are cut anywhere in O(S log D)."""

    def __init__(self, shards: Sequence[TokenShard], table: DocumentTable, order_D: _Int64Array) -> None:
        """`order_D`: document numbers of `table`, first to last."""
        self._shards = shards
        self._table = table
        self._order_D = order_D
        self._starts = offsets_of(table.length_D[order_D])  # [D + 1] int64
        self.num_tokens = int(self._starts[-1])

    def rows(self, starts_B: _Int64Array, seq_len: int) -> TokenBatch:
        """Rows of `seq_len` tokens that begin at the given places of the stream, as the module's docstring draws them.

        Beyond the stream's end: token END_ID, label IGNORE_LABEL, position 0, document PADDING_DOCUMENT.
        """
        index = starts_B[:, None] + np.arange(seq_len + 1)  # [B, S + 1]: each row and the token after it
        ordinal = np.searchsorted(self._starts, index, side="right") - 1  # D beyond the end
        valid = index < self.num_tokens
        tokens = np.full(index.shape, END_ID, dtype=np.int64)
        tokens[valid] = self._gather(index[valid], ordinal[valid])

        index, row_tokens, row_ordinal, row_valid = index[:, :-1], tokens[:, :-1], ordinal[:, :-1], valid[:, :-1]
        has_label = row_valid & (ordinal[:, 1:] == row_ordinal)
        begin = np.maximum(self._starts[row_ordinal], starts_B[:, None])  # of the document, or of its part in this row
        return TokenBatch(
            input_ids_BS=torch.from_numpy(row_tokens.copy()),
            labels_BS=torch.from_numpy(np.where(has_label, tokens[:, 1:], IGNORE_LABEL)),
            positions_BS=torch.from_numpy(np.where(row_valid, index - begin, 0)),
            document_ids_BS=torch.from_numpy(np.where(row_valid, row_ordinal - row_ordinal[:, :1], PADDING_DOCUMENT)),
        )

    def _gather(self, index: _Int64Array, ordinal: _Int64Array) -> _Int64Array:
        """Tokens at the places `index` of the stream, which lie in its documents `ordinal`; all one-dimensional."""
        document = self._order_D[ordinal]
        place = self._table.begin_D[document] + index - self._starts[ordinal]
        if len(self._shards) == 1:
            return self._shards[0].tokens[place].astype(np.int64)
        tokens = np.empty(index.shape, dtype=np.int64)
        shard_of = self._table.shard_D[document]
        for number, shard in enumerate(self._shards):
            here = shard_of == number
            tokens[here] = shard.tokens[place[here]]
        return tokens
