"""What a step's exchanges cost, over all ranks (on the data path, after the step). See dispatch/traffic.py."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from dispatch.traffic import Link, TrafficRecord
from moe.model.transformer import Transformer
from moe.train.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Forward, backward and recomputed forward of all layers together."""

    bytes_across: int
    """Bytes that ranks sent to other nodes, summed over ranks."""
    bytes_node: int
    """Bytes that ranks sent to other ranks of their node, summed over ranks."""
    seconds: float
    """Time with an exchange under way, mean over ranks."""
    exposed_seconds: float
    """Time in which nothing but an exchange went on, mean over ranks."""


class Collected(NamedTuple):
    """This rank's counters."""

    dispatch: list[TrafficRecord]
    """Of each MoE layer; empty when experts are not spread over ranks."""
    sequence: list[TrafficRecord]
    """Of all attention together; empty when ranks share no rows."""


def collect_traffic(module: Transformer, mesh: Mesh) -> Collected:
    """This rank's counters, set back to nothing. The device must be idle."""
    layers = [layer.dispatcher.traffic.collect() for layer in module.moe_layers()]
    rows = [] if module.sequence is None else [module.sequence.channel.traffic.collect()]
    return Collected(dispatch=layers if mesh.expert_size > 1 else [], sequence=rows)


def reduce_traffic(records: list[TrafficRecord], mesh: Mesh) -> StepTraffic | None:
    """The step's figures over all ranks (collective). None, on all ranks, of nothing."""
    if not records:
        return None
    sums = torch.tensor(
        [
            sum(record.bytes_over(Link.across) for record in records),
            sum(record.bytes_over(Link.node) for record in records),
            sum(record.total_seconds for record in records),
            sum(record.total_exposed_seconds for record in records),
        ],
        dtype=torch.float32 if mesh.device.type == "npu" else torch.float64,
        device=mesh.device,
    )
    dist.all_reduce(sums, group=mesh.world_group)
    across, node, seconds, exposed = sums.tolist()
    return StepTraffic(
        bytes_across=int(across),
        bytes_node=int(node),
        seconds=seconds / mesh.world_size,
        exposed_seconds=exposed / mesh.world_size,
    )
