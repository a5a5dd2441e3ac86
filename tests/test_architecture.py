"""The house keeps its walls: own packages, empty package files, one importer per vendor, nothing at import."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moe", "dispatch", "backends", "recipes")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dynamic(path: Path) -> set[str]:
    """Module names given to importlib.import_module as text."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "import_module"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_ours(package: str) -> None:
    """Short top-level names could be somebody else's: each must lie in this repository."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"


def test_packages_are_listed_by_hand() -> None:
    """Every folder with an __init__.py is in pyproject.toml, and nothing else."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py"}
    assert set(listed) == there
    assert len(listed) == len(set(listed))


def test_package_files_are_empty_except_of_ops() -> None:
    """No registration by import: only an op's __init__ has content (its signature and table)."""
    full = {
        path.parent.relative_to(ROOT).as_posix()
        for path in SOURCES
        if path.name == "__init__.py" and path.read_text().strip()
    }
    assert all(name.startswith("backends/ops/") for name in full), full


VENDORS = {
    "deepspeed": {"moe/train/engine_deepspeed.py"},
    "hydra": {"moe/config.py"},
    "omegaconf": {"moe/config.py"},
    "torch_npu": {"backends/npu.py"},
}
TRITON = "triton_kernels.py"
"""Kernels stand in files of this name under backends/ops/, which only a function that launches or compiles them imports."""


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_vendor_has_one_importer(vendor: str) -> None:
    """Also when imported lazily or by name."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name.split(".")[0] == vendor for name in imported(path) | dynamic(path))
    }
    assert importers <= VENDORS[vendor]


def test_triton_is_imported_by_kernels_alone() -> None:
    """By others inside functions, where a missing triton is a reason and not an error."""
    at_the_top = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.split(".")[0] == "triton" or name.endswith(".triton_kernels")
    }
    assert at_the_top
    assert all(name.startswith("backends/ops/") and name.endswith(TRITON) for name in at_the_top)


ALLOWED_COLLECTIVES = ("dispatch/", "moe/train/", "moe/verify/", "backends/device.py")


def test_collectives_are_called_where_they_may() -> None:
    """torch.distributed belongs to dispatch, training, verification and the backend record."""
    callers = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name.startswith("torch.distributed") for name in imported(path))
    ]
    assert [name for name in callers if not name.startswith(ALLOWED_COLLECTIVES)] == []


def test_device_modules_are_named_in_backends_alone() -> None:
    """`torch.cuda` and `torch.npu` as attributes: only backends may."""
    offenders = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("cuda", "npu")
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
                and path.relative_to(ROOT).parts[0] != "backends"
            ):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


def test_configuration_is_torch_free() -> None:
    """A wrong recipe is refused without waiting for torch: loading one imports neither torch nor deepspeed."""
    code = (
        "import sys, moe.config; moe.config.load_config([], 'quickstart'); "
        "heavy = {'torch', 'deepspeed', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_everything_starts_nothing() -> None:
    """No package does work at import: no thread, no process group, no file, no output."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.name not in ("__init__.py", TRITON) and path.relative_to(ROOT).as_posix() not in VENDORS["deepspeed"]
    ]
    code = (
        "import importlib, sys, threading\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not {'deepspeed', 'triton'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without history: what is tracked cannot be told")
def test_nothing_of_one_machine_is_tracked() -> None:
    """A link points into somebody's machine, and what is ignored is made there (a tracked .kernels link broke installs)."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    assert [line for line in git("ls-files", "--stage") if line.startswith("120000")] == []
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []
