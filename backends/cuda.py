"""NVIDIA GPUs: the only file that calls torch.cuda."""

import torch

from backends.device import Backend

_PEAK_BF16_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362.05e12),
    ("L4", 121e12),
)
"""Part of the device's name -> dense bf16 FLOP/s, first match. Source: NVIDIA's data sheets, without sparsity."""


def why_not() -> str | None:
    """Why this device cannot run here; None when it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (driver missing, or CUDA_VISIBLE_DEVICES is empty)"
    return None


def make(local_rank: int) -> Backend:
    """The record of GPU number local_rank, which becomes the current device.

    Raises ValueError when this machine shows fewer GPUs.
    """
    count = torch.cuda.device_count()
    if not 0 <= local_rank < count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: {count} visible here; start at most {count} processes on "
            "this machine (parallel.nproc), or show more devices in CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)

    def seed(value: int) -> None:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)

    def rng_state() -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def synchronize() -> None:
        torch.cuda.synchronize(device)

    def peak_allocated_bytes() -> int:
        return torch.cuda.max_memory_allocated(device)

    return Backend(
        name="cuda",
        collective="nccl",
        device=device,
        deepspeed_accelerator="cuda",
        supports_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        seed=seed,
        rng_state=rng_state,
        set_rng_state=set_rng_state,
        synchronize=synchronize,
        memory_bytes=peak_allocated_bytes,
        peak_flops=next((flops for part, flops in _PEAK_BF16_FLOPS if part in name), None),
    )
