"""What DeepSpeed wants to know of the ranks before it is built (on the data path, before the engine)."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from moe.train.mesh import Mesh


def elements_of_ranks(parameters: Iterable[nn.Parameter], mesh: Mesh) -> tuple[int, bool]:
    """Elements on the rank that holds most, and whether all ranks hold as many (collective)."""
    own = sum(p.numel() for p in parameters)
    bounds = torch.tensor([own, -own], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.world_group)
    most, least = int(bounds[0]), -int(bounds[1])
    return most, most == least


@contextmanager
def local_rank_set(mesh: Mesh) -> Iterator[None]:
    """LOCAL_RANK, which DeepSpeed demands at construction even where no launcher has set it."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(mesh.device.index or 0)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
