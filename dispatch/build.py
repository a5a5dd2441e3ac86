"""Choosing a dispatcher and its limits: the explicit list of modes. Called once per model, before the token path exists."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dispatch.all_gather import AllGatherPlanner
from dispatch.all_to_all import AllToAllDispatcher
from dispatch.capacity import ExpertLimit, Limiter, RankLimit
from dispatch.config import CapacityScope, DispatchConfig, DispatchMode
from dispatch.exchange import Channel, open_channel
from dispatch.interface import NOT_DISPATCHED, TokenDispatcher
from dispatch.local import LocalDispatcher
from dispatch.overlap import Overlap, overlap_from
from dispatch.padded import PaddedDispatcher
from dispatch.placement import place_experts
from dispatch.reference import ReferenceDispatcher
from dispatch.topology import Topology, one_node
from dispatch.traffic import Traffic
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
        return ReferenceDispatcher(placed, group, layer_index=layer_index)
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
            check=config.check,
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
            check=config.check,
        )
    return AllToAllDispatcher(
        placed,
        group,
        ranks_per_node=topology.ranks_per_node,
        overlap=overlap,
        save_memory=config.save_memory,
        layer_index=layer_index,
        check=config.check,
    )


def build_padded_dispatcher(
    config: DispatchConfig,
    *,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup,
    placement: Sequence[int] | None = None,
    topology: Topology | None = None,
    traffic: Traffic | None = None,
    layer_index: int | None = None,
) -> PaddedDispatcher:
    """The dispatcher of `dispatch.pad_to_capacity`; `build_limiter` makes the limit that must go before it."""
    if config.capacity_factor is None:
        raise ValueError(
            "dispatch.pad_to_capacity (true) needs dispatch.capacity_factor, which says how many rows there are; "
            "set it to 1.25, say"
        )
    num_ranks = dist.get_world_size(group)
    traffic = Traffic() if traffic is None else traffic
    ranks_per_node = (one_node(group) if topology is None else topology).ranks_per_node
    return PaddedDispatcher(
        place_experts(num_experts, num_ranks, placement),
        expert_limit(config, num_experts=num_experts, top_k=top_k, channel=None),
        None
        if num_ranks == 1
        else open_channel(group, ranks_per_node=ranks_per_node, traffic=traffic, check=config.check),
        traffic=traffic,
        overlap_shared=config.overlap_shared,
        layer_index=layer_index,
    )


def expert_limit(config: DispatchConfig, *, num_experts: int, top_k: int, channel: Channel | None) -> ExpertLimit:
    """The capacity that the configuration gives to every expert."""
    assert config.capacity_factor is not None
    return ExpertLimit(
        num_experts=num_experts,
        top_k=top_k,
        factor=config.capacity_factor,
        min_capacity=config.min_capacity,
        static=config.pad_to_capacity,
        channel=channel,
    )


def build_limiter(
    config: DispatchConfig,
    *,
    num_experts: int,
    top_k: int,
    data_group: dist.ProcessGroup,
    expert_group: dist.ProcessGroup,
    placement: Sequence[int] | None,
    topology: Topology,
    traffic: Traffic,
    seed: int,
) -> Limiter | None:
    """What decides which picks are kept in one layer; None when all are.

    data_group: all ranks of a micro-step, in the order of their tokens. traffic: counts what is exchanged for it.
    """
    experts = rank = None

    def channel(group: dist.ProcessGroup) -> Channel | None:
        if dist.get_world_size(group) == 1:
            return None
        return open_channel(group, ranks_per_node=topology.ranks_per_node, traffic=traffic)

    if config.capacity_factor is not None:
        wide = config.capacity_scope is CapacityScope["global"]
        experts = expert_limit(
            config, num_experts=num_experts, top_k=top_k, channel=channel(data_group) if wide else None
        )
    if config.max_rows_per_rank is not None:
        placed = place_experts(num_experts, dist.get_world_size(expert_group), placement)
        rank = RankLimit(
            rank_of_expert=torch.tensor([*placed.rank_of_expert, NOT_DISPATCHED], dtype=torch.int64),
            max_rows=config.max_rows_per_rank,
            channel=channel(expert_group),
        )
    if experts is None and rank is None:
        return None
    return Limiter(policy=config.drop_policy, seed=seed, experts=experts, rank=rank)
