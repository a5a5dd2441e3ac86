"""Give the simulated device its kernels: called once per process, right after torch_npu has been imported.

On torch's key of the device (PrivateUse1) every operator that torch_npu registered is registered anew:

- those of torch itself: the CPU's kernel (fallback.py);
- the npu:: operators of kernels.py: first torch_npu's own C++ code runs against do-nothing kernels, so that its checks and
  its output shapes and types are real, then the reference computes, and the two must agree in shape and type;
- every other npu:: operator: an error that says that there is no reference here.

Autograd formulas, autocast, allocator, streams, events, generators and ProcessGroupHCCL stay torch_npu's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.sim import fallback, kernels
from tests.ascend.sim.memory import is_npu, to_npu
from tests.ascend.sim.order import CALLS, come_after_own_stream


@functools.cache
def install() -> tuple[torch.library.Library, ...]:
    """Register; returns the registrations, which hold as long as they are referred to."""
    libraries = {name: torch.library.Library(name, "IMPL", "PrivateUse1") for name in ("aten", "npu")}
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, short = schema.name.partition("::")
        if namespace not in libraries:
            continue
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if schema.name in kernels.KEPT or name in fallback.KEPT or not _registered(name, "PrivateUse1"):
            continue
        op = getattr(getattr(getattr(torch.ops, namespace), short), schema.overload_name or "default")
        libraries[namespace].impl(name.partition("::")[2], _kernel(name, op))
        # At this key torch_npu calls its kernel directly, around PrivateUse1: take torch's own composite instead.
        composite = _registered(name, "AutogradPrivateUse1") and _registered(name, "CompositeImplicitAutograd")
        if namespace == "aten" and composite and name not in kernels.ATEN and schema.name != "aten::matmul":
            autograd.impl(name.partition("::")[2], functools.partial(_decompose, op))
    return (*libraries.values(), autograd)


def _registered(name: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # a schema that only the TorchScript registry knows
        return False


def _kernel(name: str, op: Any) -> Callable[..., Any]:
    if name in kernels.ATEN:
        return _reference(name, kernels.ATEN[name], None)
    if name.startswith("aten::"):
        return fallback.fallback(op)
    if name in kernels.NPU:
        own = torch.library.get_kernel(name, "PrivateUse1")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
        return _reference(name, kernels.NPU[name], functools.partial(own.call_boxed, keys))
    return functools.partial(_refuse, name)


def _decompose(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op.decompose(*args, **kwargs)


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"the simulated NPU has no reference for {name}")


def _reference(name: str, function: Callable[..., Any], own: Callable[..., Any] | None) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        come_after_own_stream()
        CALLS[name] += 1
        promised = own(*args, **kwargs) if own else None
        call = fallback.Call()
        result = function(*(call.lower(value) for value in args), **{k: call.lower(v) for k, v in kwargs.items()})
        assert call.device is not None
        raised = _to_npu(result, call.device)
        if own and _outlines(promised) != _outlines(raised):
            raise AssertionError(f"{name}: torch_npu returns {_outlines(promised)}, the reference {_outlines(raised)}")
        return raised

    return kernel


def _to_npu(result: Any, device: torch.device) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_to_npu(item, device) for item in result)
    return to_npu(result.contiguous(), device) if isinstance(result, Tensor) else result


def _outlines(result: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    items = result if isinstance(result, (list, tuple)) else [result]
    return [(tuple(item.shape), item.dtype) for item in items if is_npu(item)]
