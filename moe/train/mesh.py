"""Who shares what with whom: the groups of a job, built once (on the data path, after the backend).

Layout with W ranks and expert-parallel size P: rank r has ep_rank r mod P (expert groups are consecutive ranks) and
edp_rank r div P (ranks that hold the same experts). Dense parameters are replicated on all W ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
    device: torch.device

    @property
    def data_size(self) -> int:
        """Ranks with different samples."""
        return self.world_size


def build_mesh(*, expert_size: int, device: torch.device) -> Mesh:
    """Make the groups on every rank (collective); the default process group must be up.

    Raises ValueError when expert_size does not divide the number of ranks.
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
    assert dist.group.WORLD is not None and expert_group is not None and expert_data_group is not None
    return Mesh(
        rank=rank,
        world_size=world_size,
        expert_size=expert_size,
        ep_rank=rank % expert_size,
        edp_rank=rank // expert_size,
        data_group=dist.group.WORLD,
        expert_group=expert_group,
        expert_data_group=expert_data_group,
        device=device,
    )
