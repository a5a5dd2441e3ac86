"""RMSNorm: on the token path, before attention, before the feed-forward, before the head, and on query and key heads.

Legend: ... any leading dims, D normalised width.
"""

import torch
from torch import Tensor, nn

from backends.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, computed in fp32 (inside the op) and returned in the dtype of x.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.implementation = "auto"
        """Which rms_norm runs: auto or a name from the op's table."""
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_D: Tensor) -> Tensor:
        """x_D: [..., D] in any floating dtype. Returns the same shape and dtype."""
        return rms_norm(x_D, self.weight, self.eps, implementation=self.implementation)
