"""The weights that a forward pass uses, whatever engine holds them."""

import contextlib
from typing import Any

from torch import Tensor


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Each weight by name, a copy; gathered where ZeRO-3 keeps pieces (collective)."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        gathered: contextlib.AbstractContextManager = contextlib.nullcontext()
        if hasattr(parameter, "ds_id"):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([parameter])
        with gathered:
            weights[name] = parameter.detach().clone()
    return weights
