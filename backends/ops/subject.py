"""What is needed to hold an op's implementations against the truth: `switchyard verify ops` runs it.

Each op folder has a `cases.py` with one `Subject`. The truth (golden) is the op's reference in float64, on the operands
as the dtype rounds them. An implementation passes where its error is at most `factor` times that of the reference in
the same dtype (or times one rounding to that dtype, where the reference happens to be better than that), so that the
measure is what the dtype allows, and not a tolerance that somebody liked.

Source: the double benchmark of Ascend's operator accuracy standard, which the TeleChat3-MoE report builds on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Operands = Mapping[str, Tensor]
"""By name; floating ones in float64 as they come from a case, integers and masks as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One op: what it is run on, how, and how far from the truth it may be."""

    cases: Mapping[str, Callable[[torch.Generator], Operands]]
    """Operands on the CPU, by the name of what makes them special."""
    call: Callable[[Operands, str], Mapping[str, Tensor]]
    """Run the implementation of that name, on operands of the dtype and device that are asked for; outputs by name."""
    factor: float
    """An implementation's error over the reference's, at most."""
    why_factor: str
    """The reason for its size."""
    kept_in_fp32: frozenset[str] = frozenset()
    """Operands that stay float32 whatever the dtype (float64 for the truth)."""
    without_gradient: frozenset[str] = frozenset()
    """Floating operands that get none."""
    exact: frozenset[str] = frozenset()
    """Outputs that must equal the reference's of the same dtype to the last bit; integer ones always must."""


def uneven_counts() -> dict[str, list[int]]:
    """Rows of each expert: even, with idle experts, all at one, one expert, one row, none."""
    return {
        "even": [8, 8, 8, 8],
        "idle experts": [5, 1, 0, 17, 0],
        "all to one": [0, 0, 33, 0],
        "one expert": [13],
        "one row": [0, 1],
        "no rows": [0, 0, 0],
        "many rows": [300, 0, 45, 167],
    }
