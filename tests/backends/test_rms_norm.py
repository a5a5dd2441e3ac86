"""rms_norm: every implementation against float64, in outputs and both gradients; fresh memory is NaN."""

import pytest
import torch
from torch import Tensor

from backends.ops.rms_norm import IMPLEMENTATIONS, rms_norm

OUTPUT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GRAD_X_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GRAD_WEIGHT_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest error relative to the largest element: half an ulp of one rounding in bf16 and fp16; sums over the width and the
rows are reordered in fp32."""
ON_CPU = [name for name, record in IMPLEMENTATIONS.items() if "cpu" in record.devices]
"""Those for other devices: tests/ascend runs these cases on them."""
SHAPES = {"block": (3, 5, 32), "heads": (2, 4, 3, 16), "row": (1, 64), "odd": (7, 17), "no_rows": (0, 8)}


def check(implementation: str, shape: str, dtype: torch.dtype, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(len(shape))
    size = SHAPES[shape]
    x_D, grad_D = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    weight_D = (1 + 0.2 * torch.randn(size[-1], generator=generator)).to(dtype)
    eps = 1e-5
    golden = [operand.double().requires_grad_() for operand in (x_D, weight_D)]
    expected = golden[0] / (golden[0].square().mean(-1, keepdim=True) + eps).sqrt() * golden[1]
    expected.backward(grad_D.double())
    leaves = [operand.to(device).requires_grad_() for operand in (x_D, weight_D)]
    y_D = rms_norm(*leaves, eps, implementation=implementation)
    y_D.backward(grad_D.to(device))
    assert y_D.dtype is dtype
    for name, actual, wanted, tolerance in (
        ("output", y_D.detach(), expected.detach(), OUTPUT_TOLERANCE[dtype]),
        ("grad_x", leaves[0].grad, golden[0].grad, GRAD_X_TOLERANCE[dtype]),
        ("grad_weight", leaves[1].grad, golden[1].grad, GRAD_WEIGHT_TOLERANCE[dtype]),
    ):
        assert_close(f"{shape} {name}", actual, wanted, tolerance)


def assert_close(name: str, actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert actual is not None, name
    assert expected is not None, name
    assert actual.shape == expected.shape, name
    if expected.numel():
        error, scale = float((actual.cpu().double() - expected).abs().max()), float(expected.abs().max())
        assert error <= tolerance * scale, f"{name}: error {error:.3e} of {scale:.3e}"


@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_equals_float64(implementation: str, shape: str, dtype: torch.dtype) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fresh memory is filled with NaN
    try:
        check(implementation, shape, dtype)
    finally:
        torch.use_deterministic_algorithms(before)


def test_takes_strided_rows_and_an_expanded_gradient() -> None:
    for implementation in ON_CPU:
        strided = torch.randn(16, 6).t().requires_grad_()
        weight = torch.ones(16, requires_grad=True)
        rms_norm(strided, weight, 1e-5, implementation=implementation).sum().backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()


def test_operands_that_disagree_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rows \[2, 8\] of torch\.float32 and a weight \[8\] of torch\.bfloat16; give"
    ):
        rms_norm(torch.zeros(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match=r"a weight \[4\]"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm \(ascend\) cannot run here: it runs on npu, not on cpu"):
        rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, implementation="ascend")
