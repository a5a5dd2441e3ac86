"""env.json: on what a run ran (at the start of the data path, rank 0). What cannot be found out is null. Torch-free."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("switchyard-moe", "torch", "deepspeed", "hydra-core", "omegaconf", "numpy", "tokenizers", "safetensors")
"""Whose versions can change a result."""


def describe_environment(backend_name: str, devices: list[str] | None = None) -> dict[str, Any]:
    """Return the facts of env.json: versions, commit of this source tree, devices, cores, memory, Python, time.

    backend_name: cpu, cuda or npu. devices: names of the accelerators in use, as the backend tells them.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "backend": backend_name,
        "devices": devices or [],
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def write_environment(run_dir: Path, backend_name: str, devices: list[str] | None = None) -> dict[str, Any]:
    """Write env.json and return it; a run that goes on keeps what its earlier starts wrote, under `earlier`.

    Arguments as `describe_environment`.
    """
    path = run_dir / "env.json"
    current = describe_environment(backend_name, devices)
    try:
        previous = json.loads(path.read_bytes())
        current["earlier"] = [*previous.pop("earlier", []), previous]
    except (OSError, ValueError, AttributeError):
        pass  # the first start, or a file that is not ours to understand
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(current, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return current


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree that runs, with a + when files differ from it; None outside a repository."""
    source = Path(__file__).resolve().parent
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about us.
    if not _git(source, "ls-files", "--error-unmatch", Path(__file__).name):
        return None
    commit = _git(source, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git(source, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Hardware", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
