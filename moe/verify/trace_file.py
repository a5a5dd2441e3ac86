"""Traces on disk: tensors as safetensors, numbers as JSON, so that another process or machine can compare. No pickle."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe.verify.layout import StepTrace, Trace


def save_trace(trace: Trace, path: Path) -> None:
    """Write one file that `load_trace` reads."""
    tensors: dict[str, Tensor] = {f"weights/{name}": value for name, value in trace.weights.items()}
    numbers: list[dict[str, Any]] = []
    for index, step in enumerate(trace.steps):
        row: dict[str, Any] = {}
        for field in fields(StepTrace):
            value = getattr(step, field.name)
            if isinstance(value, Tensor):
                tensors[f"{index}/{field.name}"] = value
            elif field.name == "gradients":
                tensors |= {f"{index}/gradients/{name}": tensor for name, tensor in value.items()}
            else:
                row[field.name] = value
        numbers.append(row)
    header = {"layout": trace.layout, "steps": json.dumps(numbers)}
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path, metadata=header)


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` wrote."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    steps = []
    for index, row in enumerate(json.loads(header["steps"])):
        own = {
            field.name: tensors[f"{index}/{field.name}"]
            for field in fields(StepTrace)
            if f"{index}/{field.name}" in tensors
        }
        prefix = f"{index}/gradients/"
        gradients = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        steps.append(StepTrace(**own, **row, gradients=gradients))
    weights = {name.removeprefix("weights/"): value for name, value in tensors.items() if name.startswith("weights/")}
    return Trace(layout=header["layout"], steps=steps, weights=weights)
