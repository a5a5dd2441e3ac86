"""What the ranks of a group tell each other before rows move: on the token path, at the head of every dispatch.

A collective in which ranks disagree does not fail cleanly: gloo leaves stale memory in the receiver or aborts it, and a
rank that has raised leaves its peers waiting. So each rank's counts travel behind a header: its status, and the terms
that must be the same everywhere. All ranks see all headers, so all of them raise, with the same text.

Legend: P ranks of the group, N numbers that a rank sends.
"""

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.check import DispatchError
from dispatch.exchange import Channel, start_all_gather
from dispatch.placement import Placement
from dispatch.traffic import forward_phase
from moe.errors import NumericError

_ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Status(IntEnum):
    """Whether a rank can go on."""

    ready = 0
    not_finite = 1
    """Its router's output holds NaN or infinity."""
    failed = 2
    """It is about to raise an error of its own."""


class Terms(NamedTuple):
    """What must be the same on all ranks for an exchange of rows to make sense."""

    layer: int
    """Index of the layer, −1 when unknown: ranks in different layers would swap rows of different meaning."""
    top_k: int
    hidden_size: int
    element_type: int
    placement: int
    """Fingerprint of which rank holds which expert."""
    chunks: int


HEADER_LENGTH = 1 + len(Terms._fields)
"""Numbers of a header: status, then the terms."""


def terms_of(x_TD: Tensor, top_k: int, *, layer_index: int | None, placement: int, chunks: int) -> Terms:
    """The terms of one dispatch. placement: `fingerprint` of the placement."""
    return Terms(
        layer=-1 if layer_index is None else layer_index,
        top_k=top_k,
        hidden_size=x_TD.shape[1],
        element_type=_ELEMENT_TYPES.index(x_TD.dtype),
        placement=placement,
        chunks=chunks,
    )


def fingerprint(placement: Placement) -> int:
    """A number that differs between placements."""
    return zlib.crc32(repr(placement.expert_ids_by_rank).encode())


def put_headers(counts_N: Tensor, numbers_P: Sequence[int], terms: Terms, status: Status = Status.ready) -> Tensor:
    """A header in front of each rank's piece of the counts: N + P · HEADER_LENGTH numbers.

    counts_N: int64. numbers_P: lengths of consecutive pieces.
    """
    header = torch.tensor([status, *terms], dtype=torch.int64, device=counts_N.device)
    return torch.cat([part for piece in counts_N.split(list(numbers_P)) for part in (header, piece)])


def gather_numbers(counts_N: Tensor, terms: Terms, channel: Channel, status: Status = Status.ready) -> Tensor:
    """Every rank's counts, [P, N] int64 by rank: one small all-gather. counts_N: int64, the same N on all ranks.

    Raises as `check_headers`.
    """
    message = put_headers(counts_N, [counts_N.numel()], terms, status)
    phase = forward_phase()
    channel.traffic.count_bytes(phase, channel.links_P, [message.nbytes] * channel.num_ranks)
    received = start_all_gather(message, channel, phase).wait().view(channel.num_ranks, message.numel())
    check_headers(received[:, :HEADER_LENGTH].tolist(), channel.group, own_status=status)
    return received[:, HEADER_LENGTH:]


class Meeting:
    """Whether the ranks of a dispatcher have compared their terms once.

    Sizes of all later messages follow from them (how many counts, for which experts), so this first one has a fixed size.
    """

    def __init__(self) -> None:
        self._held = False

    def hold(self, x_TD: Tensor, terms: Terms, channel: Channel, status: Status = Status.ready) -> bool:
        """Compare terms, the first time only (collective then); whether it was that time. Raises as `check_headers`."""
        if self._held:
            return False
        gather_numbers(torch.zeros(0, dtype=torch.int64, device=x_TD.device), terms, channel, status)
        self._held = True
        return True


def check_headers(
    headers: Sequence[Sequence[int]], group: dist.ProcessGroup, *, own_status: Status = Status.ready
) -> None:
    """Raise, with the same text on all ranks, when a rank cannot go on or two ranks do not agree.

    headers: of all ranks, by rank. A rank that has announced that it cannot go on returns, to raise its own error.
    Raises NumericError when a router's output is not finite somewhere, else DispatchError.
    """
    if own_status is not Status.ready:
        return
    for rank, (status, layer, *_) in enumerate(headers):
        if status == Status.not_finite:
            raise NumericError(
                f"layers.{layer}.moe.router: logits are not finite on rank {dist.get_global_rank(group, rank)}; "
                "nothing was sent. The hidden states or the router's weight there have overflowed: lower optim.lr or "
                "resume from an earlier checkpoint"
            )
        if status == Status.failed:
            raise DispatchError(
                f"rank {dist.get_global_rank(group, rank)} could not dispatch in layer {layer}; its own message says why"
            )
    first = headers[0]
    for rank, header in enumerate(headers):
        for name, expected, found in zip(Terms._fields, first[1:], header[1:], strict=True):
            if found != expected:
                raise DispatchError(
                    f"ranks {dist.get_global_rank(group, 0)} and {dist.get_global_rank(group, rank)} disagree before "
                    f"dispatch: {name} is {_shown(name, expected)} and {_shown(name, found)}; no row was moved. All ranks "
                    "of an expert group must run the same layers with the same configuration"
                )


def _shown(name: str, value: int) -> str:
    return str(_ELEMENT_TYPES[value]) if name == "element_type" else str(value)
