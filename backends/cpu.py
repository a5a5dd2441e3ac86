"""The CPU as a device: the embedded default, with gloo between processes."""

import resource
import sys

import torch

from backends.device import Backend


def why_not() -> str | None:
    """Why this device cannot run here; None when it can. The CPU always can."""
    return None


def make(local_rank: int) -> Backend:
    """The record of this process's CPU; every local rank shares the one device."""
    return Backend(
        name="cpu",
        collective="gloo",
        device=torch.device("cpu"),
        deepspeed_accelerator="cpu",
        # Without AVX512_BF16 it is emulated: slow, and right.
        supports_bf16=True,
        seed=_seed,
        rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        synchronize=_synchronize,
        memory_bytes=_peak_resident_bytes,
        peak_flops=None,
    )


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _synchronize() -> None:
    """Nothing to wait for: a CPU operation is done when it returns."""


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
