"""Moving rows on one rank, with gradients: on the token path, around the exchange.

Each function has its own backward, so that sums over picks are taken in fp32 and in a fixed order in both directions
(autograd's own rule for an indexed read adds in the rows' dtype), and so that zero rows still give a connected graph.

Legend: T tokens, D hidden, K picks per token, N kept picks, R received rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatch.permute import PickOrder, Reordering

_PIECE_ELEMENTS = 1 << 17
"""Of a piece of rows in fp32. On a CPU whatever has several fp32 passes goes piece by piece, so that they meet in the cache:
fresh temporaries of N · D elements cost more in page faults than the passes themselves."""


def gather_rows(x_TD: Tensor, order: PickOrder) -> Tensor:
    """Copy each token's row once per kept pick: [N, D] in the order's sorting, dtype of x_TD.

    Backward sums a token's gradients over its picks in fp32, by ascending k.
    """
    rows_ND: Tensor = _GatherRows.apply(x_TD, order)
    return rows_ND


def sum_rows(rows_ND: Tensor, topk_weights_TK: Tensor, order: PickOrder) -> Tensor:
    """y[t] = Σ_k weight[t, k] · row(t, k) over kept picks, in fp32, by ascending k; [T, D] in the rows' dtype.

    topk_weights_TK: fp32. Differentiable with respect to both; a pick that is not kept has gradient 0.
    """
    y_TD: Tensor = _SumRows.apply(rows_ND, topk_weights_TK, order)
    return y_TD


def add_rows(rows_ND: Tensor, order: PickOrder) -> Tensor:
    """y[t] = Σ_k row(t, k) over kept picks, by ascending k: [T, D] fp32. Keeps nothing for backward."""
    y_TD: Tensor = _AddRows.apply(rows_ND, order)
    return y_TD


def reorder_rows(rows_RD: Tensor, reordering: Reordering) -> Tensor:
    """Rows in another order; nothing is added up in either direction."""
    reordered_RD: Tensor = _ReorderRows.apply(rows_RD, reordering)
    return reordered_RD


def sum_over_picks(
    rows_ND: Tensor, weights_TK: Tensor | None, order: PickOrder, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Σ_k weight · row in fp32, by ascending k: [T, D], rounded once to dtype; weight 1 when None.

    Without a gradient: for functions with their own backward.
    """
    num_tokens, hidden_size = order.num_tokens, rows_ND.shape[1]
    total_TD = rows_ND.new_empty((num_tokens, hidden_size), dtype=dtype)
    if rows_ND.shape[0] == 0:
        return total_TD.zero_()
    step = _piece_rows(rows_ND)
    sums_tD = rows_ND.new_empty((min(step, num_tokens), hidden_size), dtype=torch.float32)
    picked_tD = torch.empty_like(sums_tD, dtype=rows_ND.dtype)
    # Rows that are fp32 already need no second buffer.
    picked_fp32_tD = picked_tD if rows_ND.dtype == torch.float32 else torch.empty_like(sums_tD)
    for start in range(0, num_tokens, step):
        here = slice(start, min(start + step, num_tokens))
        sums, picked, picked_fp32 = (each[: here.stop - start] for each in (sums_tD, picked_tD, picked_fp32_tD))
        sums.zero_()
        for k, row_T in enumerate(order.row_of_pick_KT):
            row_t = row_T[here]
            weight_t1 = None if weights_TK is None else weights_TK[here, k : k + 1]
            if order.complete:
                torch.index_select(rows_ND, 0, row_t, out=picked)
            else:
                # Masking rather than a zero weight: 0 · NaN of some other token's row would be NaN.
                left_out_t1 = (row_t < 0).unsqueeze(1)
                torch.index_select(rows_ND, 0, row_t.clamp(min=0), out=picked)
                picked.masked_fill_(left_out_t1, 0)
                weight_t1 = None if weight_t1 is None else weight_t1.masked_fill(left_out_t1, 0)
            if weight_t1 is None:
                sums.add_(picked)
            else:
                sums.addcmul_(picked if picked.dtype == torch.float32 else picked_fp32.copy_(picked), weight_t1)
        total_TD[here] = sums
    return total_TD


def _piece_rows(rows_ND: Tensor) -> int:
    """Rows of a piece: as the cache wants it on a CPU, all at once elsewhere."""
    if rows_ND.device.type != "cpu":
        return max(1, rows_ND.shape[0])
    return max(1, _PIECE_ELEMENTS // max(1, rows_ND.shape[1]))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: PickOrder) -> Tensor:
        ctx.order = order
        return x_TD.index_select(0, order.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return sum_over_picks(grad_ND, None, ctx.order, grad_ND.dtype), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, topk_weights_TK: Tensor, order: PickOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, topk_weights_TK)
        ctx.order = order
        return sum_over_picks(rows_ND, topk_weights_TK.float(), order, rows_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_ND, topk_weights_TK = ctx.saved_tensors
        order: PickOrder = ctx.order
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        weight_N = topk_weights_TK.float().flatten().index_select(0, order.pick_N)
        grad_rows_ND = torch.empty_like(rows_ND) if wants_rows else None
        grad_weight_N = torch.empty_like(weight_N)
        grad_TD = grad_TD.contiguous()
        step = _piece_rows(rows_ND)
        for start in range(0, rows_ND.shape[0], step):
            here = slice(start, min(start + step, rows_ND.shape[0]))
            grad_of_row_nD = grad_TD.index_select(0, order.token_N[here]).float()
            if wants_weights:
                grad_weight_N[here] = torch.linalg.vecdot(rows_ND[here].float(), grad_of_row_nD)
            if grad_rows_ND is not None:
                grad_rows_ND[here] = grad_of_row_nD.mul_(weight_N[here].unsqueeze(1))
        if not wants_weights:
            return grad_rows_ND, None, None
        grad_weights_M = torch.zeros(topk_weights_TK.numel(), dtype=torch.float32, device=rows_ND.device)
        grad_weights_M[order.pick_N] = grad_weight_N
        return grad_rows_ND, grad_weights_M.view_as(topk_weights_TK).to(topk_weights_TK.dtype), None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order: PickOrder) -> Tensor:
        ctx.order, ctx.dtype = order, rows_ND.dtype
        return sum_over_picks(rows_ND, None, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD.to(ctx.dtype).index_select(0, ctx.order.token_N), None


class _ReorderRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, reordering: Reordering) -> Tensor:
        ctx.reordering = reordering
        return rows_RD.index_select(0, reordering.source_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return grad_RD.index_select(0, ctx.reordering.target_R), None
