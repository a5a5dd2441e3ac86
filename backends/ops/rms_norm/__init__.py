"""rms_norm: each row divided by its root mean square, times a weight. On the token path: before each half of a block.

Legend: ... any leading dims, D normalised width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from backends.ops.rms_norm import ascend, reference, torch_native
from backends.ops.rms_norm.shape import NormShape
from backends.ops.table import Implementation, always, choose

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]

IMPLEMENTATIONS: dict[str, Implementation[RmsNorm, NormShape]] = {
    "ascend": Implementation(
        name="ascend",
        function=ascend.rms_norm,
        devices=("npu",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=always,
        cost="none known; it has not been measured, nor run on hardware",
    ),
    "torch_native": Implementation(
        name="torch_native",
        function=torch_native.rms_norm,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        why_not=always,
        cost="none where no better one is meant for the device",
    ),
    "reference": Implementation(
        name="reference",
        function=reference.rms_norm,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        why_not=always,
        cost="several passes over the rows, and fp32 copies of them kept for backward",
    ),
}
"""Best first; `auto` takes the first that can run."""


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, *, implementation: str = "auto") -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dim, in fp32 and rounded once; gradients for x and weight.

    x_D: [..., D]. weight_D: [D], in the dtype of x. implementation: auto, or a name of IMPLEMENTATIONS.

    Raises ValueError when the operands disagree, or a named implementation cannot run on them.
    """
    if x_D.dtype != weight_D.dtype or weight_D.shape != x_D.shape[-1:]:
        raise ValueError(
            f"rms_norm got rows {list(x_D.shape)} of {x_D.dtype} and a weight {list(weight_D.shape)} of "
            f"{weight_D.dtype}; give a weight of the rows' width and type"
        )
    shape = NormShape(weight_D.shape[0])
    chosen = choose("rms_norm", IMPLEMENTATIONS, implementation, x_D.device.type, x_D.dtype, shape)
    return chosen.function(x_D, weight_D, eps)
