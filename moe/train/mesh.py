"""Who shares what with whom: the groups of a job, built once (on the data path, after the backend).

Layout with W ranks, sequence-parallel size n and expert-parallel size P:

    sequence_rank  r mod n    which part of the positions of its rows a rank has; sequence groups are consecutive ranks
    data_rank      r div n    which rows it has
    ep_rank        r mod P    which experts it holds; expert groups are consecutive ranks, whatever their rows
    edp_rank       r div P    ranks of one ep_rank hold the same experts

Dense parameters are replicated on all W ranks, and each rank's loss is a share of one sum: so their gradients are summed
over all W, and neither n nor P divides anything.
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
    sequence_size: int
    """Sequence-parallel size n."""
    world_group: dist.ProcessGroup
    """All ranks: they hold different tokens and the same dense parameters."""
    sequence_group: dist.ProcessGroup | None
    """The n consecutive ranks that share rows; None when n is 1."""
    expert_group: dist.ProcessGroup
    """The P consecutive ranks that together hold every expert once."""
    expert_data_group: dist.ProcessGroup
    """The W / P ranks that hold the same experts."""
    topology: Topology
    """Which ranks of the expert group share a node."""
    device: torch.device

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a micro-step are split."""
        return self.world_size // self.sequence_size

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank has."""
        return self.rank // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        """Which part of the positions of its rows this rank has."""
        return self.rank % self.sequence_size

    def close(self) -> None:
        """Give back the groups that build_mesh made; the default group stays."""
        self.topology.close()
        for group in (self.expert_group, self.expert_data_group, self.sequence_group):
            if group is not None:
                dist.destroy_process_group(group)


def build_mesh(
    *, expert_size: int, device: torch.device, sequence_size: int = 1, ranks_per_node: int | None = None
) -> Mesh:
    """Make the groups on every rank (collective); the default process group must be up.

    ranks_per_node: consecutive ranks that share a node; None: all ranks do.
    Raises ValueError when a size does not divide the number of ranks, or the expert groups fit the nodes unevenly.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, size in (("parallel.expert", expert_size), ("parallel.sequence", sequence_size)):
        if size < 1 or world_size % size:
            raise ValueError(
                f"{name} ({size}) must divide the number of ranks ({world_size}); choose one of "
                f"{[p for p in range(1, world_size + 1) if world_size % p == 0]} or start another number of ranks"
            )
    expert_group = expert_data_group = sequence_group = None
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
    for start in range(0, world_size, sequence_size) if sequence_size > 1 else ():
        ranks = list(range(start, start + sequence_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            sequence_group = group
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
        sequence_size=sequence_size,
        world_group=dist.group.WORLD,
        sequence_group=sequence_group,
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
