"""Triton kernels without a GPU: numerics in Triton's interpreter, registers and shared memory from compilation."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.ops.grouped_gemm import triton_gpu
from backends.ops.grouped_gemm.shape import GemmShape
from backends.ops.kernels import ARCHITECTURES, SHARED_LIMIT
from tests.backends.on_gpu import TOLERANCE, failures

ROOT = Path(__file__).parents[2]
AGREED = Path(__file__).with_name("kernels.json")
LOCAL = ROOT / ".kernels"
HAS_TRITON = importlib.util.find_spec("triton") is not None or (LOCAL / "triton").is_dir()
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="triton is not installed: `make kernels` puts it into .kernels"
)


def _program(module: str, *arguments: str, cache: Path, **settings: str) -> str:
    path = os.pathsep.join([str(ROOT), str(LOCAL), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), **settings}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_kernels_equal_float64_in_the_interpreter(tmp_path: Path) -> None:
    rows = json.loads(_program("tests.backends.kernel_cases", "cpu", cache=tmp_path, TRITON_INTERPRET="1"))
    assert len(rows) == 15
    assert failures(rows) == []


def test_an_error_past_the_tolerance_is_named() -> None:
    rows = [{"shape": [[3], 4, 5], "dtype": "torch.float32", "errors": {"output": 2e-6, "grad_rows": float("nan")}}]
    assert [line.split(":")[0] for line in failures(rows)] == ["output", "grad_rows"]
    assert TOLERANCE["torch.float32"] < 2e-6


@needs_triton
def test_registers_and_shared_memory_are_those_last_agreed(tmp_path: Path) -> None:
    """After a change that is meant: `make kernels`, then read the difference of kernels.json."""
    _program("backends.ops.kernels", str(tmp_path / "now.json"), cache=tmp_path, TRITON_DEFAULT_FP_FUSION="1")
    now, agreed = json.loads((tmp_path / "now.json").read_text()), json.loads(AGREED.read_text())
    if now["triton"] != agreed["triton"]:
        pytest.skip(f"the table is of triton {agreed['triton']}, installed is {now['triton']}")
    assert now == agreed


def test_no_agreed_kernel_spills_or_asks_for_more_shared_memory_than_there_is() -> None:
    kernels = json.loads(AGREED.read_text())["kernels"]
    assert {name.split()[-1] for name in kernels} == {f"sm_{architecture}" for architecture in ARCHITECTURES}
    for name, usage in kernels.items():
        assert usage["stack"] == 0, name
        assert usage["shared"] <= SHARED_LIMIT[int(name.split("sm_")[1])], name


def test_reasons_against_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in str(triton_gpu.why_not("cuda", torch.bfloat16, None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert triton_gpu.why_not("cuda", torch.bfloat16, None) is None
    assert "32-bit indices" in str(triton_gpu.why_not("cuda", torch.bfloat16, GemmShape(1, 65536, 32768)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: `make gpu` runs the kernels on it")
def test_make_gpu_stops_with_a_sentence_where_no_gpu_is() -> None:
    command = [sys.executable, "-m", "tests.backends.on_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "no GPU is here" in done.stderr
