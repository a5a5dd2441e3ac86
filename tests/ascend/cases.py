"""The calls that are recorded: each Ascend implementation on a few shapes, with its gradients, against float64.

The simulated NPU runs them over torch_npu, the ordinary tests over the record.
"""

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from backends.ops.listing import OPS
from backends.ops.table import Implementation
from tests.backends import test_expert_mlp, test_grouped_gemm, test_rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_gemm(device: str) -> None:
    for dtype in DTYPES:
        for shape in ("odd_counts", "all_to_one", "no_rows"):
            test_grouped_gemm.check("ascend", test_grouped_gemm.SHAPES[shape], dtype, device)


def expert_mlp(device: str) -> None:
    for dtype in DTYPES:
        for shape in ("odd_counts", "empty_first_and_last", "no_rows"):
            test_expert_mlp.check("ascend", shape, dtype, device)


def rms_norm(device: str) -> None:
    for dtype in DTYPES:
        for shape in test_rms_norm.SHAPES:
            test_rms_norm.check("ascend", shape, dtype, device)


CASES: dict[str, Callable[[str], None]] = {"grouped_gemm": grouped_gemm, "expert_mlp": expert_mlp, "rms_norm": rms_norm}
"""By op; each takes the device."""


@contextmanager
def allowed_on_cpu() -> Iterator[None]:
    """Within the block the Ascend implementations may be chosen for CPU tensors."""
    tables: list[MutableMapping[str, Implementation[Any, Any]]] = [table for table in OPS.values() if "ascend" in table]
    former = [table["ascend"] for table in tables]
    for table in tables:
        table["ascend"] = dataclasses.replace(table["ascend"], devices=("cpu", "npu"))
    try:
        yield
    finally:
        for table, record in zip(tables, former, strict=True):
            table["ascend"] = record
