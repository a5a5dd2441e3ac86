"""The exchange of rows between ranks, with its backward: on the token path, in the middle of dispatch and of combine.

Legend: D hidden, N rows sent by this rank, R rows received, P ranks of the group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange_rows(
    rows_ND: Tensor, send_rows_P: Sequence[int], receive_rows_P: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive pieces of rows_ND to the ranks of the group; return what they sent here: [R, D], by source rank.

    send_rows_P[p] rows go to rank p, receive_rows_P[p] come from it; zeros are fine. All ranks call together, and the
    splits must agree (gloo alone would leave stale memory in the receiver without a word).

    Backward is the opposite exchange. It is collective too, so it must not depend on whether this rank happens to want
    a gradient: the result always requires one, even of rows that do not.
    """
    assert sum(send_rows_P) == rows_ND.shape[0], (list(send_rows_P), rows_ND.shape)
    anchor = torch.zeros((), device=rows_ND.device, requires_grad=True)
    rows_RD: Tensor = _ExchangeRows.apply(rows_ND, anchor, send_rows_P, receive_rows_P, group)
    return rows_RD


def move_rows(
    rows_ND: Tensor, send_rows_P: Sequence[int], receive_rows_P: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """exchange_rows without a gradient, for functions that bring their own backward. Any dtype."""
    received_RD = rows_ND.new_empty((sum(receive_rows_P), rows_ND.shape[1]))
    dist.all_to_all_single(received_RD, rows_ND.contiguous(), list(receive_rows_P), list(send_rows_P), group=group)
    return received_RD


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        anchor: Tensor,
        send_rows_P: Sequence[int],
        receive_rows_P: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.send_rows_P, ctx.receive_rows_P, ctx.group = send_rows_P, receive_rows_P, group
        return move_rows(rows_ND, send_rows_P, receive_rows_P, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None, None]:
        return move_rows(grad_RD, ctx.receive_rows_P, ctx.send_rows_P, ctx.group), None, None, None, None
