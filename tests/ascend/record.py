"""Record what torch_npu says of the calls in cases.py, into calls.json: `make record-ascend`.

That is `.venv-ascend/bin/python -m tests.ascend.sim.run -m tests.ascend.record`; any Python that has torch_npu will do.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.cases import CASES
from tests.ascend.standin import RECORD, calls_go_through, key, outline


def record() -> dict[str, Any]:
    """The record as it must be now.

    The result of a call is what torch_npu's meta kernel answers, where it has one; torch_npu's own C++ code has answered
    the same, or the simulator would have stopped. Where it has none, what the C++ code answers.
    """
    calls: dict[str, Any] = {}
    schemas: dict[str, str] = {}

    def gate(own: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        result = own(name, *args, **kwargs)
        op = getattr(torch.ops.npu, name).default
        schemas[name] = str(op._schema)
        has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")
        said = outline(op(*_meta(args), **_meta(kwargs)) if has_meta else result)
        if said != outline(result):
            raise AssertionError(f"{name}: the meta kernel answers {said}, the operator {outline(result)}")
        call = key(name, args, kwargs)
        calls[call] = {"call": json.loads(call), "result": said, "meta_kernel": has_meta}
        return result

    with calls_go_through(gate):
        for case in CASES.values():
            case("npu")
    return {
        "torch_npu": importlib.metadata.version("torch_npu"),
        "schemas": dict(sorted(schemas.items())),
        "calls": [calls[call] for call in sorted(calls)],
    }


def differences(committed: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What the committed record lacks, holds in vain or says otherwise, a line each; none when it is as it must be."""
    found = []
    if committed["torch_npu"] != now["torch_npu"]:
        found.append(f"torch_npu: recorded from {committed['torch_npu']}, here is {now['torch_npu']}")
    sides = [
        {
            **{f"schema of {name}": schema for name, schema in content["schemas"].items()},
            **{
                json.dumps(call["call"]): json.dumps([call["result"], call["meta_kernel"]]) for call in content["calls"]
            },
        }
        for content in (committed, now)
    ]
    for what in sorted(sides[0].keys() | sides[1].keys()):
        before, after = (side.get(what) for side in sides)
        if before != after:
            said = "not recorded" if before is None else "recorded, not made any more" if after is None else "changed"
            found.append(f"{said}: {what}" + (f": {before} -> {after}" if before and after else ""))
    return found


def as_text(content: dict[str, Any]) -> str:
    """One line a call."""
    lines = ",\n".join(f"  {json.dumps(call)}" for call in content["calls"])
    rest = json.dumps({name: value for name, value in content.items() if name != "calls"}, indent=1)
    return f'{rest[:-2]},\n "calls": [\n{lines}\n ]\n}}\n'


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _meta(item) for name, item in value.items()}
    return type(value)(map(_meta, value)) if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    content = record()
    RECORD.write_text(as_text(content))
    print(f"{len(content['calls'])} calls of {len(content['schemas'])} operators: {RECORD}")
    sys.exit(0)
