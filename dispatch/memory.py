"""What a layer keeps for backward, made less: `dispatch.save_memory`. On the token path, around the experts.

Two things are not kept. The experts' input: its rows are gathered, and sent, once more in backward (x itself is alive
anyhow). The experts' output: combine needs it for the gradient of the combine weights, dL/dw = <dL/dy, result>; when the
experts multiply by the weight before their last product, result = w · (inner · W2ᵀ) = (w · inner) · W2ᵀ, the same
gradient is <dL/d(w · inner), inner>, of what the experts keep for themselves.

The price is one more exchange of rows in backward, begun while another chunk's experts work, and a rounding elsewhere.
Source: Guo et al. 2025, "SonicMoE" (arXiv 2512.14080), section 3.2, keep neither the gathered input nor the output. There
a kernel forms the weights' gradient; that the order of two factors gives it to plain autograd is ours.

Legend: R rows of this rank's experts, N rows sent, D hidden, w columns that carry a weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.exchange import Pending


class _Piece(NamedTuple):
    """A saved tensor that is a part of the experts' rows, by where it lies in them."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Recall:
    """The rows that the experts of one chunk saw: forgotten after forward, fetched again in backward."""

    def __init__(self, start: Callable[[], Pending | Tensor], finish: Callable[[Tensor], Tensor]) -> None:
        """start: begins to fetch, on every rank at the same point of backward; finish: makes the rows of what came."""
        self._start = start
        self._finish = finish
        self._coming: Pending | Tensor | None = None
        self._rows: Tensor | None = None

    def fetch_before(self, home: Tensor) -> Tensor:
        """Return the rows that came home unchanged; in backward, begin to fetch when their gradient is there."""
        came_home: Tensor = _Fetch.apply(home, self)
        return came_home

    def forget_after(self, rows_RD: Tensor) -> Tensor:
        """Return the experts' rows unchanged; in backward, drop what was fetched when the experts are done."""
        guarded_RD: Tensor = _Forget.apply(rows_RD, self)
        return guarded_RD

    @contextmanager
    def forgetting(self, rows_RD: Tensor) -> Iterator[None]:
        """Within the block, autograd keeps no part of these rows.

        Everything else is kept as it would be outside the block, by other hooks too (activation checkpointing has some).
        """
        # A private name of torch (2.13): hooks do not call those around them, so they are asked for here.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_outer, unpack_outer = outer if outer else (Tensor.detach, lambda kept: kept)
        storage, origin = rows_RD.untyped_storage().data_ptr(), int(rows_RD.storage_offset())
        shape, dtype = rows_RD.shape, rows_RD.dtype

        def pack(tensor: Tensor) -> Any:
            # Tensors without elements have no address, so their shape must tell.
            alike = tensor.numel() > 0 or tensor.shape == shape
            if alike and tensor.dtype is dtype and tensor.untyped_storage().data_ptr() == storage:
                return _Piece(tensor.size(), tensor.stride(), int(tensor.storage_offset()) - origin)
            return pack_outer(tensor)

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, _Piece):
                return self._fetched().as_strided(kept.size, kept.stride, kept.offset)
            unpacked: Tensor = unpack_outer(kept)
            return unpacked

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _fetch(self) -> None:
        with torch.no_grad():
            self._coming = self._start()

    def _fetched(self) -> Tensor:
        if self._rows is None:
            coming, self._coming = self._coming, None
            assert coming is not None, "rows were asked for before their exchange began"
            with torch.no_grad():
                self._rows = self._finish(coming.wait() if isinstance(coming, Pending) else coming)
        return self._rows

    def _drop(self) -> None:
        # Asked for once here, so that no exchange stays open when the experts on this rank did without the rows.
        self._fetched()
        self._rows = None


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, home: Tensor, recall: Recall) -> Tensor:
        ctx.recall = recall
        return home.view_as(home)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.recall._fetch()
        return grad, None


class _Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, recall: Recall) -> Tensor:
        ctx.recall = recall
        return rows_RD.view_as(rows_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.recall._drop()
        return grad_RD, None


def attach_weights(rows_ND: Tensor, weight_N: Tensor) -> Tensor:
    """[N, D + w]: each row, and behind it the bits of its fp32 weight. Only to be moved, never to be added to."""
    wide: Tensor = _Attach.apply(rows_ND, weight_N)
    return wide


def detach_weights(wide: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """(rows [R, D], weights [R] fp32) of `attach_weights` after a move."""
    rows_RD, weight_R = _Detach.apply(wide, hidden_size)
    return rows_RD, weight_R


def _join(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.cat((rows, weight.unsqueeze(1).contiguous().view(rows.dtype)), 1)


def _part(wide: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    return wide[:, :hidden_size].contiguous(), wide[:, hidden_size:].contiguous().view(torch.float32).squeeze(1)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weight_N: Tensor) -> Tensor:
        ctx.hidden_size = rows_ND.shape[1]
        return _join(rows_ND, weight_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _part(grad, ctx.hidden_size)


class _Detach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
        return _part(wide, hidden_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, None]:
        return _join(grad_RD, grad_R), None
