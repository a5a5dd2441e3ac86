"""RMSNorm: on the token path, before attention, before the feed-forward, before the head, and on query and key heads.

Legend: ... any leading dims, D normalised width.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, computed in fp32 and returned in the dtype of x.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_D: Tensor) -> Tensor:
        """x_D: [..., D] in any floating dtype. Returns the same shape and dtype."""
        x32_D = x_D.float()
        scale = torch.rsqrt(x32_D.square().mean(-1, keepdim=True) + self.eps)
        return (x32_D * scale * self.weight.float()).to(x_D.dtype)
