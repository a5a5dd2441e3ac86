"""Packing in plain loops: the definition that the vectorised version is compared with."""

from collections.abc import Sequence

import torch

from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch


def pack(documents: Sequence[Sequence[int]], starts: Sequence[int], seq_len: int, end_id: int = 0) -> TokenBatch:
    """Rows of the stream of `documents` (in that order) that begin at the places `starts`."""
    stream = [
        (token, number, document[place + 1] if place + 1 < len(document) else IGNORE_LABEL)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    rows: tuple[list[list[int]], ...] = ([], [], [], [])
    for start in starts:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        for place in range(start, start + seq_len):
            if place >= len(stream):
                token, label, position, number = end_id, IGNORE_LABEL, 0, PADDING_DOCUMENT
            else:
                token, document, label = stream[place]
                new = not ids or document != stream[place - 1][1]
                position = 0 if new else positions[-1] + 1
                number = 0 if not ids else numbers[-1] + int(new)
            ids.append(token)
            labels.append(label)
            positions.append(position)
            numbers.append(number)
        for row, values in zip(rows, (ids, labels, positions, numbers), strict=True):
            row.append(values)
    return TokenBatch(*(torch.tensor(row, dtype=torch.int64) for row in rows))
