"""RMSNorm: on the token path, before attention, before the feed-forward, before the head, and on query and key heads.

Legend: ... any leading dims, D normalised width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, computed in fp32 (inside torch's own op) and returned in the dtype of x.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_D: Tensor) -> Tensor:
        """x_D: [..., D] in any floating dtype. Returns the same shape and dtype."""
        return F.rms_norm(x_D, self.weight.shape, self.weight, self.eps)
