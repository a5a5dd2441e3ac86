"""SwiGLU experts by Ascend's grouped products and fused activation: two grouped products forward, four backward.

Gate and up are one product with the weights side by side, as npu_swiglu wants its operand. The stacked weight is made anew in
forward and in backward (a copy of 2·E·F·D elements each) instead of being kept beside w1 and w3. A row's weight
multiplies after the activation, in fp32: fp32 probabilities given to npu_moe_token_unpermute beside bf16 rows make its
gradient NaN. For backward are kept: the rows, gate and up, and the weights themselves.

Legend: R rows, S source rows, E experts, D hidden, F width of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backends import npu_ops
from backends.ops.expert_mlp.shape import MlpShape
from backends.ops.grouped_gemm.ascend import weight_gradient


def why_not(device_type: str, dtype: torch.dtype, shape: MlpShape | None) -> str | None:
    """Why the Ascend operators cannot run on such operands; None when they can."""
    if shape is None:
        return None
    longest = max(shape.hidden_size, 2 * shape.intermediate_size)
    if longest > npu_ops.LARGEST_INNER_DIM:
        return f"a row of {longest} elements is longer than {npu_ops.LARGEST_INNER_DIM}"
    return None


def expert_mlp(
    x_SD: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    tokens_per_expert_E: Tensor,
    weight_R: Tensor | None,
    source_R: Tensor | None,
) -> Tensor:
    """See `backends.ops.expert_mlp.expert_mlp`."""
    rows_RD = x_SD if source_R is None else x_SD.index_select(0, source_R)
    results_RD: Tensor = _ExpertMlp.apply(rows_RD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R)
    if source_R is None:
        return results_RD
    return x_SD.new_zeros(x_SD.shape).float().index_add(0, source_R, results_RD.float()).to(x_SD.dtype)


def _weighted(inner_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    return inner_RF if weight_R is None else (inner_RF.float() * weight_R.unsqueeze(1)).to(inner_RF.dtype)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        w1_EFD: Tensor,
        w3_EFD: Tensor,
        w2_EDF: Tensor,
        tokens_per_expert_E: Tensor,
        weight_R: Tensor | None,
    ) -> Tensor:
        rows_RD, w2_EDF = rows_RD.contiguous(), w2_EDF.contiguous()
        gate_and_up_R2F = None
        if rows_RD.shape[0]:
            w13_E2FD = torch.cat((w1_EFD, w3_EFD), 1)
            gate_and_up_R2F = npu_ops.grouped_matmul(rows_RD, w13_E2FD.transpose(1, 2), tokens_per_expert_E)
        ctx.save_for_backward(rows_RD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R, gate_and_up_R2F)
        if gate_and_up_R2F is None:
            return torch.empty_like(rows_RD)
        inner_RF = _weighted(npu_ops.swiglu(gate_and_up_R2F), weight_R)
        return npu_ops.grouped_matmul(inner_RF, w2_EDF.transpose(1, 2), tokens_per_expert_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R, gate_and_up_R2F = ctx.saved_tensors
        if gate_and_up_R2F is None:
            operands = (rows_RD, w1_EFD, w3_EFD, w2_EDF)
            return *map(torch.zeros_like, operands), None, None if weight_R is None else torch.zeros_like(weight_R)
        grad_RD = grad_RD.contiguous()
        inner_RF = npu_ops.swiglu(gate_and_up_R2F)
        grad_w2_EDF = weight_gradient(grad_RD, _weighted(inner_RF, weight_R), tokens_per_expert_E)
        grad_inner_RF = npu_ops.grouped_matmul(grad_RD, w2_EDF, tokens_per_expert_E)
        grad_weight_R = None if weight_R is None else (grad_inner_RF.float() * inner_RF.float()).sum(1)
        grad_gate_and_up_R2F = npu_ops.swiglu_grad(_weighted(grad_inner_RF, weight_R), gate_and_up_R2F)
        grad_w13_E2FD = weight_gradient(grad_gate_and_up_R2F, rows_RD, tokens_per_expert_E)
        w13_E2FD = torch.cat((w1_EFD, w3_EFD), 1)
        grad_rows_RD = npu_ops.grouped_matmul(grad_gate_and_up_R2F, w13_E2FD, tokens_per_expert_E)
        grad_w1_EFD, grad_w3_EFD = grad_w13_E2FD.chunk(2, 1)
        # Contiguous, as every other implementation gives them: ZeRO flattens gradients.
        return grad_rows_RD, grad_w1_EFD.contiguous(), grad_w3_EFD.contiguous(), grad_w2_EDF, None, grad_weight_R
