"""Grouped matrix product by kernels of our own in Triton, forward and backward, without a wait for the device.

Proven in Triton's interpreter and by compilation only; it has run on no GPU yet (docs/kernels.md). So it stands last in
the table, where `auto` never takes it.

Legend: R rows, E experts, D inputs, F outputs.
"""

import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backends.ops.grouped_gemm.shape import GemmShape

MAX_WEIGHT = 2**31 - 1
"""Elements of one expert's weight that a 32-bit index reaches."""


class Tile(NamedTuple):
    """Sizes of a tile (rows, columns, summed) and how it is run."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


TILES = {
    torch.bfloat16: Tile(128, 128, 64, 8, 3),
    torch.float16: Tile(128, 128, 64, 8, 3),
    torch.float32: Tile(64, 64, 32, 8, 2),
}
"""They compile without spills for every listed architecture (docs/kernels.md); not tuned, no other size was tried."""
INTERPRETED_TILE = Tile(16, 16, 16, 1, 1)


def why_not(device_type: str, dtype: torch.dtype, shape: GemmShape | None) -> str | None:
    """Why these kernels cannot run on such operands; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; CUDA builds of torch bring it along"
    if shape is not None and shape.in_features * shape.out_features > MAX_WEIGHT:
        return f"a weight of {shape.in_features} × {shape.out_features} is past its 32-bit indices"
    return None


def grouped_gemm(rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """See `backends.ops.grouped_gemm.grouped_gemm`."""
    y_RF: Tensor = _GroupedGemm.apply(rows_RD, weight_EFD, tokens_per_expert_E)
    return y_RF


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
        offsets = torch.nn.functional.pad(torch.cumsum(tokens_per_expert_E, 0, dtype=torch.int32), (1, 0))
        rows_RD, weight_EFD = rows_RD.contiguous(), weight_EFD.contiguous()
        ctx.save_for_backward(rows_RD, weight_EFD, offsets)
        return _rows_times_weight(rows_RD, weight_EFD, offsets, weight_is_nk=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RD, weight_EFD, offsets = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        grad_rows_RD = grad_weight_EFD = None
        if ctx.needs_input_grad[0]:
            grad_rows_RD = _rows_times_weight(grad_RF, weight_EFD, offsets, weight_is_nk=False)
        if ctx.needs_input_grad[1]:
            grad_weight_EFD = _weight_gradient(grad_RF, rows_RD, weight_EFD, offsets)
        return grad_rows_RD, grad_weight_EFD, None


def _rows_times_weight(a_RK: Tensor, weight: Tensor, offsets: Tensor, *, weight_is_nk: bool) -> Tensor:
    from backends.ops.grouped_gemm import triton_kernels

    columns = weight.shape[1 if weight_is_nk else 2]
    y_RN = a_RK.new_empty(a_RK.shape[0], columns, dtype=_stored(a_RK.dtype))
    if y_RN.numel():
        triton_kernels.rows_times_weight[_grid(a_RK)](
            a_RK, weight, y_RN, offsets, len(weight), a_RK.shape[1], columns, WEIGHT_IS_NK=weight_is_nk, **_how(a_RK)
        )
    return y_RN.to(a_RK.dtype)


def _weight_gradient(grad_RF: Tensor, rows_RD: Tensor, weight_EFD: Tensor, offsets: Tensor) -> Tensor:
    from backends.ops.grouped_gemm import triton_kernels

    grad_weight_EFD = torch.empty_like(weight_EFD, dtype=_stored(weight_EFD.dtype))
    triton_kernels.weight_gradient[_grid(rows_RD)](
        grad_RF, rows_RD, grad_weight_EFD, offsets, *weight_EFD.shape, **_how(rows_RD)
    )
    return grad_weight_EFD.to(weight_EFD.dtype)


def _stored(dtype: torch.dtype) -> torch.dtype:
    """What the kernels write. The interpreter cuts fp32 to bf16 without rounding (triton 3.9): there torch rounds."""
    return torch.float32 if _interpreted() and dtype is torch.bfloat16 else dtype


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _grid(operand: Tensor) -> tuple[int]:
    """One program per multiprocessor; each takes every so manieth tile. Three in the interpreter, to see them share."""
    if _interpreted():
        return (3,)
    return (torch.get_device_module(operand.device).get_device_properties(operand.device).multi_processor_count,)


def _how(operand: Tensor) -> dict[str, int | bool]:
    # The interpreter's tl.dot returns garbage for bf16 operands (triton 3.9); in fp32 their products are exact.
    tile = INTERPRETED_TILE if _interpreted() else TILES[operand.dtype]
    return {"UPCAST": _interpreted() and operand.dtype is torch.bfloat16, **tile._asdict()}
