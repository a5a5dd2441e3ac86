"""Reference kernels of the npu:: operators that the project calls, and of those that torch_npu's autograd calls for them.

Written from the vendor's descriptions of the operators, in plain torch, fp32 inside, rounded once. They prove that we pass
the right arguments and wire the gradients rightly; what the hardware's own rounding does they cannot tell.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) · second half."""
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Gradient of both halves, joined."""
    gate, up = x.float().chunk(2, dim)
    dy, sigmoid = grad.float(), torch.sigmoid(gate)
    return torch.cat((dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), dy * gate * sigmoid), dim).to(x.dtype)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """y = x · rstd · gamma, and rstd in fp32 with the normalised dims kept as 1."""
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def rms_norm_backward(grad: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of gamma in fp32."""
    dims = tuple(range(-gamma.dim(), 0))
    normed, dy = x.float() * rstd, grad.float() * gamma.float()
    dx = rstd * (dy - normed * (dy * normed).mean(dims, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normed).sum(tuple(range(x.dim() - gamma.dim())))


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """x · r1 + rotated(x) · r2."""
    assert rotate is None, "no reference with a rotation matrix"
    return (x.float() * r1.float() + _turned(x.float(), rotary_mode) * r2.float()).to(x.dtype)


def rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, r1 and r2; the last two summed over what they were broadcast."""
    dy, wide = grad.float(), x.float()
    # The rotation is antisymmetric: its transpose turns the other way.
    dx = dy * r1.float() - _turned(dy * r2.float(), rotary_mode)
    dr1, dr2 = dy * wide, dy * _turned(wide, rotary_mode)
    return dx.to(x.dtype), dr1.sum_to_size(r1.shape).to(r1.dtype), dr2.sum_to_size(r2.shape).to(r2.dtype)


def _turned(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    """One x, one weight, one output: groups of rows against [E, K, N] (type 0), or groups of the inner dim (type 2)."""
    assert not any(value for value in others.values()), f"no reference with {others}"
    assert len(x) == len(weight) == 1, "no reference for lists of operands"
    assert split_item in (2, 3), "no reference for lists of results"
    assert group_list is not None
    assert output_dtype is None
    numbers = [int(number) for number in group_list]
    if group_list_type == 0:
        numbers = [end - start for start, end in zip([0, *numbers[:-1]], numbers, strict=True)]
    left, right = x[0].float(), weight[0].float()
    if group_type == 0:
        rows = left[: sum(numbers)].split(numbers)
        # Rows behind the last group stay as they were: fresh memory.
        rest = torch.full((left.shape[0] - sum(numbers), right.shape[2]), float("nan"))
        product = torch.cat([*(part @ right[group] for group, part in enumerate(rows)), rest])
    else:
        assert group_type == 2, f"no reference for group_type {group_type}"
        columns, rows = left[:, : sum(numbers)].split(numbers, 1), right[: sum(numbers)].split(numbers)
        product = torch.stack([column @ part for column, part in zip(columns, rows, strict=True)])
        # Whether a group without rows is written is not in the description either.
        product[torch.tensor(numbers) == 0] = float("nan")
    return [product.to(x[0].dtype)]


def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert (stable), and for each pick, token by token, the row it went to."""
    assert not padded_mode
    picks = indices.shape[1] if indices.dim() == 2 else 1
    order = torch.argsort(indices.reshape(-1).long(), stable=True)
    count = num_out_tokens if num_out_tokens else order.numel()
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return tokens[(order // picks)[:count]], place.to(torch.int32)


def token_permute_grad(
    grad: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topk: int,
    padded: bool = False,
) -> Tensor:
    """Each token's sum over its picks that were kept."""
    picked = _take(grad.float(), sorted_indices)
    return picked.view(tokens_size_0, num_topk, -1).sum(1).to(tokens_dtype)


def token_unpermute(
    permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded: bool = False, shape: Any = None
) -> Tensor:
    """Each token's (weighted) sum over its picks."""
    picks = probs.shape[1] if probs is not None else 1
    picked = _take(permuted.float(), sorted_indices).view(sorted_indices.numel() // picks, picks, -1)
    if probs is not None:
        picked = picked * probs.float().unsqueeze(-1)
    return picked.sum(1).to(permuted.dtype)


def token_unpermute_grad(
    permuted: Tensor,
    grad: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded: bool = False,
    shape: Any = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weights. As on the device: fp32 weights with other rows give NaN."""
    if probs is not None and probs.dtype != permuted.dtype:
        return torch.full_like(permuted, float("nan")), torch.full_like(probs, float("nan"))
    picks = probs.shape[1] if probs is not None else 1
    each = grad.float().repeat_interleave(picks, 0)
    rows = sorted_indices.long()
    kept = rows < permuted.shape[0]
    weighted = each if probs is None else each * probs.float().reshape(-1, 1)
    grad_rows = torch.zeros(permuted.shape, dtype=torch.float32)
    grad_rows[rows[kept]] = weighted[kept]
    if probs is None:
        return grad_rows.to(permuted.dtype), torch.empty(0, dtype=permuted.dtype)
    grad_probs = (each * _take(permuted.float(), sorted_indices)).sum(-1).view(-1, picks)
    return grad_rows.to(permuted.dtype), grad_probs.to(probs.dtype)


def token_unpermute_grad_v2(
    grad: Tensor,
    sorted_indices: Tensor,
    rows: int,
    dtype: torch.dtype,
    probs: Tensor | None = None,
    padded: bool = False,
    shape: Any = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, told the rows' size where their values are not needed."""
    permuted = permuted_tokens if permuted_tokens is not None else torch.zeros(rows, grad.shape[1], dtype=dtype)
    return token_unpermute_grad(permuted, grad, sorted_indices, probs)


def _take(rows: Tensor, sorted_indices: Tensor) -> Tensor:
    """rows[sorted_indices], zero for places behind the last row."""
    index = sorted_indices.long()
    kept = index < rows.shape[0]
    taken = torch.zeros((index.numel(), rows.shape[1]), dtype=rows.dtype)
    taken[kept] = rows[index[kept]]
    return taken


def matmul_backward(grad: Tensor, left: Tensor, right: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """torch_npu's own gradient of aten::matmul, for operands of two dims and more."""
    assert left.dim() >= 2
    assert right.dim() >= 2
    grad_left = grad.matmul(right.transpose(-1, -2)).sum_to_size(left.shape) if mask[0] else None
    grad_right = left.transpose(-1, -2).matmul(grad).sum_to_size(right.shape) if mask[1] else None
    return grad_left, grad_right


def gather_backward(grad: Tensor, size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    """Each gradient added where its value was taken from."""
    return torch.zeros(list(size), dtype=grad.dtype).scatter_add(dim, index, grad)


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropped-out x, and the mask as bytes."""
    mask = torch.empty_like(x).bernoulli_(1 - p)
    return x * mask / (1 - p), mask.to(torch.uint8)


ATEN: dict[str, Callable[..., Any]] = {"aten::matmul_backward": matmul_backward}
"""Operators that torch declares and only torch_npu implements."""

NPU: dict[str, Callable[..., Any]] = {
    "npu::npu_swiglu": swiglu,
    "npu::npu_swiglu_backward": swiglu_backward,
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rms_norm_backward": rms_norm_backward,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_rotary_mul_backward": rotary_mul_backward,
    "npu::npu_grouped_matmul": grouped_matmul,
    "npu::npu_grouped_matmul.List": grouped_matmul,
    "npu::npu_moe_token_permute": token_permute,
    "npu::npu_moe_token_permute_grad_v2": token_permute_grad,
    "npu::npu_moe_token_unpermute": token_unpermute,
    "npu::_npu_moe_token_unpermute": lambda *args, **kwargs: (token_unpermute(*args, **kwargs), args[0]),
    "npu::npu_moe_token_unpermute_grad": token_unpermute_grad,
    "npu::npu_moe_token_unpermute_grad_v2": token_unpermute_grad_v2,
    "npu::npu_gather_backward": gather_backward,
    "npu::_npu_dropout": dropout,
    "npu::npu_dropout_backward": lambda grad, mask, p: grad * mask.to(grad.dtype) / (1 - p),
    "npu::_npu_dtype_cast": lambda x, dtype: x.to(dtype),
    "npu::npu_dtype_cast": lambda x, dtype: x.to(dtype),
    "npu::_npu_dtype_cast_backward": lambda grad, dtype: grad.to(dtype),
}

KEPT = frozenset(f"npu::{name}" for name in (
    "_npu_format_cast", "copy_memory_", "empty_with_format", "get_npu_format", "get_storage_size",
    "npu_alloc_float_status", "npu_change_data_ptr", "npu_clear_float_status", "npu_format_cast",
    "npu_format_cast.aclnn", "npu_format_cast_", "npu_get_float_status", "unsafe_empty_with_format",
))  # fmt: skip
"""Left to torch_npu: they describe memory and compute nothing."""
