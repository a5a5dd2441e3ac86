"""Two hops: a token crosses to a node once however many of its experts live there, and is spread inside it.

    rank (a, l)  --across, to place l-->  (b, l)  --inside node b-->  (b, j)  experts, partial sums
    rank (a, l)  <--across-------------   (b, l)  <--inside node b--  (b, j)

(a, l): place l on node a. A row goes along an arrow at most once; on the way back, what comes together is summed, in
fp32, in a fixed order. Across nodes that is (n−1)·(1 − C(E−E/n, K)/C(E, K)) rows per token and direction at uniform
routing, against K·(n−1)/n flat. It pays where the link across is much slower than the one inside.

Legend: T tokens of this rank, K picks per token, E experts, P ranks, n nodes, R ranks per node, e local experts,
V visitors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dispatch.exchange import Channel, RowExchange, exchange_counts
from dispatch.hops import Hop, Route, SelectHop, renumber_tokens
from dispatch.interface import NOT_DISPATCHED
from dispatch.permute import PickOrder, by_expert_then_source, sort_picks
from dispatch.visit import Surroundings


class TwoHopPlanner:
    """A VisitPlanner."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._node, self._place = divmod(around.rank, around.node_size)

    def num_counts(self, num_chunks: int) -> int:
        """Per chunk: tokens that want each node, tokens that want each rank."""
        around = self._around
        return num_chunks * (around.num_nodes + around.num_nodes * around.node_size)

    def counts(self, topk_expert_ids_of_chunk: Sequence[Tensor]) -> Tensor:
        """Per chunk: tokens that want each node, tokens that want each rank."""
        around = self._around
        counts = []
        for ids_TK in topk_expert_ids_of_chunk:
            ranks_TK = around.table.ranks(ids_TK)
            nodes_Tn = wanted(ranks_TK // around.node_size, around.num_nodes)
            ranks_TP = wanted(ranks_TK, around.num_nodes * around.node_size)
            counts += [nodes_Tn.sum(0), ranks_TP.sum(0)]
        return torch.cat(counts)

    def plan(
        self, topk_expert_ids_of_chunk: Sequence[Tensor], counts_of_rank: Sequence[Sequence[int]]
    ) -> list[tuple[Route, PickOrder]]:
        """Bring ids to where they decide about the next hop, chunk by chunk in one exchange per hop."""
        around = self._around
        nodes, places = around.num_nodes, around.node_size
        hops_of_chunk: list[list[Hop]] = [[] for _ in topk_expert_ids_of_chunk]
        ids_of_chunk = [ids_TK.to(torch.int32) for ids_TK in topk_expert_ids_of_chunk]
        if around.cross is not None:
            exchanges = []
            for chunk, ids_TK in enumerate(ids_of_chunk):
                order = sort_picks(as_picks(wanted(around.table.ranks(ids_TK) // places, nodes)), nodes)
                sent = self._to_nodes(counts_of_rank[around.rank], chunk)
                received = [
                    self._to_nodes(counts_of_rank[node * places + self._place], chunk)[self._node]
                    for node in range(nodes)
                ]
                exchange = RowExchange(send_rows_P=sent, receive_rows_P=received, channel=around.cross)
                exchanges.append(exchange)
                hops_of_chunk[chunk].append(SelectHop(order=order, exchange=exchange))
                ids_of_chunk[chunk] = ids_TK.index_select(0, order.token_N)
            ids_of_chunk = _exchange_ids(ids_of_chunk, exchanges, around.cross)
        blocks_of_chunk = []
        if around.node is not None:
            exchanges = []
            for chunk, ids_VK in enumerate(ids_of_chunk):
                place_VK = around.table.ranks(ids_VK) - self._node * places
                place_VK = place_VK.where((place_VK >= 0) & (place_VK < places), NOT_DISPATCHED)
                order = sort_picks(as_picks(wanted(place_VK, places)), places)
                own = self._blocks(counts_of_rank, chunk, from_place=self._place)
                blocks = [
                    [self._to_ranks(counts_of_rank[node * places + place], chunk)[around.rank] for node in range(nodes)]
                    for place in range(places)
                ]
                exchange = RowExchange(
                    send_rows_P=own, receive_rows_P=[sum(block) for block in blocks], channel=around.node
                )
                exchanges.append(exchange)
                blocks_of_chunk.append(blocks)
                hops_of_chunk[chunk].append(SelectHop(order=order, exchange=exchange))
                ids_of_chunk[chunk] = ids_VK.index_select(0, order.token_N)
            ids_of_chunk = _exchange_ids(ids_of_chunk, exchanges, around.node)
        num_local = len(around.placement.expert_ids_by_rank[around.rank])
        plans = []
        for chunk, ids_VK in enumerate(ids_of_chunk):
            local_VK = around.table.local_experts(ids_VK)
            if nodes == 1 or places == 1:
                order = sort_picks(local_VK, num_local)
            else:
                # Visitors arrive by place, then node; rows of an expert lie by source rank, which is node, then place.
                blocks_Rn = torch.tensor(blocks_of_chunk[chunk], device=local_VK.device)
                arrival = by_expert_then_source(blocks_Rn, local_VK.shape[0])
                order = renumber_tokens(
                    sort_picks(local_VK.index_select(0, arrival.source_R), num_local),
                    arrival.source_R,
                    arrival.target_R,
                )
            plans.append((Route(hops=tuple(hops_of_chunk[chunk])), order))
        return plans

    def _to_nodes(self, counts: Sequence[int], chunk: int) -> Sequence[int]:
        """A rank's tokens of a chunk that want each node."""
        start = self.num_counts(chunk)
        return counts[start : start + self._around.num_nodes]

    def _to_ranks(self, counts: Sequence[int], chunk: int) -> Sequence[int]:
        """A rank's tokens of a chunk that want each rank."""
        return counts[self.num_counts(chunk) + self._around.num_nodes : self.num_counts(chunk + 1)]

    def _blocks(self, counts_of_rank: Sequence[Sequence[int]], chunk: int, *, from_place: int) -> list[int]:
        """Visitors of a place of this node that go on to each of the node's ranks."""
        nodes, places = self._around.num_nodes, self._around.node_size
        sources = [self._to_ranks(counts_of_rank[node * places + from_place], chunk) for node in range(nodes)]
        first = self._node * places
        return [sum(to_ranks[first + place] for to_ranks in sources) for place in range(places)]


def wanted(targets_TK: Tensor, num_targets: int) -> Tensor:
    """[T, num_targets] bool: which targets a token wants at least once. targets_TK: int64, or NOT_DISPATCHED."""
    table = torch.zeros((targets_TK.shape[0], num_targets + 1), dtype=torch.bool, device=targets_TK.device)
    # The first column takes what goes nowhere.
    return table.scatter_(1, targets_TK - NOT_DISPATCHED, True)[:, 1:]


def as_picks(wanted_Tg: Tensor) -> Tensor:
    """The table as picks of targets, so that one sort serves experts and ranks alike: [T, g] target, or NOT_DISPATCHED."""
    targets = torch.arange(wanted_Tg.shape[1], device=wanted_Tg.device)
    return targets.where(wanted_Tg, NOT_DISPATCHED)


def _exchange_ids(ids_of_chunk: Sequence[Tensor], exchanges: Sequence[RowExchange], channel: Channel) -> list[Tensor]:
    """Ids of the rows of every chunk, in one exchange."""
    top_k = ids_of_chunk[0].shape[1]
    pieces = [ids.split(list(exchange.send_rows_P)) for ids, exchange in zip(ids_of_chunk, exchanges, strict=True)]
    received = exchange_counts(
        torch.cat([of_chunk[target] for target in range(channel.num_ranks) for of_chunk in pieces]).flatten(),
        [top_k * sum(exchange.send_rows_P[rank] for exchange in exchanges) for rank in range(channel.num_ranks)],
        [top_k * sum(exchange.receive_rows_P[rank] for exchange in exchanges) for rank in range(channel.num_ranks)],
        channel,
    ).view(-1, top_k)
    lengths = [exchange.receive_rows_P[source] for source in range(channel.num_ranks) for exchange in exchanges]
    arrived = received.split(lengths)
    num_chunks = len(exchanges)
    return [torch.cat(arrived[chunk::num_chunks]) for chunk in range(num_chunks)]
