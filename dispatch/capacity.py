"""Capacity: which picks are kept when an expert, or a rank, is wanted by more tokens than it shall serve.

On the token path between router and dispatch. A dropped pick becomes NOT_DISPATCHED: it moves no row, its share of the
token's output is 0, and the weights of the token's other picks stay as they are, so a token without a kept pick gets
what the residual connection and the shared experts give. Padding holds no place and is never kept (A18).

    capacity of an expert = min(T, max(min_capacity, ⌈T · K · capacity_factor / E⌉)),  T valid tokens

kept of an expert: the `capacity` picks that come first by

    probability   combine weight, largest first
    position      place of the token in the batch
    random        a number drawn for (seed, step, layer, token, expert)

and, among equals, by place of the token, then of the pick. T and the order are those of this rank (scope local) or of
all ranks of a micro-step (scope global; then every layout keeps the same picks).

Everything here is integers and comparisons: no gradient, the same in a recomputed forward.

Source: Lepikhin et al. 2020, "GShard", algorithm 1; Fedus et al. 2021, "Switch Transformers", section 2.2.

Legend: T tokens of this rank, K picks per token, M = T·K picks, E experts, b bins (experts, or ranks), W ranks that
decide together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.agreement import Status, Terms, gather_numbers
from dispatch.config import DropPolicy
from dispatch.exchange import Channel, start_all_gather
from dispatch.interface import NOT_DISPATCHED
from dispatch.traffic import forward_phase

_FACTOR_DENOMINATOR = 10**6


def expert_capacity(
    num_tokens: Tensor | int, *, top_k: int, num_experts: int, factor: float, min_capacity: int
) -> Tensor | int:
    """min(T, max(min_capacity, ⌈T · K · factor / E⌉)), exactly: an integer, or an int64 tensor for a tensor.

    factor is taken as the decimal fraction it is written as, to six places, so that 1.1 · 10 is 11 and not 12.
    """
    share = Fraction(round(factor * _FACTOR_DENOMINATOR), _FACTOR_DENOMINATOR) * top_k / num_experts
    capacity = -(-num_tokens * share.numerator // share.denominator)
    if isinstance(capacity, Tensor):
        return torch.minimum(capacity.clamp(min=min_capacity), torch.as_tensor(num_tokens))
    return min(max(capacity, min_capacity), int(num_tokens))


def priorities(policy: DropPolicy, topk_weights_TK: Tensor, random_keys_TK: Tensor | None) -> Tensor | None:
    """int64 [T, K] by which picks come first, largest first; None when only their place counts.

    random_keys_TK: int64, unrelated from pick to pick; needed for policy random alone.
    """
    if policy is DropPolicy.position:
        return None
    if policy is DropPolicy.random:
        assert random_keys_TK is not None
        return random_keys_TK
    # A float's bits order like an integer once negative ones are turned over; + 0.0 makes −0.0 the same as 0.0.
    bits_TK = (topk_weights_TK.detach().float() + 0.0).view(torch.int32)
    return (bits_TK ^ ((bits_TK >> 31) & 0x7FFFFFFF)).long()


def places_in_bins(bins_M: Tensor, num_bins: int, priority_M: Tensor | None = None) -> Tensor:
    """How many picks come before each in its bin: int64 [M]; of no meaning for NOT_DISPATCHED. Waits for no device.

    bins_M: int64 0 … num_bins − 1, or NOT_DISPATCHED. priority_M: int64, largest first; None: all equal; equals come in
    the order in which they stand.
    """
    if priority_M is None:
        by_bin_M = torch.argsort(bins_M, stable=True)
    else:
        by_priority_M = torch.argsort(priority_M, descending=True, stable=True)
        by_bin_M = by_priority_M[torch.argsort(bins_M[by_priority_M], stable=True)]
    # Bin 0 of these takes what goes nowhere.
    sorted_M = bins_M[by_bin_M] - NOT_DISPATCHED
    count = count_bins(sorted_M, num_bins + 1)
    first = count.cumsum(0) - count
    place_M = torch.empty_like(bins_M)
    place_M[by_bin_M] = torch.arange(bins_M.shape[0], device=bins_M.device) - first[sorted_M]
    return place_M


def keep_first(bins_M: Tensor, priority_M: Tensor | None, limit_b: Tensor) -> Tensor:
    """Which picks are among the first `limit` of their bin: bool [M]. Waits for no device.

    As `places_in_bins`; limit_b: int64. NOT_DISPATCHED is never kept.
    """
    limit = torch.cat((limit_b.new_zeros(1), limit_b))
    return places_in_bins(bins_M, limit_b.shape[0], priority_M) < limit[bins_M - NOT_DISPATCHED]


def reference_keep_first(
    bins_of_rank: Sequence[Sequence[int]], priority_of_rank: Sequence[Sequence[int]] | None, limits: Sequence[int]
) -> list[list[bool]]:
    """The definition, in loops: all picks of all ranks in one list, sorted; each kept while its bin has room."""
    picks = [(rank, place) for rank, bins in enumerate(bins_of_rank) for place in range(len(bins))]
    if priority_of_rank is not None:
        picks.sort(key=lambda pick: (-priority_of_rank[pick[0]][pick[1]], pick))
    kept = [[False] * len(bins) for bins in bins_of_rank]
    room = list(limits)
    for rank, place in picks:
        wanted = bins_of_rank[rank][place]
        if wanted != NOT_DISPATCHED and room[wanted] > 0:
            room[wanted] -= 1
            kept[rank][place] = True
    return kept


def keep_first_of_all(
    bins_M: Tensor,
    priority_M: Tensor | None,
    count_Wb: Tensor,
    limit_b: Tensor,
    channel: Channel,
    places_M: Tensor | None = None,
) -> Tensor:
    """`keep_first` over the picks of all ranks of the channel (collective): bool [M] of this rank.

    count_Wb: int64, picks of every rank for each bin. All ranks pass the same counts and limits. places_M: int64, where
    each pick stands among those of all ranks; None: they stand in the order of ranks.
    By place alone, in the order of ranks, a rank knows from the counts how much room the ranks before it leave.
    Otherwise picks of overfull bins, and no others, are gathered.
    """
    rank = dist.get_rank(channel.group)
    if priority_M is None and places_M is None:
        before_b = count_Wb[:rank].sum(0)
        return keep_first(bins_M, None, (limit_b - before_b).clamp(min=0))
    overfull_b = count_Wb.sum(0) > limit_b
    # On the host, the same on all ranks: whether there is anything to decide, and how many picks are at stake.
    at_stake_W = (count_Wb * overfull_b).sum(1).tolist()
    most = max(at_stake_W)
    kept_M = bins_M != NOT_DISPATCHED
    if most == 0:
        return kept_M
    overfull_M = torch.cat((overfull_b.new_zeros(1), overfull_b))[bins_M - NOT_DISPATCHED]
    stake = overfull_M.nonzero().squeeze(1)
    columns = [column_M for column_M in (bins_M, priority_M, places_M) if column_M is not None]
    own = torch.full((most, len(columns)), NOT_DISPATCHED, dtype=torch.int64, device=bins_M.device)
    own[: stake.shape[0]] = torch.stack([column_M[stake] for column_M in columns], 1)
    phase = forward_phase()
    channel.traffic.count_bytes(phase, channel.links_P, [own.nbytes] * channel.num_ranks)
    everyone = start_all_gather(own, channel, phase).wait()
    order = torch.arange(everyone.shape[0], device=bins_M.device)
    if places_M is not None:
        order = torch.argsort(everyone[:, -1], stable=True)
    in_order = everyone[order]
    decided = torch.empty_like(order, dtype=torch.bool)
    decided[order] = keep_first(in_order[:, 0], None if priority_M is None else in_order[:, 1], limit_b)
    kept_M[stake] = decided[rank * most : rank * most + stake.shape[0]]
    return kept_M


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLimit:
    """No more picks of an expert than its capacity."""

    num_experts: int
    top_k: int
    factor: float
    min_capacity: int
    static: bool
    """Count padding positions among the tokens, so that the capacity depends on the shape alone."""
    channel: Channel | None
    """All ranks of a micro-step, with scope global; None: this rank decides alone."""

    def keep(
        self,
        ids_TK: Tensor,
        priority_TK: Tensor | None,
        valid_T: Tensor,
        terms: Terms,
        places_TK: Tensor | None = None,
    ) -> Tensor:
        """Which picks are kept: bool [M]. places_TK: see `keep_first_of_all`."""
        num_tokens = valid_T.sum()
        bins_M = ids_TK.flatten()
        priority_M = _flat(priority_TK)
        if self.channel is None:
            capacity = self.capacity(ids_TK.shape[0] if self.static else num_tokens)
            limit_E = torch.zeros(self.num_experts, dtype=torch.int64, device=bins_M.device) + capacity
            return keep_first(bins_M, priority_M, limit_E)
        numbers = torch.cat((num_tokens.view(1), count_bins(bins_M, self.num_experts)))
        everyone = gather_numbers(numbers, terms, self.channel)
        limit_E = everyone[0, 1:].new_zeros(self.num_experts) + self.capacity(everyone[:, 0].sum())
        return keep_first_of_all(bins_M, priority_M, everyone[:, 1:], limit_E, self.channel, _flat(places_TK))

    def capacity(self, num_tokens: Tensor | int) -> Tensor | int:
        """Picks that an expert serves."""
        return expert_capacity(
            num_tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
            factor=self.factor,
            min_capacity=self.min_capacity,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """No more rows on a rank than its memory takes: protects it when the router sends everything to one rank.

    Bins are the ranks of the expert group. The picks that come first by the drop policy are kept, whatever their expert.
    Which ranks hold which experts is part of the layout, so this bound, unlike the capacity of experts, is too.
    """

    rank_of_expert: Tensor
    """int64 [E + 1]; the last entry serves NOT_DISPATCHED."""
    max_rows: int
    channel: Channel | None
    """The expert group; None with one rank."""

    def keep(self, ids_TK: Tensor, priority_TK: Tensor | None, terms: Terms, places_TK: Tensor | None = None) -> Tensor:
        """Which picks are kept: bool [M]. places_TK: see `keep_first_of_all`."""
        bins_M = self.rank_of_expert.to(ids_TK.device)[ids_TK.flatten()]
        priority_M = _flat(priority_TK)
        num_ranks = 1 if self.channel is None else self.channel.num_ranks
        limit_P = torch.full((num_ranks,), self.max_rows, dtype=torch.int64, device=bins_M.device)
        if self.channel is None:
            return keep_first(bins_M, priority_M, limit_P)
        count_WP = gather_numbers(count_bins(bins_M, num_ranks), terms, self.channel)
        return keep_first_of_all(bins_M, priority_M, count_WP, limit_P, self.channel, _flat(places_TK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limiter:
    """Both limits of one layer, each of which may be absent."""

    policy: DropPolicy
    seed: int
    """Of policy random."""
    experts: ExpertLimit | None
    rank: RankLimit | None

    def limit(
        self,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        valid_T: Tensor,
        random_keys_TK: Tensor | None,
        places_T: Tensor | None = None,
        *,
        layer_index: int,
        training: bool,
    ) -> Tensor:
        """The ids with dropped picks replaced by NOT_DISPATCHED. Collective where a limit has a channel.

        Capacity is for training alone: what an evaluated or sampled token gets must not depend on its neighbours. The
        bound of a rank holds always.
        topk_weights_TK: fp32. valid_T: bool, False for padding. random_keys_TK: int64 for policy random, from `seed`.
        places_T: int64, each token's place among those of all ranks; None: ranks have consecutive tokens, in order.
        """
        ids_TK = topk_expert_ids_TK
        priority_TK = priorities(self.policy, topk_weights_TK, random_keys_TK)
        top_k = ids_TK.shape[1]
        terms = Terms(layer_index, top_k, 0, 0, 0, 0)
        places_TK = None
        if places_T is not None:
            places_TK = places_T[:, None] * top_k + torch.arange(top_k, device=ids_TK.device)
        if self.experts is not None and training:
            ids_TK = drop(ids_TK, self.experts.keep(ids_TK, priority_TK, valid_T, terms, places_TK))
        if self.rank is not None:
            ids_TK = drop(ids_TK, self.rank.keep(ids_TK, priority_TK, terms, places_TK))
        return ids_TK

    def refuse(self, device: torch.device, top_k: int, *, layer_index: int, training: bool) -> bool:
        """Say in the first agreement that this router's output is not finite; False when dispatch's own comes first."""
        terms = Terms(layer_index, top_k, 0, 0, 0, 0)
        if training and self.experts is not None and self.experts.channel is not None:
            numbers = torch.zeros(1 + self.experts.num_experts, dtype=torch.int64, device=device)
            gather_numbers(numbers, terms, self.experts.channel, Status.not_finite)
            return True
        if self.rank is not None and self.rank.channel is not None:
            numbers = torch.zeros(self.rank.channel.num_ranks, dtype=torch.int64, device=device)
            gather_numbers(numbers, terms, self.rank.channel, Status.not_finite)
            return True
        return False


def _flat(numbers_TK: Tensor | None) -> Tensor | None:
    return None if numbers_TK is None else numbers_TK.flatten()


def drop(topk_expert_ids_TK: Tensor, kept_M: Tensor) -> Tensor:
    """NOT_DISPATCHED where a pick is not kept."""
    return topk_expert_ids_TK.where(kept_M.view_as(topk_expert_ids_TK), NOT_DISPATCHED)


def count_bins(bins_M: Tensor, num_bins: int) -> Tensor:
    """Picks of each bin, int64 [b]; NOT_DISPATCHED is not counted. Waits for no device."""
    count = torch.zeros(num_bins + 1, dtype=torch.int64, device=bins_M.device)
    return count.scatter_add_(0, bins_M - NOT_DISPATCHED, torch.ones_like(bins_M))[1:]
