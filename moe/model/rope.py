"""Rotary positions: on the token path, inside attention, after QK-norm.

Legend: B rows, S tokens, H heads, d width of a head, h = d / 2 rotated pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryAngles(NamedTuple):
    """Cosine and sine of every position's angles, fp32; computed once a forward and shared by all layers."""

    cos_BS1h: Tensor
    sin_BS1h: Tensor


def rotary_angles(positions_BS: Tensor, *, head_dim: int, theta: float) -> RotaryAngles:
    """Angles position · theta^(−2i/d) for the pairs i = 0 … d/2 − 1.

    positions_BS: int64, counted from each document's first token. Computed afresh each forward: it costs nothing beside
    attention, and no buffer can then be cast to half precision, where positions above 256 already collide.

    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    exponents_h = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device) / head_dim
    angles_BS1h = positions_BS.float()[:, :, None, None] * (1.0 / theta**exponents_h)
    return RotaryAngles(angles_BS1h.cos(), angles_BS1h.sin())


def rotate(x_BSHd: Tensor, angles: RotaryAngles) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its angle, in fp32; returns the dtype of x.

    Pairs are half a head apart, as in published Hugging Face checkpoints, so that weights need no permutation.
    """
    first, second = x_BSHd.float().chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHd.dtype)
