"""Python runs this when it starts, since the folder stands on PYTHONPATH: torch_npu gets the simulator's kernels.

So every process that a test starts, through however many others, has the simulated device, and the programs under test
know nothing of it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _Loader(importlib.abc.Loader):
    """Runs the package, then gives the device its kernels."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        from tests.ascend.sim.install import install

        install()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch_npu as usual and takes its loader's place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
