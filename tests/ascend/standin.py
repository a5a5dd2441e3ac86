"""npu:: operators on the CPU, without torch_npu: its recorded schemas over the simulator's reference kernels.

A call that does not fit a schema is refused by torch's dispatcher as on the device. Each result must have the shape and type
that was recorded from torch_npu for that very call; a call that was not recorded is refused.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends import npu_ops
from tests.ascend.sim import kernels

RECORD = Path(__file__).with_name("calls.json")


def describe(value: Any) -> Any:
    """An operand or result as JSON: a tensor by shape, type and whether it is contiguous, the rest as it is."""
    if isinstance(value, Tensor):
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "contiguous": value.is_contiguous(),
        }
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return value


def outline(result: Any) -> Any:
    """Shapes and types of what an operator returns."""
    described = describe(result)
    for tensor in described if isinstance(described, list) else [described]:
        if isinstance(tensor, dict):
            del tensor["contiguous"]
    return described


def key(name: str, args: Any, kwargs: Any) -> str:
    """One call as text, to find its record by."""
    return json.dumps([name, describe(args), {word: describe(value) for word, value in sorted(kwargs.items())}])


def recorded() -> dict[str, Any]:
    """The record: torch_npu's version, schemas by name, and calls with what torch_npu says of their results."""
    content: dict[str, Any] = json.loads(RECORD.read_text())
    return content


@contextmanager
def calls_go_through(gate: Callable[..., Any]) -> Iterator[None]:
    """Within the block each call of backends/npu_ops.py is gate(own, name, *args, **kwargs); own makes the call."""
    own = npu_ops._call
    npu_ops._call = functools.partial(gate, own)  # type: ignore[assignment]
    try:
        yield
    finally:
        npu_ops._call = own


@contextmanager
def operators() -> Iterator[None]:
    """The recorded operators exist for CPU tensors within the block, and calls are held to the record.

    Not in an environment with torch_npu.
    """
    record = recorded()
    results = {json.dumps(call["call"]): call["result"] for call in record["calls"]}
    library = torch.library.Library("npu", "DEF")
    for name, schema in record["schemas"].items():
        library.define(schema.removeprefix("npu::"))
        library.impl(name, kernels.NPU[f"npu::{name}"], "CPU")

    def gate(own: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        call = key(name, args, kwargs)
        assert call in results, f"not in tests/ascend/calls.json: {call}; tests/ascend/record.py adds it"
        result = own(name, *args, **kwargs)
        assert outline(result) == results[call], f"{call}: torch_npu returns {results[call]}"
        return result

    try:
        with calls_go_through(gate):
            yield
    finally:
        library._destroy()
