"""Agreements between ranks before training: who prepares, which folder (on the data path, before the model)."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from moe.errors import EnvironmentProblem

Result = TypeVar("Result")


def agree_on_text(text: str | None) -> str:
    """The text of rank 0 on every rank (collective)."""
    box = [text]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None, "rank 0 gives the text"
    return box[0]


def require_equal(value: object, *, what: str, way_out: str) -> None:
    """Compare a JSON-like value of every rank with rank 0's (collective).

    Raises EnvironmentProblem on every rank, naming the first rank that differs.
    """
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, found in enumerate(values):
        if found != values[0]:
            raise EnvironmentProblem(f"{what} of rank {rank} is {found}, that of rank 0 is {values[0]}; {way_out}")


def once_per_machine(local_rank: int, first: Callable[[], Result], others: Callable[[], Result]) -> Result:
    """Run `first` on local rank 0 of each machine, then `others` on the rest (collective)."""
    if local_rank == 0:
        result = first()
        dist.barrier()
        return result
    dist.barrier()
    return others()
