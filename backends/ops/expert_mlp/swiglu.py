"""The activation between an expert's products, with each row's weight in it.

Legend: R rows, F width of an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def weighted_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor) -> Tensor:
    """weight · silu(gate) · up, computed in fp32, in the dtype of gate. Keeps its operands alone for backward."""
    inner_RF: Tensor = _WeightedSwiGLU.apply(gate_RF, up_RF, weight_R)
    return inner_RF


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weight_R)
        return (F.silu(gate_RF.float()) * up_RF.float() * weight_R.unsqueeze(1)).to(gate_RF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate_RF, up_RF, weight_R = ctx.saved_tensors
        gate, up, grad = gate_RF.float(), up_RF.float(), grad_RF.float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_weight_R = (grad * silu * up).sum(1)
        grad *= weight_R.unsqueeze(1)
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return grad_gate.to(gate_RF.dtype), (grad * silu).to(up_RF.dtype), grad_weight_R
