"""Run a Python command on the simulated NPU, in this interpreter's environment.

    python -m tests.ascend.sim.run [-m pytest …]

Builds the libraries first when they, the sources or the wheel have changed. Ends with an error when torch_npu is not
installed or does not see the simulated devices: a run that tests nothing must not look like one that passes.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.ascend.sim.generate import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NUM_DEVICES = 4


def environment(libraries: Path) -> dict[str, str]:
    """Variables of a process that is to have the simulated devices."""
    former = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "ASCEND_HOME_PATH": str(libraries),
        "ASCEND_OPP_PATH": str(libraries),
        "SIM_NPU_COUNT": str(NUM_DEVICES),
        "SWITCHYARD_SIMULATED_NPU": "1",
        # Launches by the second thread of the two-stage queue would come back into Python without its lock.
        "TASK_QUEUE_ENABLE": "0",
        # Mapping of physical memory is not modelled.
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "PYTHONPATH": os.pathsep.join([str(HERE / "startup"), str(ROOT), *([former] if former else [])]),
    }


def libraries() -> Path:
    """The libraries of this environment, wheel and source; builds them where they are not there yet.

    A folder per source: several checkouts may share an environment, and build at the same time.
    """
    digest = hashlib.sha256(importlib.metadata.version("torch_npu").encode())
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "generate.py"]):
        digest.update(path.read_bytes())
    folder = Path(sys.prefix) / "simulated-cann" / digest.hexdigest()[:16]
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as unfinished:
            built = Path(unfinished) / "built"
            print(f"simulated CANN: {build(Path(sysconfig.get_path('purelib')), built)}", flush=True)
            # Another process may have been faster with the same source.
            with contextlib.suppress(OSError):
                built.rename(folder)
    return folder


def main(command: Sequence[str]) -> int:
    """Build, look whether the devices are there, run; returns the command's exit code."""
    try:
        environ = environment(libraries())
    except importlib.metadata.PackageNotFoundError:
        print("torch_npu is not installed in this environment; make test-ascend makes one that has it", file=sys.stderr)
        return 6
    probe = f"import torch; assert torch.npu.device_count() == {NUM_DEVICES}, torch.npu.device_count()"
    if subprocess.run([sys.executable, "-c", probe], env=environ, check=False).returncode:
        print("torch_npu does not run on the simulated CANN; its message stands above", file=sys.stderr)
        return 6
    if not command:
        return 0
    return subprocess.run([sys.executable, *command], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
