"""Checks of an exchange itself, for `dispatch.check`: on the token path, around every collective that moves rows.

They cost two small collectives and a pass over the rows each time: for hunting a fault, not for training. Splits are
compared before rows move, receive buffers begin as NaN, and each piece's checksum is compared where it arrives. What one
rank finds, all ranks raise, with the same text.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class DispatchError(RuntimeError):
    """The ranks of a group do not agree, or one of them cannot go on. Raised on all of them."""


def check_splits(
    send_rows_P: Sequence[int], receive_rows_P: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise DispatchError on every rank when some rank sends another number of rows than its peer awaits (collective)."""
    num_ranks = dist.get_world_size(group)
    splits = _gather([*send_rows_P, *receive_rows_P], group, device).view(num_ranks, 2, num_ranks).tolist()
    for source in range(num_ranks):
        for target in range(num_ranks):
            sent, awaited = splits[source][0][target], splits[target][1][source]
            if sent != awaited:
                raise DispatchError(
                    f"rank {dist.get_global_rank(group, source)} sends {sent} rows to rank "
                    f"{dist.get_global_rank(group, target)}, which awaits {awaited}; no row was moved"
                )


def fill_with_nan(received: Tensor) -> Tensor:
    """The buffer, so that a row which never arrives shows; integers get their smallest value."""
    return received.fill_(float("nan") if received.is_floating_point() else torch.iinfo(received.dtype).min)


def check_pieces(
    sent: Tensor,
    send_rows_P: Sequence[int],
    received: Tensor,
    receive_rows_P: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Raise DispatchError on every rank when a piece did not arrive as it was sent (collective)."""
    num_ranks = dist.get_world_size(group)
    sums = [checksum(piece) for piece in sent.split(list(send_rows_P))]
    sums += [checksum(piece) for piece in received.split(list(receive_rows_P))]
    of_ranks = _gather(torch.stack(sums).tolist(), group, sent.device).view(num_ranks, 2, num_ranks).tolist()
    for source in range(num_ranks):
        for target in range(num_ranks):
            if of_ranks[source][0][target] != of_ranks[target][1][source]:
                raise DispatchError(
                    f"rows from rank {dist.get_global_rank(group, source)} did not arrive at rank "
                    f"{dist.get_global_rank(group, target)} as they were sent: checksums "
                    f"{of_ranks[source][0][target]} and {of_ranks[target][1][source]}; the link or the collective "
                    "library damages data, or a buffer was written to while it was on its way"
                )


def checksum(rows: Tensor) -> Tensor:
    """An int64 of the bytes and their places: exact, so NaN equals itself."""
    flat = rows.contiguous().view(torch.uint8).flatten().long()
    return (flat * (torch.arange(flat.shape[0], device=flat.device) % 65_521 + 1)).sum()


def _gather(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    received = own.new_empty(dist.get_world_size(group) * own.numel())
    dist.all_gather_single(received, own, group=group)
    return received
