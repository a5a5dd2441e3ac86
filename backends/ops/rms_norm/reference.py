"""RMSNorm written out: the definition.

    y = x · r · w,   r = 1 / sqrt(mean(x²) + eps)
    dx = r · (dy · w − x · r² · mean(dy · w · x)),   dw = Σ over rows of dy · x · r

Everything is computed in fp32 (float64 for float64 operands) and rounded once. Gradients are autograd's.

Legend: ... any leading dims, D normalised width.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
"""

import torch
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `backends.ops.rms_norm.rms_norm`."""
    inner_D = x_D.to(torch.promote_types(x_D.dtype, torch.float32))
    r = torch.rsqrt(inner_D.square().mean(-1, keepdim=True) + eps)
    return (inner_D * r * weight_D.to(inner_D.dtype)).to(x_D.dtype)
