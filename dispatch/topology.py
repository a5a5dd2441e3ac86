"""Which ranks of an expert group share a node, and the groups that a hop inside or across nodes needs.

Ranks of a node are consecutive, and so are those of an expert group, so an expert group is a grid: rank a · R + l of it
is place l on node a, with R ranks per node. Built once per job (process groups are made by all ranks together).
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """This rank's expert group as a grid of nodes and places."""

    ranks_per_node: int
    """Consecutive ranks of the whole job that share a node."""
    num_nodes: int
    """Nodes n of the expert group."""
    node_size: int
    """Ranks R of the expert group on each node; num_nodes · node_size ranks in all."""
    node_group: dist.ProcessGroup | None
    """The R ranks on this node, by place; None when this rank is alone there."""
    cross_group: dist.ProcessGroup | None
    """The n ranks at this rank's place, by node; None with one node."""
    made_groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups that exist for this topology alone."""

    def close(self) -> None:
        """Give back the groups that were made for it."""
        for group in self.made_groups:
            dist.destroy_process_group(group)


def one_node(group: dist.ProcessGroup) -> Topology:
    """All ranks of the group on one node; makes no group."""
    size = dist.get_world_size(group)
    return Topology(
        ranks_per_node=dist.get_world_size(),
        num_nodes=1,
        node_size=size,
        node_group=group if size > 1 else None,
        cross_group=None,
    )


def grid_shape(expert_size: int, ranks_per_node: int) -> tuple[int, int]:
    """(nodes, ranks per node) of an expert group of consecutive ranks.

    Raises ValueError when the groups would lie across nodes unevenly.
    """
    if ranks_per_node < 1 or (expert_size % ranks_per_node and ranks_per_node % expert_size):
        raise ValueError(
            f"parallel.ranks_per_node ({ranks_per_node}) must divide parallel.expert ({expert_size}) or be a multiple of "
            "it, so that every expert group covers whole nodes or lies inside one; choose another parallel.expert"
        )
    node_size = min(expert_size, ranks_per_node)
    return expert_size // node_size, node_size


def build_topology(expert_group: dist.ProcessGroup, ranks_per_node: int) -> Topology:
    """The topology of this rank's expert group; collective over the whole job, whose ranks form such groups in order.

    Groups are made only when the expert group covers several nodes with several ranks each.
    Raises as `grid_shape`.
    """
    expert_size, own = dist.get_world_size(expert_group), dist.get_rank()
    num_nodes, node_size = grid_shape(expert_size, ranks_per_node)
    if num_nodes == 1 or node_size == 1:
        return Topology(
            ranks_per_node=ranks_per_node,
            num_nodes=num_nodes,
            node_size=node_size,
            node_group=expert_group if node_size > 1 else None,
            cross_group=expert_group if num_nodes > 1 else None,
        )
    node_group = cross_group = None
    # Every rank takes part in making every group, in the same order.
    for first in range(0, dist.get_world_size(), expert_size):
        for node in range(num_nodes):
            ranks = [first + node * node_size + place for place in range(node_size)]
            group = dist.new_group(ranks)
            node_group = group if own in ranks else node_group
        for place in range(node_size):
            ranks = [first + node * node_size + place for node in range(num_nodes)]
            group = dist.new_group(ranks)
            cross_group = group if own in ranks else cross_group
    assert node_group is not None
    assert cross_group is not None
    return Topology(
        ranks_per_node=ranks_per_node,
        num_nodes=num_nodes,
        node_size=node_size,
        node_group=node_group,
        cross_group=cross_group,
        made_groups=(node_group, cross_group),
    )
