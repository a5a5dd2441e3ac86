"""RMSNorm by Ascend's npu_rms_norm and its backward, with 1 / rms of each row kept in fp32 between the two.

Not called without rows, which the vendor's description leaves open.

Legend: ... any leading dims, D normalised width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backends import npu_ops


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `backends.ops.rms_norm.rms_norm`."""
    y_D: Tensor = _RmsNorm.apply(x_D, weight_D, eps)
    return y_D


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_D, weight_D = x_D.contiguous(), weight_D.contiguous()
        y_D, rstd = npu_ops.rms_norm(x_D, weight_D, eps) if x_D.numel() else (torch.empty_like(x_D), None)
        ctx.save_for_backward(x_D, weight_D, rstd)
        return y_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> tuple[Tensor, Tensor, None]:
        x_D, weight_D, rstd = ctx.saved_tensors
        if rstd is None:
            return torch.empty_like(x_D), torch.zeros_like(weight_D), None
        grad_x_D, grad_weight_D = npu_ops.rms_norm_grad(grad_D.contiguous(), x_D, weight_D, rstd)
        return grad_x_D, grad_weight_D.to(weight_D.dtype), None
