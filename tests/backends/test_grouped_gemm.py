"""grouped_gemm: every implementation against float64, in outputs and both gradients; fresh memory is NaN."""

import logging

import pytest
import torch
from torch import Tensor

from backends.ops.grouped_gemm import IMPLEMENTATIONS, grouped_gemm
from backends.ops.grouped_gemm.shape import GemmShape
from backends.ops.table import choose

OUTPUT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GRAD_ROWS_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GRAD_WEIGHT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest error relative to the largest element: half an ulp of one rounding in bf16 and fp16, sums are fp32."""

ON_CPU = [name for name, record in IMPLEMENTATIONS.items() if "cpu" in record.devices]
"""Those for other devices: tests/ascend runs these cases on them."""

# tokens per expert, D, F
SHAPES = {
    "even": ([8, 8, 8, 8], 32, 48),
    "odd_counts": ([5, 1, 0, 17, 3], 32, 16),
    "empty_first_and_last": ([0, 9, 0], 16, 64),
    "all_to_one": ([0, 0, 33, 0], 64, 32),
    "one_expert": ([13], 16, 16),
    "no_rows": ([0, 0, 0], 16, 32),
    "one_row": ([0, 1], 16, 8),
}
ODD_SIZES = {"odd_in": ([4, 0, 3], 17, 16), "odd_out": ([4, 0, 3], 16, 7), "both_odd": ([1, 2], 3, 5)}


def operands(counts: list[int], in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(counts) + in_features)
    rows_RD = torch.randn(sum(counts), in_features, generator=generator).to(dtype)
    weight_EFD = torch.randn(len(counts), out_features, in_features, generator=generator).to(dtype)
    grad_RF = torch.randn(sum(counts), out_features, generator=generator).to(dtype)
    return rows_RD, weight_EFD, grad_RF, torch.tensor(counts)


def golden(rows_RD: Tensor, weight_EFD: Tensor, grad_RF: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Row by row, in float64."""
    expert_R = torch.repeat_interleave(torch.arange(len(counts)), counts)
    x_RD, w_EFD, dy_RF = rows_RD.double(), weight_EFD.double(), grad_RF.double()
    grad_weight_EFD = torch.zeros_like(w_EFD)
    for row, expert in enumerate(expert_R.tolist()):
        grad_weight_EFD[expert] += torch.outer(dy_RF[row], x_RD[row])
    return {
        "output": torch.einsum("rd,rfd->rf", x_RD, w_EFD[expert_R]),
        "grad_rows": torch.einsum("rf,rfd->rd", dy_RF, w_EFD[expert_R]),
        "grad_weight": grad_weight_EFD,
    }


def assert_close(name: str, actual: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert actual is not None, name
    assert actual.shape == expected.shape, name
    actual = actual.cpu()
    assert actual.isfinite().all(), name
    if expected.numel():
        error, scale = float((actual.detach().double() - expected).abs().max()), float(expected.abs().max())
        assert error <= tolerance * scale, f"{name}: error {error:.3e} of {scale:.3e}"


def check(implementation: str, shape: tuple[list[int], int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    rows_RD, weight_EFD, grad_RF, counts = operands(*shape, dtype)
    expected = golden(rows_RD, weight_EFD, grad_RF, counts)
    rows_RD, weight_EFD, grad_RF, counts = (given.to(device) for given in (rows_RD, weight_EFD, grad_RF, counts))
    rows_RD, weight_EFD = rows_RD.requires_grad_(), weight_EFD.requires_grad_()
    y_RF = grouped_gemm(rows_RD, weight_EFD, counts, implementation=implementation)
    y_RF.backward(grad_RF)
    assert y_RF.dtype is dtype
    assert_close("output", y_RF, expected["output"], OUTPUT_TOLERANCE[dtype])
    assert_close("grad_rows", rows_RD.grad, expected["grad_rows"], GRAD_ROWS_TOLERANCE[dtype])
    assert_close("grad_weight", weight_EFD.grad, expected["grad_weight"], GRAD_WEIGHT_TOLERANCE[dtype])
    assert weight_EFD.grad is not None
    assert weight_EFD.grad.is_contiguous()
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            assert torch.equal(weight_EFD.grad[expert].cpu(), torch.zeros(weight_EFD.shape[1:], dtype=dtype))


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_equals_float64(implementation: str, shape: str, dtype: torch.dtype) -> None:
    check(implementation, SHAPES[shape], dtype)


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ODD_SIZES)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_odd_sizes_equal_float64(implementation: str, shape: str, dtype: torch.dtype) -> None:
    check(implementation, ODD_SIZES[shape], dtype)


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("implementation", ON_CPU)
def test_idle_experts_have_zero_gradient_three_steps_long(implementation: str) -> None:
    """A22: experts 1 and 3 of 4 get nothing, in dirty memory; the first step's memory is often clean by luck."""
    for _ in range(3):
        check(implementation, ([6, 0, 5, 0], 64, 64), torch.float32)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_takes_an_expanded_gradient_and_strided_operands(implementation: str) -> None:
    rows_DR = torch.randn(16, 6, requires_grad=True)
    weight_EDF = torch.randn(2, 16, 8, requires_grad=True)
    counts = torch.tensor([2, 4])
    grouped_gemm(rows_DR.t(), weight_EDF.transpose(1, 2), counts, implementation=implementation).sum().backward()
    expected = golden(rows_DR.detach().t(), weight_EDF.detach().transpose(1, 2), torch.ones(6, 8), counts)
    assert_close("grad_rows", rows_DR.grad, expected["grad_rows"].t(), 1e-6)
    assert_close("grad_weight", weight_EDF.grad, expected["grad_weight"].transpose(1, 2), 1e-6)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_computes_only_the_gradients_that_are_wanted(implementation: str) -> None:
    rows_RD, weight_EFD, _, counts = operands([2, 3], 16, 16, torch.float32)
    weight_EFD.requires_grad_()
    grouped_gemm(rows_RD, weight_EFD, counts, implementation=implementation).sum().backward()
    assert rows_RD.grad is None
    assert weight_EFD.grad is not None


def test_a_named_implementation_that_cannot_run_raises_with_the_reason() -> None:
    rows_RD, weight_EFD, _, counts = operands([2, 3], 17, 16, torch.float32)
    with pytest.raises(ValueError, match=r"backend\.ops\.grouped_gemm \(torch_native\).*17 .*16 bytes.*=auto"):
        grouped_gemm(rows_RD, weight_EFD, counts, implementation="torch_native")
    with pytest.raises(ValueError, match=r"it takes .*torch\.float16, not torch\.float64"):
        grouped_gemm(rows_RD.double(), weight_EFD.double(), counts, implementation="torch_native")
    with pytest.raises(ValueError, match=r"\(triton\) cannot run here: it runs on cuda, not on cpu; choose .*=auto"):
        grouped_gemm(rows_RD, weight_EFD, counts, implementation="triton")
    with pytest.raises(
        ValueError, match=r"\(cublas\) is not an implementation; choose auto, torch_native, ascend, reference, triton"
    ):
        grouped_gemm(rows_RD, weight_EFD, counts, implementation="cublas")


def test_auto_says_once_that_it_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    rows_RD, weight_EFD, _, counts = operands([2, 3], 19, 16, torch.float32)
    with caplog.at_level(logging.WARNING, logger="backends.ops.table"):
        for _ in range(3):
            grouped_gemm(rows_RD, weight_EFD, counts)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "grouped_gemm falls back to reference (torch_native: a row of 19 elements" in message


def test_auto_does_not_speak_of_what_is_meant_for_other_devices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="backends.ops.table"):
        chosen = choose("grouped_gemm", IMPLEMENTATIONS, "auto", "npu", torch.float32, GemmShape(2, 16, 16))
        assert chosen.name == "ascend"
        choose("grouped_gemm", IMPLEMENTATIONS, "auto", "npu", torch.float32, GemmShape(2, 70000, 16))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "grouped_gemm falls back to reference (ascend: a row of 70000 elements" in message


def test_reasons_are_known_without_operands() -> None:
    native = IMPLEMENTATIONS["torch_native"]
    assert native.reason_against("cpu", torch.float32, None) is None
    assert native.reason_against("cuda", torch.float32, None) == "on cuda it takes torch.bfloat16, not torch.float32"
    assert native.reason_against("npu", torch.bfloat16, None) == "it runs on cpu, cuda, not on npu"
    assert native.reason_against("cpu", torch.bfloat16, GemmShape(2, 4, 8)) is not None
    assert native.reason_against("cpu", torch.float32, GemmShape(2, 4, 8)) is None


def test_operands_that_disagree_are_refused() -> None:
    rows_RD, weight_EFD, _, counts = operands([2, 3], 16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"torch\.float32 rows and torch\.bfloat16 weights"):
        grouped_gemm(rows_RD, weight_EFD.bfloat16(), counts)
    with pytest.raises(ValueError, match=r"5 rows, but the counts sum to 4"):
        grouped_gemm(rows_RD, weight_EFD, counts - torch.tensor([0, 1]))
