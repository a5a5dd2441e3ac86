"""`switchyard doctor`: what this machine has, which backends and ops can run on it, and why the others cannot."""

import importlib.metadata
import os
import platform
import shutil
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from backends import npu_environment
from moe.launch import usable_cores

PACKAGES = (
    "torch",
    "torch_npu",
    "deepspeed",
    "hydra-core",
    "omegaconf",
    "numpy",
    "tokenizers",
    "safetensors",
    "tensorboard",
)


def examine() -> dict[str, Any]:
    """Facts about this machine as plain JSON values. Loads torch; never raises for what is missing."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "shared_memory_free_bytes": _free_bytes("/dev/shm"),
        "disk_free_bytes": _free_bytes(os.getcwd()),
        "versions": {name: _version(name) for name in PACKAGES},
        "backends": _backends(),
        "ops": _ops(),
        "ascend_environment": npu_environment.report(os.environ),
    }


def render(facts: dict[str, Any], console: Console) -> None:
    """The same for people."""
    console.print(f"Python {facts['python']} on {facts['platform']}", highlight=False)
    free = ", ".join(
        f"{_gib(facts[key])} {name}"
        for key, name in (("shared_memory_free_bytes", "in /dev/shm"), ("disk_free_bytes", "on this disk"))
        if facts[key] is not None
    )
    memory = f"{_gib(facts['memory_bytes'])} memory, {_gib(facts['memory_available_bytes'])} of it available"
    console.print(f"{facts['cores']} usable cores; {memory}; free: {free}", highlight=False)
    console.print(
        ", ".join(f"{name} {version or 'missing'}" for name, version in facts["versions"].items()), highlight=False
    )
    for title, rows in (("backend", facts["backends"]), ("op", facts["ops"])):
        table = Table(title, "runs here", "why not, or what it is")
        for row in rows:
            table.add_row(row["name"], "yes" if row["why_not"] is None else "no", row["why_not"] or row["note"])
        console.print(table)
    if npu_environment.concerns("auto"):
        table = Table("variable of a run on Ascend", "value", "from", "why")
        for row in facts["ascend_environment"]:
            table.add_row(row["name"], row["value"], row["source"], row["reason"])
        console.print(table)


def _backends() -> list[dict[str, Any]]:
    from backends.resolve import BACKENDS

    rows = []
    for name, module in BACKENDS.items():
        reason = module.why_not()
        note = "" if reason is not None else f"collectives: {module.make(0).collective}"
        rows.append({"name": name, "why_not": reason, "note": note})
    return rows


def _ops() -> list[dict[str, Any]]:
    """Each implementation of each op on the device that backend=auto takes, in the dtype in which the recipes run it."""
    import torch

    from backends.ops.listing import OPS
    from backends.resolve import BACKENDS

    device_type = next(name for name, module in BACKENDS.items() if module.why_not() is None)
    rows = []
    for op, implementations in OPS.items():
        # The router computes in fp32 whatever the model's dtype is.
        in_bf16 = any(torch.bfloat16 in record.dtypes for record in implementations.values())
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        for name, record in implementations.items():
            note = f"on {device_type}, {'bf16' if in_bf16 else 'fp32'}; cost: {record.cost}"
            why_not = record.reason_against(device_type, dtype, None)
            rows.append({"name": f"{op}={name}", "why_not": why_not, "note": note})
    return rows


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_bytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
