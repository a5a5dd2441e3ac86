"""The dispatcher around a route (dispatch/hops.py): on the token path, for modes whose partial sums are formed away.

A mode gives the plan (who visits whom); packing, experts, sums and gradients are the same for all of them.

Legend: T tokens of a chunk, D hidden, K picks per token, V visitors, R rows of this rank's experts, e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.agreement import Meeting, Status, Terms, fingerprint, gather_numbers, terms_of
from dispatch.exchange import Channel, begin, end, open_channel
from dispatch.hops import Homeward, Outward, Route, partial_sums, split_visitors
from dispatch.interface import NOT_DISPATCHED, Dispatched, ExpertFunction
from dispatch.overlap import Overlap, dispatch_stages, run_stages
from dispatch.permute import PickOrder, check_ids
from dispatch.placement import Placement
from dispatch.rows import add_rows
from dispatch.topology import Topology
from dispatch.traffic import Traffic


@dataclass(slots=True, kw_only=True)
class Visit:
    """One chunk: where its tokens go, and the weights that go with them."""

    route: Route
    order: PickOrder
    """Rows by local expert, source rank, token, pick; tokens are visitors in the order in which the route leaves them."""
    row_width: int
    row_dtype: torch.dtype
    weights_TK: Tensor | None = None
    """This rank's weights; None while `dispatch` stands alone, whose `combine` sends them later."""
    weights_VK: Tensor | None = None
    """The visitors'."""


class VisitPlanner(Protocol):
    """What a mode decides."""

    def num_counts(self, num_chunks: int) -> int:
        """Numbers that each rank tells all others first."""
        ...

    def counts(self, topk_expert_ids_of_chunk: Sequence[Tensor]) -> Tensor:
        """This rank's, int64."""
        ...

    def plan(
        self, topk_expert_ids_of_chunk: Sequence[Tensor], counts_of_rank: Sequence[Sequence[int]]
    ) -> list[tuple[Route, PickOrder]]:
        """Route and order of every chunk, once all counts are known; may move ids (collective)."""
        ...


class VisitDispatcher:
    """A TokenDispatcher that sends weights out with the rows and brings partial sums home."""

    def __init__(
        self,
        placement: Placement,
        group: dist.ProcessGroup,
        topology: Topology,
        make_planner: Callable[["Surroundings"], VisitPlanner],
        *,
        overlap: Overlap | None = None,
        layer_index: int | None = None,
        save_memory: bool = False,
        check: bool = False,
    ) -> None:
        """topology: of this group. layer_index: named in errors. save_memory, check: see dispatch/memory.py, check.py."""
        self.num_experts = placement.num_experts
        self.local_expert_ids = placement.expert_ids_by_rank[dist.get_rank(group)]
        self.traffic = Traffic()
        self._overlap = Overlap() if overlap is None else overlap
        self._layer_index = layer_index
        self._save_memory = save_memory
        self._placement = fingerprint(placement)
        self._meeting = Meeting()
        around = surroundings(placement, group, topology, self.traffic, self._overlap, check=check)
        self._channel = around.channel
        self._planner = make_planner(around)

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Rows of this rank's experts from all ranks, sorted by local expert, source rank, token, pick."""
        return dispatch_stages(self, x_TD, topk_expert_ids_TK)

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Weighted sums where the experts are, then at home. The weights are sent here, after the experts."""
        assert isinstance(state, Visit)
        out = Outward(route=state.route, row_width=0, row_dtype=torch.float32)
        state.weights_VK = end(begin(topk_weights_TK.float(), out))
        came_home = end(begin(self.repack(rows_RD, state), self.homeward(state)))
        return self.finish(came_home, topk_weights_TK, state)

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine, in chunks; the weights travel beside the rows."""
        return run_stages(self, self._overlap, x_TD, topk_expert_ids_TK, topk_weights_TK, experts, beside)

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """See TokenDispatcher."""
        self._announce(x_TD, self._terms(x_TD, top_k, self._overlap.chunks), Status.not_finite)

    def _announce(self, x_TD: Tensor, terms: Terms, status: Status) -> None:
        """Bad news in place of counts."""
        if not self._meeting.hold(x_TD, terms, self._channel, status):
            num_counts = self._planner.num_counts(terms.chunks)
            counts_N = torch.zeros(num_counts, dtype=torch.int64, device=x_TD.device)
            gather_numbers(counts_N, terms, self._channel, status)

    def plan(
        self,
        x_TD: Tensor,
        topk_expert_ids_of_chunk: Sequence[Tensor],
        topk_weights_of_chunk: Sequence[Tensor] | None = None,
    ) -> list[Visit]:
        """Agree on counts, then decide who visits whom."""
        num_chunks, top_k = len(topk_expert_ids_of_chunk), topk_expert_ids_of_chunk[0].shape[1]
        terms = self._terms(x_TD, top_k, num_chunks)
        try:
            for ids_TK in topk_expert_ids_of_chunk:
                check_ids(ids_TK, self.num_experts)
        except ValueError:
            self._announce(x_TD, terms, Status.failed)
            raise
        self._meeting.hold(x_TD, terms, self._channel)
        counts_of_rank = gather_numbers(self._planner.counts(topk_expert_ids_of_chunk), terms, self._channel).tolist()
        weights = [None] * num_chunks if topk_weights_of_chunk is None else topk_weights_of_chunk
        plans = self._planner.plan(topk_expert_ids_of_chunk, counts_of_rank)
        return [
            Visit(route=route, order=order, row_width=x_TD.shape[1], row_dtype=x_TD.dtype, weights_TK=weights_TK)
            for (route, order), weights_TK in zip(plans, weights, strict=True)
        ]

    def pack(self, x_TD: Tensor, plan: Visit) -> Tensor:
        """The tokens, and their weights beside them: [T, D + K] fp32 (a bf16 row is sent as bf16, see Outward)."""
        return x_TD.float() if plan.weights_TK is None else torch.cat((x_TD.float(), plan.weights_TK.float()), 1)

    def outward(self, plan: Visit) -> Outward:
        """Along the route."""
        return Outward(route=plan.route, row_width=plan.row_width, row_dtype=plan.row_dtype)

    def unpack(self, rows: Tensor, plan: Visit) -> tuple[Tensor, Tensor]:
        """By expert."""
        rows_RD, weights_VK = split_visitors(rows, plan.order, plan.row_width, plan.row_dtype)
        if plan.weights_TK is not None:
            plan.weights_VK = weights_VK
        return rows_RD, plan.order.tokens_per_expert_E

    def repack(self, rows_RD: Tensor, plan: Visit) -> Tensor:
        """Partial sums of the visitors."""
        assert plan.weights_VK is not None
        if self._save_memory and plan.weights_TK is not None:
            return add_rows(rows_RD, plan.order)
        return partial_sums(rows_RD, plan.weights_VK, plan.order)

    def homeward(self, plan: Visit) -> Homeward:
        """Back along the route."""
        return Homeward(route=plan.route, row_dtype=plan.row_dtype)

    def finish(self, rows: Tensor, topk_weights_TK: Tensor, plan: Visit) -> Tensor:
        """The sums are complete; into the rows' dtype."""
        return rows.to(plan.row_dtype)

    def row_weights(self, plan: Visit) -> Tensor | None:
        """Weights of the rows that the visitors ask for."""
        if not self._save_memory:
            return None
        assert plan.weights_VK is not None
        return plan.weights_VK.flatten().index_select(0, plan.order.pick_N)

    def _terms(self, x_TD: Tensor, top_k: int, num_chunks: int) -> Terms:
        return terms_of(x_TD, top_k, layer_index=self._layer_index, placement=self._placement, chunks=num_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a planner stands."""

    channel: Channel
    """The whole expert group."""
    cross: Channel | None
    """The ranks at this place on each node; None with one node."""
    node: Channel | None
    """The ranks on this node; None when alone."""
    num_nodes: int
    node_size: int
    rank: int
    placement: Placement
    table: "ExpertTable"


def surroundings(
    placement: Placement,
    group: dist.ProcessGroup,
    topology: Topology,
    traffic: Traffic,
    overlap: Overlap,
    *,
    check: bool,
) -> Surroundings:
    """Channels and tables of one dispatcher."""

    def channel(group: dist.ProcessGroup) -> Channel:
        return open_channel(
            group,
            ranks_per_node=topology.ranks_per_node,
            traffic=traffic,
            forward_async=overlap.forward,
            backward_async=overlap.backward,
            check=check,
        )

    rank = dist.get_rank(group)
    assert topology.num_nodes * topology.node_size == dist.get_world_size(group)
    return Surroundings(
        channel=channel(group),
        cross=None if topology.cross_group is None else channel(topology.cross_group),
        node=None if topology.node_group is None else channel(topology.node_group),
        num_nodes=topology.num_nodes,
        node_size=topology.node_size,
        rank=rank,
        placement=placement,
        table=ExpertTable(placement, rank),
    )


class ExpertTable:
    """Look-ups by expert id; NOT_DISPATCHED gives NOT_DISPATCHED."""

    def __init__(self, placement: Placement, rank: int) -> None:
        local = [NOT_DISPATCHED] * placement.num_experts
        for place, expert in enumerate(placement.expert_ids_by_rank[rank]):
            local[expert] = place
        # The last entry serves NOT_DISPATCHED (index −1).
        self._rank_of = torch.tensor([*placement.rank_of_expert, NOT_DISPATCHED], dtype=torch.int64)
        self._local = torch.tensor([*local, NOT_DISPATCHED], dtype=torch.int64)

    def ranks(self, topk_expert_ids: Tensor) -> Tensor:
        """Rank that holds each expert, int64."""
        self._rank_of = self._rank_of.to(topk_expert_ids.device)
        return self._rank_of[topk_expert_ids.long()]

    def local_experts(self, topk_expert_ids: Tensor) -> Tensor:
        """Place of each expert among this rank's, int64; NOT_DISPATCHED for another rank's."""
        self._local = self._local.to(topk_expert_ids.device)
        return self._local[topk_expert_ids.long()]
