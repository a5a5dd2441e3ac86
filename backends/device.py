"""The Backend record: what differs between CUDA, Ascend NPU and CPU. Resolved once per process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One kind of device. Only what the project calls is named here."""

    name: str
    """cpu, cuda or npu."""
    collective: str
    """Backend name for torch.distributed: gloo, nccl or hccl."""
    device: torch.device
    """This rank's device."""
    deepspeed_accelerator: str
    """Value of DS_ACCELERATOR."""
    supports_bf16: bool
    """Whether bf16 matrix products run natively or acceptably."""
    seed: Callable[[int], None]
    """Seed this device's default generator."""
    rng_state: Callable[[], torch.Tensor]
    """State of this device's default generator, uint8."""
    set_rng_state: Callable[[torch.Tensor], None]
    """Put such a state back."""
    synchronize: Callable[[], None]
    """Wait until the device has done all work given to it."""
    memory_bytes: Callable[[], int]
    """Peak bytes this process has used on the device (resident memory on CPU)."""
    peak_flops: float | None
    """Published dense bf16 peak of the device, FLOP/s; None where there is no honest figure (CPU)."""
