"""Feed-forwards: the dense SwiGLU, and the stacked experts between dispatch and combine on the token path.

Legend: R rows received by this rank, D hidden, F width of an expert, e local experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.ops.expert_mlp import can_take_tokens, expert_mlp


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


class Experts(nn.Module):
    """This rank's experts, each a SwiGLU, their weights stacked and kept out × in as `torch.nn.Linear` keeps them.

    Runs with zero rows too: a rank whose experts get no token must still give its weights a gradient (of zeros), since
    the sharded optimizers reduce gradients in step on all ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        implementation: str = "auto",
        gemm: str = "auto",
    ) -> None:
        """implementation, gemm: which expert_mlp and which grouped_gemm run, auto or a name from the op's table."""
        super().__init__()
        self.implementation = implementation
        self.gemm = gemm
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
        return expert_mlp(
            rows_RD,
            self.w1,
            self.w3,
            self.w2,
            tokens_per_local_expert_e,
            weight_R=weight_R,
            implementation=self.implementation,
            gemm=self.gemm,
        )

    def for_tokens(
        self, x_TD: Tensor, token_R: Tensor, weight_R: Tensor, tokens_per_local_expert_e: Tensor
    ) -> Tensor | None:
        """y[t] = Σ over the rows of token t of weight · result, [T, D]; see `dispatch.local.TokenExperts`."""
        if not can_take_tokens(x_TD, self.implementation, self.gemm):
            return None
        return expert_mlp(
            x_TD,
            self.w1,
            self.w3,
            self.w2,
            tokens_per_local_expert_e,
            weight_R=weight_R,
            source_R=token_R,
            implementation=self.implementation,
            gemm=self.gemm,
        )
