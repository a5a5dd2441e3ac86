"""What a benchmark says about the machine it ran on, and what it asks it while it runs. No host names, no paths."""

import contextlib
import os
import platform
import resource
from pathlib import Path

import torch

_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe(device: str) -> str:
    """Processor or accelerator, cores, versions."""
    facts = _cpu_facts()
    flags = [name for name in _TELLING_FLAGS if name in facts.get("flags", "").split()]
    name = facts.get("model name", platform.processor() or platform.machine())
    parts = [f"{name} ({', '.join(flags)})" if flags else name, f"{os.cpu_count()} cores", f"torch {torch.__version__}"]
    if device == "cuda":
        parts.insert(0, torch.cuda.get_device_name())
    return ", ".join(parts)


def _cpu_facts() -> dict[str, str]:
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return facts


def process_seconds() -> float:
    """Time that all threads of this process have computed, in the kernel too."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_seconds() -> float | None:
    """Time that all cores have computed for anyone; None where the system does not say. In steps of 10 ms a core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # user nice system idle iowait irq softirq steal
        counted = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(counted) - counted[3] - counted[4]) / os.sysconf("SC_CLK_TCK")
    return None
