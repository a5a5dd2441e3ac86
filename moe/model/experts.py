"""Feed-forwards: the dense SwiGLU, and the stacked experts between dispatch and combine on the token path.

Legend: R rows received by this rank, D hidden, F width of an expert, e local experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from backends.ops.grouped_gemm import grouped_gemm


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): the dense feed-forward, and the shared experts as one.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_D: Tensor) -> Tensor:
        """x_D: [..., D]. Returns the same shape and dtype."""
        return self.down_proj(F.silu(self.gate_proj(x_D)) * self.up_proj(x_D))


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


class Experts(nn.Module):
    """This rank's experts, each a SwiGLU, their weights stacked and kept out × in as `torch.nn.Linear` keeps them.

    Runs with zero rows too: a rank whose experts get no token must still give its weights a gradient (of zeros), since
    the sharded optimizers reduce gradients in step on all ranks.
    """

    def __init__(
        self, num_local_experts: int, hidden_size: int, intermediate_size: int, *, implementation: str = "auto"
    ) -> None:
        """implementation: which grouped_gemm runs, auto or a name from the op's table."""
        super().__init__()
        self.implementation = implementation
        self.w1 = nn.Parameter(torch.empty(num_local_experts, intermediate_size, hidden_size))
        """Gate, [e, F, D]."""
        self.w3 = nn.Parameter(torch.empty(num_local_experts, intermediate_size, hidden_size))
        """Up, [e, F, D]."""
        self.w2 = nn.Parameter(torch.empty(num_local_experts, hidden_size, intermediate_size))
        """Down, [e, D, F]."""

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank, e."""
        return self.w1.shape[0]

    def forward(self, rows_RD: Tensor, tokens_per_local_expert_e: Tensor, weight_R: Tensor | None = None) -> Tensor:
        """rows_RD: sorted by local expert; tokens_per_local_expert_e: int64, sums to R. Returns [R, D], same dtype.

        weight_R: fp32, multiplies each row's result; see dispatch/memory.py.
        """
        gate_RF = grouped_gemm(rows_RD, self.w1, tokens_per_local_expert_e, implementation=self.implementation)
        up_RF = grouped_gemm(rows_RD, self.w3, tokens_per_local_expert_e, implementation=self.implementation)
        inner_RF = F.silu(gate_RF) * up_RF if weight_R is None else weighted_swiglu(gate_RF, up_RF, weight_R)
        return grouped_gemm(inner_RF, self.w2, tokens_per_local_expert_e, implementation=self.implementation)
