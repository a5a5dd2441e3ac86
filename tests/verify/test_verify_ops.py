"""`switchyard verify ops`: what is right passes, a planted fault of any kind is found and named."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.ops.listing import OPS
from backends.ops.rms_norm import IMPLEMENTATIONS
from backends.ops.rms_norm.reference import rms_norm
from moe.verify.ops import Finding, table, to_json, verify_ops
from recipes import verify_ops as command

CPU = torch.device("cpu")


def test_every_implementation_of_this_machine_is_right() -> None:
    report = verify_ops(CPU)
    assert report.bad == [], table(report)
    ran = {(finding.op, finding.implementation) for finding in report.findings}
    assert ran == {(op, name) for op, known in OPS.items() for name, record in known.items() if "cpu" in record.devices}
    assert ("rms_norm", "ascend") in {(item.op, item.implementation) for item in report.not_run}
    # Shapes that an implementation does not take are named, not passed over.
    assert any(item.reason.startswith("odd sizes: ") for item in report.not_run)
    # The reference is held against float64 like the others, so its own ratio is 1 / factor where it rounds.
    assert any(0 < finding.error < 1e-6 for finding in report.findings if finding.implementation == "reference")


def wrong_output(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D, weight_D, eps) * (1 + 2.0**-6)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_D: Tensor) -> Tensor:
        return x_D.clone()

    @staticmethod
    def backward(ctx: Any, grad_D: Tensor) -> Tensor:
        return grad_D * 0.9


def wrong_gradient(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(_WrongGradient.apply(x_D), weight_D, eps)


def no_gradient(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D, weight_D.detach(), eps)


def low_precision(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D.bfloat16(), weight_D.bfloat16(), eps).to(x_D.dtype)


def wrong_dtype(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D.double(), weight_D.double(), eps)


def overflows(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Right, but for squares in fp16: large values only."""
    square_D = x_D.half().square().to(x_D.dtype)
    return rms_norm(x_D, weight_D, eps) + 0 * square_D


def fails(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    raise RuntimeError("the kernel does not start")


@pytest.mark.parametrize(
    ("fault", "tensor", "problem"),
    [
        (wrong_output, "y|gradient", ""),
        (wrong_gradient, "gradient of x", ""),
        (no_gradient, "gradient of weight", "gives nothing"),
        (low_precision, "y|gradient", ""),
        (wrong_dtype, "y", "gives .* torch.float64"),
        (overflows, "y", ""),
        (fails, "", "RuntimeError: the kernel does not start"),
    ],
)
def test_a_planted_fault_is_found_and_named(
    fault: Callable[..., Tensor], tensor: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "torch_native", replace(IMPLEMENTATIONS["torch_native"], function=fault))
    report = verify_ops(CPU, ops=["rms_norm"], dtypes=["fp32"])
    worst = report.bad[0]
    assert {finding.implementation for finding in report.bad} == {"torch_native"}
    assert re.match(tensor, worst.tensor)
    assert re.match(problem, worst.problem)
    if fault is overflows:
        assert {finding.case for finding in report.bad} == {"large values"}
    text = table(report)
    assert text.startswith("# WRONG")
    assert "| rms_norm | torch_native | fp32 | " in text.splitlines()[6]


def test_the_command_prints_keeps_a_card_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "cards" / "ops.md"
    asked = ["--op", "rms_norm", "--dtype", "bf16", "--device", "cpu", "--card", str(card)]
    assert command.main(asked) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# RIGHT: ")
    assert "rms_norm torch_native bf16 …" in shown.err
    assert card.read_text() == shown.out[:-1]
    found = json.loads((tmp_path / "cards" / "ops.md.json").read_text())
    assert found["right"] is True
    assert {finding["op"] for finding in found["findings"]} == {"rms_norm"}
    monkeypatch.setitem(
        IMPLEMENTATIONS, "torch_native", replace(IMPLEMENTATIONS["torch_native"], function=wrong_output)
    )
    assert command.main(asked) == 5
    assert command.main(["--op", "rms_norm", "--implementation", "ascend", "--device", "cpu"]) == 6
    assert "nothing of what was asked for can run on cpu" in capsys.readouterr().err


def test_not_a_number_is_the_worst() -> None:
    of = {"op": "a", "implementation": "b", "dtype": "fp32", "case": "c", "tensor": "y"}
    assert Finding(**of, error=float("nan"), allowed=1.0).bad
    assert Finding(**of, error=float("nan"), allowed=1.0).ratio == float("inf")
    assert not Finding(**of, error=1.0, allowed=1.0).bad
    assert Finding(**of, error=1e-9, allowed=0.0).bad


def test_the_card_for_programs_is_json_even_of_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "torch_native", replace(IMPLEMENTATIONS["torch_native"], function=fails))
    found = json.loads(to_json(verify_ops(CPU, ops=["rms_norm"], dtypes=["fp32"], implementations=["torch_native"])))
    assert found["findings"][0]["error"] is None
    assert found["findings"][0]["bad"] is True


def test_names_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no op rms; choose from expert_mlp"):
        verify_ops(CPU, ops=["rms"])
