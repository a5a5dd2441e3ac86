"""Grouped matrix product by Ascend's npu_grouped_matmul, forward and both gradients.

torch_npu 2.13 has no backward for that operator and only warns: a plain call trains nothing. Here each gradient is a call of
its own. Weights stay out × in; the forward product takes them as a transposed view, the gradient of the rows as they are.

Two cases that the vendor leaves open are kept from the operator: no rows at all (it is not called), and the weight gradient
of an expert without rows (set to 0 here).

Legend: R rows, E experts, D inputs, F outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backends import npu_ops
from backends.ops.grouped_gemm.shape import GemmShape


def why_not(device_type: str, dtype: torch.dtype, shape: GemmShape | None) -> str | None:
    """Why npu_grouped_matmul cannot run on such operands; None when it can."""
    if shape is not None and max(shape.in_features, shape.out_features) > npu_ops.LARGEST_INNER_DIM:
        return (
            f"a row of {max(shape.in_features, shape.out_features)} elements is longer than {npu_ops.LARGEST_INNER_DIM}"
        )
    return None


def grouped_gemm(rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """See `backends.ops.grouped_gemm.grouped_gemm`."""
    y_RF: Tensor = _GroupedGemm.apply(rows_RD, weight_EFD, tokens_per_expert_E)
    return y_RF


def weight_gradient(grad_RF: Tensor, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Σ over the rows of each expert of dyᵀ · x: [E, F, D], 0 for experts without rows. Both operands contiguous."""
    num_experts = tokens_per_expert_E.shape[0]
    if not rows_RD.shape[0]:
        return rows_RD.new_zeros((num_experts, grad_RF.shape[1], rows_RD.shape[1]))
    gradient_EFD = npu_ops.grouped_matmul_of_groups(grad_RF, rows_RD, tokens_per_expert_E)
    return gradient_EFD.masked_fill_((tokens_per_expert_E == 0).view(-1, 1, 1), 0)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
        rows_RD, weight_EFD = rows_RD.contiguous(), weight_EFD.contiguous()
        ctx.save_for_backward(rows_RD, weight_EFD, tokens_per_expert_E)
        if not rows_RD.shape[0]:
            return rows_RD.new_empty((0, weight_EFD.shape[1]))
        return npu_ops.grouped_matmul(rows_RD, weight_EFD.transpose(1, 2), tokens_per_expert_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RD, weight_EFD, tokens_per_expert_E = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        grad_rows_RD = grad_weight_EFD = None
        if ctx.needs_input_grad[0]:
            empty = not rows_RD.shape[0]
            grad_rows_RD = (
                torch.empty_like(rows_RD) if empty else npu_ops.grouped_matmul(grad_RF, weight_EFD, tokens_per_expert_E)
            )
        if ctx.needs_input_grad[1]:
            grad_weight_EFD = weight_gradient(grad_RF, rows_RD, tokens_per_expert_E)
        return grad_rows_RD, grad_weight_EFD, None
