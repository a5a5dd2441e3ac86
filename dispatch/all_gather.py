"""All-gather: every token visits every rank, each rank sums what its experts say, and the sums are added at home.

Simple and even: the same rows move whatever the routing. It pays when nearly every rank is wanted by nearly every token
(few ranks, many picks); with more ranks it moves, and keeps, far more rows than `all_to_all`. Over several nodes a token
crosses to each other node once and is spread inside it.

Legend: T tokens of this rank, K picks per token, V visitors, P ranks, n nodes, R ranks per node, C chunks.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch.exchange import Channel, start_all_gather
from dispatch.hops import GatherHop, Hop, Route, renumber_tokens
from dispatch.interface import NOT_DISPATCHED
from dispatch.permute import PickOrder, sort_picks
from dispatch.traffic import forward_phase
from dispatch.visit import Surroundings


class AllGatherPlanner:
    """A VisitPlanner. Ranks with fewer tokens than the fullest send rows of zeros to fill up, which no expert sees."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def num_counts(self, num_chunks: int) -> int:
        """Tokens of each chunk."""
        return num_chunks

    def counts(self, topk_expert_ids_of_chunk: Sequence[Tensor]) -> Tensor:
        """Tokens of each chunk."""
        lengths = [ids_TK.shape[0] for ids_TK in topk_expert_ids_of_chunk]
        return torch.tensor(lengths, dtype=torch.int64, device=topk_expert_ids_of_chunk[0].device)

    def plan(
        self, topk_expert_ids_of_chunk: Sequence[Tensor], counts_of_rank: Sequence[Sequence[int]]
    ) -> list[tuple[Route, PickOrder]]:
        """Gather all ids at once; each rank finds among them the picks of its own experts."""
        around = self._around
        longest_C = [max(lengths) for lengths in zip(*counts_of_rank, strict=True)]
        padded = [
            F.pad(ids_TK.to(torch.int32), (0, 0, 0, longest - ids_TK.shape[0]), value=NOT_DISPATCHED)
            for ids_TK, longest in zip(topk_expert_ids_of_chunk, longest_C, strict=True)
        ]
        gathered_PTK = _gather_ids(torch.cat(padded), around.channel)
        plans = []
        for ids_TK, ids_PTK in zip(topk_expert_ids_of_chunk, gathered_PTK.split(longest_C, 1), strict=True):
            longest = ids_PTK.shape[1]
            order = sort_picks(
                around.table.local_experts(ids_PTK.flatten(0, 1)), len(around.placement.expert_ids_by_rank[around.rank])
            )
            hops: list[Hop] = []
            rows = ids_TK.shape[0]
            for channel in (around.cross, around.node):
                if channel is not None:
                    hops.append(GatherHop(channel=channel, num_rows=longest, own_rows=rows))
                    longest = rows = longest * channel.num_ranks
            plans.append((Route(hops=tuple(hops)), self._as_they_arrive(order, ids_PTK.shape[1])))
        return plans

    def _as_they_arrive(self, order: PickOrder, longest: int) -> PickOrder:
        """Ids lie by source rank (node, place); rows arrive by place, then node."""
        nodes, places = self._around.num_nodes, self._around.node_size
        if nodes == 1 or places == 1:
            return order
        token_of_place_V = torch.arange(nodes * places * longest, device=order.token_N.device)
        token_of_place_V = token_of_place_V.view(nodes, places, longest).transpose(0, 1).flatten()
        place_of_token_V = torch.empty_like(token_of_place_V)
        place_of_token_V[token_of_place_V] = torch.arange(place_of_token_V.numel(), device=place_of_token_V.device)
        return renumber_tokens(order, place_of_token_V, token_of_place_V)


def _gather_ids(ids_TK: Tensor, channel: Channel) -> Tensor:
    """Every rank's ids, [P, T, K] int32 by rank."""
    phase = forward_phase()
    channel.traffic.count_bytes(phase, channel.links_P, [ids_TK.nbytes] * channel.num_ranks)
    return start_all_gather(ids_TK, channel, phase).wait().view(channel.num_ranks, *ids_TK.shape)
