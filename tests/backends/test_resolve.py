"""Choosing a device: what runs here, and what is said when it does not."""

import importlib.util
import logging
import sys
import types

import pytest
import torch

from backends import cpu, cuda, npu
from backends.resolve import resolve_backend
from moe.errors import EnvironmentProblem


def test_cpu_is_always_there() -> None:
    backend = resolve_backend("cpu", 3)
    assert (backend.name, backend.collective, backend.device) == ("cpu", "gloo", torch.device("cpu"))
    assert backend.deepspeed_accelerator == "cpu"
    assert backend.peak_flops is None
    backend.synchronize()


def test_the_generator_is_seeded_saved_and_put_back() -> None:
    backend = cpu.make(0)
    before = backend.rng_state()
    backend.seed(5)
    state = backend.rng_state()
    first = torch.rand(3)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    backend.seed(5)
    assert torch.equal(torch.rand(3), first)
    backend.set_rng_state(before)


def test_memory_is_counted_in_bytes() -> None:
    """Peak resident memory: 64 MiB written now are in it, whatever the peak before."""
    block = torch.ones(1 << 24)
    assert cpu.make(0).memory_bytes() > block.nbytes
    assert cpu.make(0).memory_bytes() < 1 << 40


def test_auto_takes_what_is_there_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    expected = next(module for module in (cuda, npu, cpu) if module.why_not() is None)
    with caplog.at_level(logging.INFO, logger="backends.resolve"):
        backend = resolve_backend("auto", 0)
    assert backend.name == expected.__name__.removeprefix("backends.")
    assert f"backend=auto takes {backend.name}" in caplog.text


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend \(tpu\) is not a device kind; choose auto, cpu, cuda, npu"):
        resolve_backend("tpu", 0)


@pytest.mark.skipif(cuda.why_not() is None, reason="this machine has a CUDA device")
def test_a_missing_gpu_is_named_with_a_way_out() -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"backend \(cuda\) cannot run here: torch .*; choose backend=auto or backend=cpu"
    ):
        resolve_backend("cuda", 0)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_missing_torch_npu_is_named_with_a_way_out() -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"backend \(npu\) cannot run here: the package torch_npu is not installed; choose"
    ):
        resolve_backend("npu", 0)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_torch_npu_that_sees_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.util.spec_from_loader("torch_npu", loader=None)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    # As an installed wheel whose native library does not load: the attribute is missing.
    assert (npu.why_not() or "").startswith("torch_npu does not load: AttributeError")
    module.npu = types.SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    assert (npu.why_not() or "").startswith("torch_npu sees no NPU")


@pytest.mark.skipif(cuda.why_not() is not None, reason=f"no CUDA device: {cuda.why_not()}")
def test_a_gpu_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local rank 99 has no GPU of its own"):
        resolve_backend("cuda", 99)
