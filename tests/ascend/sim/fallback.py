"""Operators of torch itself on the simulated device: the CPU kernel over the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.sim.memory import alias, is_npu, to_npu
from tests.ascend.sim.order import come_after_own_stream

KEPT = frozenset(f"aten::{name}" for name in (
    "_has_compatible_shallow_copy_type", "_local_scalar_dense_", "_pin_memory", "_record_stream", "_reshape_alias",
    "as_strided", "as_strided_", "contiguous", "empty.memory_format", "empty_like", "empty_strided",
    "empty_with_format", "equal_", "is_coalesced", "is_pinned", "is_set_to", "new_empty", "new_empty_strided",
    "pin_memory", "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "storage_offset", "unsafe_empty_with_format", "view",
))  # fmt: skip
"""Left to torch_npu: they allocate, describe or share memory, which the runtime does."""


def cpu_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator that depends on an npu generator's seed and offset, and moves the offset on."""
    state = generator.get_state()
    seed_and_offset = state.view(torch.int64)
    seed, offset = int(seed_and_offset[0]), int(seed_and_offset[1])
    seed_and_offset[1] += 4
    generator.set_state(state)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) & ((1 << 62) - 1))


class Call:
    """One call: its operands as CPU tensors, and the way back for what it returns."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._operands: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def lower(self, value: Any) -> Any:
        """The operand on the CPU, over the same memory."""
        if isinstance(value, Tensor):
            if value.device.type != "npu":
                return value
            self.device = self.device or value.device
            on_cpu = alias(value)
            self._operands.setdefault(_memory_of(on_cpu), []).append((on_cpu, value))
            return on_cpu
        if isinstance(value, (list, tuple)):
            return type(value)(self.lower(item) for item in value)
        if isinstance(value, torch.device) and value.type == "npu":
            self.device = self.device or _with_index(value)
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return cpu_generator(value)
        return value

    def raise_(self, result: Any) -> Any:
        """The result on the device: the operand itself, a view of one, or a copy."""
        if isinstance(result, (list, tuple)):
            return type(result)(self.raise_(item) for item in result)
        if not isinstance(result, Tensor) or result.device.type != "cpu":
            return result
        for on_cpu, operand in self._operands.get(_memory_of(result), []):
            if result is on_cpu:
                return operand
            if result.dtype == operand.dtype:
                return torch.as_strided(operand, result.shape, result.stride(), result.storage_offset())
        return to_npu(result, self.device or _with_index(torch.device("npu")))


def fallback(op: Any) -> Callable[..., Any]:
    """The kernel for the device's dispatch key that runs `op` on the CPU."""
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    out_names = [argument.name for argument in arguments if argument.is_out]
    generator_at = names.index("generator") if "generator" in names else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        come_after_own_stream()
        call = Call()
        outs = [kwargs.pop(name) for name in out_names]
        stays_on_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        lowered = [call.lower(value) for value in args]
        named = {name: call.lower(value) for name, value in kwargs.items()}
        if "device" in named and named["device"] is None:
            named["device"] = torch.device("cpu")
        if generator_at is not None and generator_at >= len(args) and named.get("generator") is None:
            device = call.device or _with_index(torch.device("npu"))
            named["generator"] = cpu_generator(torch.npu.default_generators[device.index])
        if "pin_memory" in named:
            named["pin_memory"] = False
        for name, out in zip(out_names, outs, strict=True):
            named[name] = [_empty(item) for item in out] if isinstance(out, (list, tuple)) else _empty(out)
        result = op(*lowered, **named)
        if out_names:
            written = [_write_out(out, named[name]) for name, out in zip(out_names, outs, strict=True)]
            return None if not op._schema.returns else written[0] if len(written) == 1 else tuple(written)
        return result if stays_on_cpu else call.raise_(result)

    return kernel


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("npu", torch.npu.current_device())


def _empty(out: Tensor) -> Tensor:
    return torch.empty(0, dtype=out.dtype)


def _write_out(out: Any, computed: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return [_write_out(item, value) for item, value in zip(out, computed, strict=True)]
    if out.shape != computed.shape:
        out.resize_(computed.shape)
    assert is_npu(out)
    alias(out).copy_(computed)
    return out
