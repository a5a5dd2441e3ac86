"""When an operator may run: after what its own stream was given before it. Only lazy collectives leave work on a stream."""

import collections
import functools
import os

import torch

CALLS: collections.Counter[str] = collections.Counter()
"""How often each npu:: kernel ran in this process."""


def come_after_own_stream() -> None:
    """Do the work that the current stream still holds."""
    if _lazy():
        torch.npu.current_stream().synchronize()


@functools.cache
def _lazy() -> bool:
    return os.environ.get("SIM_LAZY_COLLECTIVES", "0") not in ("", "0")
