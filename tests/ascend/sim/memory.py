"""The simulator's device memory is the host's: a CPU tensor over an npu tensor's memory, and back."""

import ctypes

import torch
from torch import Tensor


def is_npu(value: object) -> bool:
    """Whether this is a tensor on the simulated device."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def to_npu(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the simulated device, with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(copy).copy_(tensor)
    return copy
