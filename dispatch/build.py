"""Choosing a dispatcher: the explicit list of modes. Called once per model, before the token path exists."""

from collections.abc import Sequence

import torch.distributed as dist

from dispatch.all_gather import AllGatherPlanner
from dispatch.all_to_all import AllToAllDispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import TokenDispatcher
from dispatch.local import LocalDispatcher
from dispatch.overlap import Overlap, overlap_from
from dispatch.placement import place_experts
from dispatch.reference import ReferenceDispatcher
from dispatch.topology import Topology, one_node
from dispatch.two_hop import TwoHopPlanner
from dispatch.visit import VisitDispatcher


def build_dispatcher(
    config: DispatchConfig,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None,
    placement: Sequence[int] | None = None,
    topology: Topology | None = None,
    overlap: Overlap | None = None,
    layer_index: int | None = None,
) -> TokenDispatcher:
    """Build the dispatcher of one expert group.

    num_experts: experts in all. group: the ranks that together hold every expert once; None or one rank: nothing to
    exchange, so every mode but `reference` is then `local`. placement: rank of each expert; None: contiguous, as even as
    can be. topology: which ranks of the group share a node; None: all. layer_index: named in errors.

    Raises ValueError when there are more ranks than experts, or the mode cannot work on this group.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    placed = place_experts(num_experts, num_ranks, placement)
    if config.mode is DispatchMode.reference:
        return ReferenceDispatcher(placed, group)
    if num_ranks == 1 or group is None:
        return LocalDispatcher(num_experts, save_memory=config.save_memory)
    if config.mode is DispatchMode.local:
        raise ValueError(
            f"dispatch.mode (local) needs every expert on one rank, but the expert group has {num_ranks} ranks; "
            "choose dispatch.mode=auto or parallel.expert=1"
        )
    if topology is None:
        topology = one_node(group)
    if overlap is None:
        overlap = overlap_from(config)
    if config.mode is DispatchMode.all_gather:
        return VisitDispatcher(
            placed,
            group,
            topology,
            AllGatherPlanner,
            overlap=overlap,
            layer_index=layer_index,
            save_memory=config.save_memory,
        )
    if config.mode is DispatchMode.two_hop:
        return VisitDispatcher(
            placed,
            group,
            topology,
            TwoHopPlanner,
            overlap=overlap,
            layer_index=layer_index,
            save_memory=config.save_memory,
        )
    return AllToAllDispatcher(
        placed, group, ranks_per_node=topology.ranks_per_node, overlap=overlap, save_memory=config.save_memory
    )
