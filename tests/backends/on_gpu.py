"""`make gpu`: the Triton kernels on the GPU of this machine, against float64. Status 3 where no GPU is, 1 on failure."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

TOLERANCE = {"torch.float32": 1e-6, "torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
"""Of the largest element: half an ulp of the one rounding, as for the other implementations."""


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per result whose error is past its tolerance, or not a number."""
    return [
        f"{name}: error {error:.2e} is past {TOLERANCE[row['dtype']]:.2e} for {row['dtype']} {row['shape']}"
        for row in rows
        for name, error in row["errors"].items()
        if not error <= TOLERANCE[row["dtype"]]
    ]


def main() -> int:
    """The exit status."""
    if not torch.cuda.is_available():
        print("no GPU is here, or this torch is no CUDA build: run `make gpu` on a GPU machine", file=sys.stderr)
        return 3
    from tests.backends.kernel_cases import main as cases

    rows = cases("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(rows)} cases")
    for line in (failed := failures(rows)):
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
