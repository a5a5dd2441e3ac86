"""Who shares what with whom: the groups of a job, built once (on the data path, after the backend).

Layout with W ranks and expert-parallel size P: rank r has ep_rank r mod P (expert groups are consecutive ranks) and
edp_rank r div P (ranks that hold the same experts). Dense parameters are replicated on all W ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dispatch.topology import Topology, build_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's place and its groups."""

    rank: int
    world_size: int
    expert_size: int
    """Expert-parallel size P."""
    ep_rank: int
    edp_rank: int
    data_group: dist.ProcessGroup
    """All ranks: they hold different samples and the same dense parameters."""
    expert_group: dist.ProcessGroup
    """The P consecutive ranks that together hold every expert once."""
    expert_data_group: dist.ProcessGroup
    """The W / P ranks that hold the same experts."""
    topology: Topology
    """Which ranks of the expert group share a node."""
    device: torch.device

    @property
    def data_size(self) -> int:
        """Ranks with different samples."""
        return self.world_size

    def close(self) -> None:
        """Give back the groups that build_mesh made; the default group stays."""
        self.topology.close()
        for group in (self.expert_group, self.expert_data_group):
            dist.destroy_process_group(group)


def build_mesh(*, expert_size: int, device: torch.device, ranks_per_node: int | None = None) -> Mesh:
    """Make the groups on every rank (collective); the default process group must be up.

    ranks_per_node: consecutive ranks that share a node; None: all ranks do.
    Raises ValueError when expert_size does not divide the number of ranks, or fits the nodes unevenly.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if expert_size < 1 or world_size % expert_size:
        raise ValueError(
            f"parallel.expert ({expert_size}) must divide the number of ranks ({world_size}); "
            f"choose one of {[p for p in range(1, world_size + 1) if world_size % p == 0]} or start another number of ranks"
        )
    expert_group = expert_data_group = None
    # Every rank takes part in making every group, in the same order.
    for start in range(0, world_size, expert_size):
        ranks = list(range(start, start + expert_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            expert_group = group
    for ep_rank in range(expert_size):
        ranks = list(range(ep_rank, world_size, expert_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            expert_data_group = group
    assert dist.group.WORLD is not None
    assert expert_group is not None
    assert expert_data_group is not None
    topology = build_topology(expert_group, ranks_per_node or world_size)
    return Mesh(
        rank=rank,
        world_size=world_size,
        expert_size=expert_size,
        ep_rank=rank % expert_size,
        edp_rank=rank // expert_size,
        data_group=dist.group.WORLD,
        expert_group=expert_group,
        expert_data_group=expert_data_group,
        topology=topology,
        device=device,
    )


@contextmanager
def process_group(*, collective: str, rank: int, world_size: int) -> Iterator[None]:
    """The default process group of this job, for the length of the block.

    Rendezvous is at MASTER_ADDR:MASTER_PORT; a single rank needs none. Under gloo on one machine the traffic is bound to
    the loopback interface: it is not authenticated, and a container's own host name often does not resolve.
    """
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timedelta(minutes=30)}
    if world_size == 1:
        options["store"] = torch._C._distributed_c10d.HashStore()
    local = world_size == 1 or os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
    if collective == "gloo" and local and os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(collective, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()
