"""Huawei Ascend NPUs: the only file that imports torch_npu, and only when asked."""

import importlib
import importlib.util
from typing import Any

import torch

from backends.device import Backend


def why_not() -> str | None:
    """Why this device cannot run here; None when it can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "the package torch_npu is not installed"
    try:
        npu = _npu()
    # A wheel without its CANN libraries fails with OSError; other torch versions with anything.
    except Exception as error:
        return f"torch_npu does not load: {type(error).__name__}: {error}"
    if not npu.is_available():
        return "torch_npu sees no NPU (driver missing, or ASCEND_RT_VISIBLE_DEVICES is empty)"
    return None


def make(local_rank: int) -> Backend:
    """The record of NPU number local_rank, which becomes the current device.

    Raises ValueError when this machine shows fewer NPUs.
    """
    npu = _npu()
    count = npu.device_count()
    if not 0 <= local_rank < count:
        raise ValueError(
            f"local rank {local_rank} has no NPU of its own: {count} visible here; start at most {count} processes on "
            "this machine (parallel.nproc), or show more devices in ASCEND_RT_VISIBLE_DEVICES"
        )
    device = torch.device("npu", local_rank)
    npu.set_device(device)

    def seed(value: int) -> None:
        npu.manual_seed(value)

    def rng_state() -> torch.Tensor:
        state: torch.Tensor = npu.get_rng_state(device)
        return state

    def set_rng_state(state: torch.Tensor) -> None:
        npu.set_rng_state(state, device)

    def synchronize() -> None:
        npu.synchronize(device)

    def peak_allocated_bytes() -> int:
        return int(npu.max_memory_allocated(device))

    return Backend(
        name="npu",
        collective="hccl",
        device=device,
        deepspeed_accelerator="npu",
        supports_bf16=bool(npu.is_bf16_supported()),
        seed=seed,
        rng_state=rng_state,
        set_rng_state=set_rng_state,
        synchronize=synchronize,
        memory_bytes=peak_allocated_bytes,
        # Published figures differ by source and by variant of a device.
        peak_flops=None,
    )


def _npu() -> Any:
    """The module torch_npu.npu. Importing torch_npu registers the device type `npu` with torch."""
    return importlib.import_module("torch_npu").npu
