"""Every call of an `npu::` operator of torch_npu, each with the contract that the vendor states and torch_npu does not check.

Called by `backends/ops/*/ascend.py`, which own the gradients: what torch_npu would do in backward is not relied on. A tensor
on an NPU means that torch_npu is loaded, so nothing is imported here. The asserts hold what those files guarantee; sizes
and types that a user may choose are refused before, in each op's `why_not`.

tests/ascend/calls.json records these calls with torch_npu's own schemas and shapes, and tests hold the code to it.

Source: "Ascend Extension for PyTorch" 7.0, API reference of each operator; tests/ascend/sim/README.md says what is proven.
"""

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of operands that all operators here take on Atlas A2 and A3."""
LARGEST_INNER_DIM = 65535
"""Of a grouped product's operands, in the last dim as stored."""


def grouped_matmul(rows_RK: Tensor, weight_EKN: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Rows of group e times weight e: [R, N]. The counts sum to R; R > 0. The weight may be a transposed view."""
    _floats("npu_grouped_matmul", rows_RK, weight_EKN)
    _counts(tokens_per_expert_E, weight_EKN.shape[0], rows_RK.device)
    assert rows_RK.dim() == 2, rows_RK.shape
    assert weight_EKN.dim() == 3, weight_EKN.shape
    assert rows_RK.shape[1] == weight_EKN.shape[1], (rows_RK.shape, weight_EKN.shape)
    assert rows_RK.shape[0] > 0, "an empty operand is not in the vendor's description"
    assert rows_RK.is_contiguous()
    assert weight_EKN.is_contiguous() or weight_EKN.transpose(1, 2).is_contiguous(), weight_EKN.stride()
    assert max(*rows_RK.shape[1:], *weight_EKN.shape[1:]) <= LARGEST_INNER_DIM
    (product_RN,) = _call(
        "npu_grouped_matmul",
        [rows_RK],
        [weight_EKN],
        group_list=tokens_per_expert_E,
        group_list_type=1,
        group_type=0,
        split_item=2,
    )
    return product_RN


def grouped_matmul_of_groups(left_RM: Tensor, right_RN: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Left rows of group e, transposed, times right rows of group e: [E, M, N]; undefined for groups without rows. R > 0."""
    _floats("npu_grouped_matmul", left_RM, right_RN)
    _counts(tokens_per_expert_E, tokens_per_expert_E.shape[0], left_RM.device)
    assert left_RM.dim() == right_RN.dim() == 2, (left_RM.shape, right_RN.shape)
    assert left_RM.shape[0] == right_RN.shape[0] > 0, (left_RM.shape, right_RN.shape)
    # The left operand must come as the transposed view of a contiguous tensor: a contiguous transpose is refused.
    assert left_RM.is_contiguous()
    assert right_RN.is_contiguous()
    assert max(left_RM.shape[1], right_RN.shape[1]) <= LARGEST_INNER_DIM
    (product_EMN,) = _call(
        "npu_grouped_matmul",
        [left_RM.t()],
        [right_RN],
        group_list=tokens_per_expert_E,
        group_list_type=1,
        group_type=2,
        split_item=3,
    )
    return product_EMN


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(first half) · second half of the last dim."""
    _floats("npu_swiglu", gate_and_up)
    assert gate_and_up.shape[-1] % 2 == 0, gate_and_up.shape
    assert gate_and_up.numel() > 0
    assert gate_and_up.is_contiguous()
    result: Tensor = _call("npu_swiglu", gate_and_up, -1)
    return result


def swiglu_grad(grad: Tensor, gate_and_up: Tensor) -> Tensor:
    """Gradient of the operand of `swiglu`."""
    _floats("npu_swiglu_backward", grad, gate_and_up)
    assert grad.shape == (*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2), (grad.shape, gate_and_up.shape)
    assert grad.is_contiguous()
    assert gate_and_up.is_contiguous()
    result: Tensor = _call("npu_swiglu_backward", grad, gate_and_up, -1)
    return result


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and 1 / rms of each in fp32 with a last dim of 1."""
    _floats("npu_rms_norm", x_D, weight_D)
    assert weight_D.shape == x_D.shape[-1:], (x_D.shape, weight_D.shape)
    assert x_D.numel() > 0
    assert x_D.is_contiguous()
    assert weight_D.is_contiguous()
    y_D, rstd = _call("npu_rms_norm", x_D, weight_D, eps)
    return y_D, rstd


def rms_norm_grad(grad_D: Tensor, x_D: Tensor, weight_D: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows, and of the weight (in fp32)."""
    _floats("npu_rms_norm_backward", grad_D, x_D, weight_D)
    assert grad_D.shape == x_D.shape, (grad_D.shape, x_D.shape)
    assert rstd.dtype == torch.float32
    assert rstd.shape == (*x_D.shape[:-1], 1), (rstd.shape, x_D.shape)
    assert all(operand.is_contiguous() for operand in (grad_D, x_D, weight_D, rstd))
    grad_x_D, grad_weight_D = _call("npu_rms_norm_backward", grad_D, x_D, weight_D, rstd)
    return grad_x_D, grad_weight_D


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.ops.npu, name)(*args, **kwargs)


def _floats(name: str, *operands: Tensor) -> None:
    first = operands[0]
    assert first.dtype in FLOATS, f"{name}: {first.dtype}"
    for operand in operands[1:]:
        assert operand.dtype == first.dtype, f"{name}: {operand.dtype} beside {first.dtype}"
        assert operand.device == first.device, f"{name}: {operand.device} beside {first.device}"


def _counts(counts_E: Tensor, num_groups: int, device: torch.device) -> None:
    assert counts_E.dtype == torch.int64, f"group_list of {counts_E.dtype}: torch_npu would pass it on unseen"
    assert counts_E.shape == (num_groups,), counts_E.shape
    assert counts_E.device == device
    assert counts_E.is_contiguous()
