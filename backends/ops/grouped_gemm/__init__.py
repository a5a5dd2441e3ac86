"""grouped_gemm: each row times the weight of its expert. On the token path, inside the experts.

Legend: R rows, E experts (of this rank), D inputs, F outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from backends.ops.grouped_gemm import ascend, reference, torch_native, triton_gpu
from backends.ops.grouped_gemm.shape import GemmShape
from backends.ops.table import Implementation, always, choose

GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]

IMPLEMENTATIONS: dict[str, Implementation[GroupedGemm, GemmShape]] = {
    "torch_native": Implementation(
        name="torch_native",
        function=torch_native.grouped_gemm,
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=torch_native.why_not,
        cost="none, it is the fastest",
    ),
    "ascend": Implementation(
        name="ascend",
        function=ascend.grouped_gemm,
        devices=("npu",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=ascend.why_not,
        cost="none known; it has not been measured, nor run on hardware",
    ),
    "reference": Implementation(
        name="reference",
        function=reference.grouped_gemm,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        why_not=always,
        cost="one product per expert, in fp32: on a CPU about as fast for fp32, and less than half as fast for bf16",
    ),
    # After the reference, so that auto takes it nowhere before it has been right on hardware.
    "triton": Implementation(
        name="triton",
        function=triton_gpu.grouped_gemm,
        devices=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=triton_gpu.why_not,
        cost="not measured: its kernels have not run on a GPU yet",
    ),
}
"""Best first; `auto` takes the first that can run."""


def grouped_gemm(
    rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor, *, implementation: str = "auto"
) -> Tensor:
    """y[i] = x[i] · w[expert of row i]ᵀ: [R, F] in the dtype of the operands, with gradients for rows and weight.

    rows_RD: sorted by expert, zero rows are fine. weight_EFD: stacked as torch.nn.Linear keeps them (out × in).
    tokens_per_expert_E: int64, sums to R; experts without rows get a gradient of exactly 0. implementation: auto, or a
    name of IMPLEMENTATIONS.

    Raises ValueError when the operands disagree, or a named implementation cannot run on them.
    """
    if rows_RD.dtype != weight_EFD.dtype:
        raise ValueError(f"grouped_gemm got {rows_RD.dtype} rows and {weight_EFD.dtype} weights; cast one to the other")
    # Elsewhere than on a CPU this read would wait for the device; there the dispatchers' own checks must do.
    if rows_RD.device.type == "cpu" and int(tokens_per_expert_E.sum()) != rows_RD.shape[0]:
        raise ValueError(
            f"grouped_gemm got {rows_RD.shape[0]} rows, but the counts sum to {int(tokens_per_expert_E.sum())}: "
            "every row needs an expert, or its result would stay uninitialised"
        )
    shape = GemmShape(*(weight_EFD.shape[dim] for dim in (0, 2, 1)))
    chosen = choose("grouped_gemm", IMPLEMENTATIONS, implementation, rows_RD.device.type, rows_RD.dtype, shape)
    return chosen.function(rows_RD, weight_EFD, tokens_per_expert_E)
