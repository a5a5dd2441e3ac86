"""Grouped matrix product by torch.nn.functional.grouped_mm, with a backward of our own.

Legend: R rows, E experts, D inputs, F outputs.

Limits of grouped_mm in torch 2.13, and what is done here:
- strides must be multiples of 16 bytes: `why_not` says so;
- expanded operands raise, so the incoming gradient (of a sum, say) is made contiguous;
- result rows beyond the last end are uninitialised, in backward too: the op's edge checks that the counts sum to R;
- on some CUDA devices the weight gradient of an empty expert is not written (pytorch issue 172439, open in torch 2.13):
  it is set to 0 here on every device but the CPU, whose kernel does write it. Remove when that issue is closed;
- CUDA takes bfloat16 only; float16 on a CPU is right but runs at about 1 GFLOP/s;
- no second derivative, and torch.compile on CPU knows its bfloat16 form only.

Speed, GFLOP/s of useful work, one thread of an AVX512_BF16 core, torch 2.13, loads 0.5 to 1.5 x the mean, 2026-11-30:

    E, R, D, F              dtype   this: forward, with backward    reference: forward, with backward
    8, 4096, 512, 1024      fp32     96   96                         93   93
    8, 4096, 512, 1024      bf16    206  205                         89   91
    64, 8192, 512, 256      fp32     80   73                         74   63
    64, 8192, 512, 256      bf16    157  157                         73   75
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from backends.ops.grouped_gemm.shape import GemmShape


def why_not(device_type: str, dtype: torch.dtype, shape: GemmShape | None) -> str | None:
    """Why grouped_mm cannot run on such operands; None when it can."""
    if device_type == "cuda" and dtype is not torch.bfloat16:
        return f"on cuda it takes torch.bfloat16, not {dtype}"
    if shape is None:
        return None
    odd = [size for size in (shape.in_features, shape.out_features) if size * dtype.itemsize % 16]
    if odd:
        return f"a row of {odd[0]} elements of {dtype} is not a multiple of 16 bytes"
    return None


def grouped_gemm(rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """See `backends.ops.grouped_gemm.grouped_gemm`."""
    y_RF: Tensor = _GroupedGemm.apply(rows_RD, weight_EFD, tokens_per_expert_E)
    return y_RF


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
        end_E = torch.cumsum(tokens_per_expert_E, 0, dtype=torch.int32)
        rows_RD, weight_EFD = rows_RD.contiguous(), weight_EFD.contiguous()
        ctx.save_for_backward(rows_RD, weight_EFD, end_E, tokens_per_expert_E)
        return grouped_mm(rows_RD, weight_EFD.transpose(-2, -1), offs=end_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RD, weight_EFD, end_E, tokens_per_expert_E = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        grad_rows_RD = grad_weight_EFD = None
        if ctx.needs_input_grad[0]:
            grad_rows_RD = grouped_mm(grad_RF, weight_EFD, offs=end_E)
        if ctx.needs_input_grad[1]:
            grad_weight_EFD = grouped_mm(grad_RF.t(), rows_RD, offs=end_E)
            if grad_weight_EFD.device.type != "cpu":
                grad_weight_EFD = grad_weight_EFD.masked_fill_((tokens_per_expert_E == 0).view(-1, 1, 1), 0)
        return grad_rows_RD, grad_weight_EFD, None
