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


def sum_over_picks(rows_ND: Tensor, weights_TK: Tensor | None, order: PickOrder) -> Tensor:
    """Σ_k weight · row in fp32, [T, D]; weight 1 when None. Without a gradient: for functions with their own backward."""
    total_TD = rows_ND.new_zeros((order.num_tokens, rows_ND.shape[1]), dtype=torch.float32)
    if rows_ND.shape[0] == 0:
        return total_TD
    # One pass per pick rather than one [T, K, D] gather: the temporary stays K times smaller.
    for k, row_T in enumerate(order.row_of_pick_KT):
        weight_T1 = None if weights_TK is None else weights_TK[:, k : k + 1]
        if order.complete:
            picked_TD = rows_ND.index_select(0, row_T)
        else:
            # Masking rather than a zero weight: 0 · NaN of some other token's row would be NaN.
            left_out_T1 = (row_T < 0).unsqueeze(1)
            picked_TD = rows_ND.index_select(0, row_T.clamp(min=0)).masked_fill_(left_out_T1, 0)
            weight_T1 = None if weight_T1 is None else weight_T1.masked_fill(left_out_T1, 0)
        if weight_T1 is None:
            total_TD += picked_TD
        else:
            total_TD.addcmul_(picked_TD.float(), weight_T1)
    return total_TD


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: PickOrder) -> Tensor:
        ctx.order = order
        return x_TD.index_select(0, order.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return sum_over_picks(grad_ND, None, ctx.order).to(grad_ND.dtype), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, topk_weights_TK: Tensor, order: PickOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, topk_weights_TK)
        ctx.order = order
        return sum_over_picks(rows_ND, topk_weights_TK.float(), order).to(rows_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_ND, topk_weights_TK = ctx.saved_tensors
        order: PickOrder = ctx.order
        grad_of_row_ND = grad_TD.index_select(0, order.token_N).float()
        grad_rows_ND = grad_weights_TK = None
        if ctx.needs_input_grad[1]:
            grad_weight_N = torch.linalg.vecdot(rows_ND.float(), grad_of_row_ND)
            grad_weights_M = torch.zeros(topk_weights_TK.numel(), dtype=torch.float32, device=rows_ND.device)
            grad_weights_M[order.pick_N] = grad_weight_N
            grad_weights_TK = grad_weights_M.view_as(topk_weights_TK).to(topk_weights_TK.dtype)
        if ctx.needs_input_grad[0]:
            weight_N = topk_weights_TK.float().flatten().index_select(0, order.pick_N)
            grad_rows_ND = grad_of_row_ND.mul_(weight_N.unsqueeze(1)).to(rows_ND.dtype)
        return grad_rows_ND, grad_weights_TK, None


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
