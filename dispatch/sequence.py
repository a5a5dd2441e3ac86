"""Rows shared by several ranks (sequence parallelism): on the token path, around attention.

The n ranks of a sequence group have the same rows of C tokens, and each works on consecutive positions of them: rank s
has ⌈C/n⌉ of them if s < C mod n, else ⌊C/n⌋. Everything but attention works on a token by itself. Around attention the
cut is turned: an all-to-all gives each rank all positions of a part of the heads, another brings the outcome back.

    [B, S, H heads, d]  --to_heads-->  [B, C, H/n heads, d]  attention  --to_tokens-->  [B, S, H heads, d]

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".

Legend: B rows, C tokens of a row, S of them on this rank, H query heads, G key/value heads, d width of a head, n ranks.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.exchange import Channel, exchange_rows
from dispatch.traffic import forward_phase


def part_lengths(num_tokens: int, num_ranks: int) -> list[int]:
    """Positions of each rank, as even as can be, the longer ones first; 0 where there are fewer tokens than ranks."""
    base, longer = divmod(num_tokens, num_ranks)
    return [base + (rank < longer) for rank in range(num_ranks)]


def copies_of_kv_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """The fewest copies of each key/value head with which every rank's query heads meet their own there, in order.

    1 when num_ranks divides num_kv_heads; num_heads / num_kv_heads when each query head needs a copy of its own.
    num_ranks must divide num_heads, and num_kv_heads too.
    """
    copies = num_ranks // gcd(num_kv_heads, num_ranks)
    per_kv_head = num_heads // num_kv_heads
    return copies if per_kv_head % copies == 0 else per_kv_head


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShards:
    """How rows are cut over the ranks of a sequence group, and the exchanges between them (all collective over it)."""

    channel: Channel
    """The n ranks of the group, in the order of their positions."""
    rank: int
    """This rank's place in the group."""
    data_rank: int
    """Which rows of the micro-step the group has: the data_rank-th of equal consecutive parts."""

    @property
    def num_ranks(self) -> int:
        """n."""
        return self.channel.num_ranks

    def lengths(self, num_tokens: int) -> list[int]:
        """Positions of each rank."""
        return part_lengths(num_tokens, self.num_ranks)

    def own(self, whole_BC: Tensor) -> Tensor:
        """This rank's positions of whole rows: [B, C, ...] -> [B, S, ...], a view."""
        lengths = self.lengths(whole_BC.shape[1])
        return whole_BC.narrow(1, sum(lengths[: self.rank]), lengths[self.rank])

    def places(self, whole_BC: Tensor) -> Tensor:
        """Where this rank's tokens of whole rows stand in the micro-step of all ranks, row after row: int64 [B, S]."""
        places_BC = torch.arange(whole_BC.numel(), device=whole_BC.device).view_as(whole_BC)
        return self.own(places_BC) + self.data_rank * whole_BC.numel()

    @torch.no_grad()
    def gather(self, part_BSE: Tensor, num_tokens: int) -> Tensor:
        """Whole rows from every rank's part, without gradient: [B, S, E] -> [B, C, E]."""
        lengths = self.lengths(num_tokens)
        num_rows, own, width = part_BSE.shape
        rows_ND = part_BSE.transpose(0, 1).reshape(own, num_rows * width).repeat(self.num_ranks, 1)
        phase, size = forward_phase(), rows_ND.element_size() * rows_ND.shape[1]
        self.channel.traffic.count(phase, self.channel.links_P, [own] * self.num_ranks, size)
        whole_ND = rows_ND.new_empty((num_tokens, num_rows * width))
        dist.all_to_all_single(whole_ND, rows_ND, lengths, [own] * self.num_ranks, group=self.channel.group)
        return whole_ND.view(num_tokens, num_rows, width).transpose(0, 1)

    def to_heads(
        self, q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All C positions of this rank's heads: [B, C, H/n, d] and twice [B, C, G', d], with gradients.

        n must divide H; where it does not divide G, key/value heads travel in copies (see `copies_of_kv_heads`), whose
        gradients add up. G' divides H/n, and query heads meet their key/value heads in order, as before.
        """
        copies = copies_of_kv_heads(q_BSHd.shape[2], k_BSGd.shape[2], self.num_ranks)
        if copies > 1:
            k_BSGd, v_BSGd = k_BSGd.repeat_interleave(copies, 2), v_BSGd.repeat_interleave(copies, 2)
        heads = [x.shape[2] // self.num_ranks for x in (q_BSHd, k_BSGd, v_BSGd)]
        # One exchange for all three: by rank of arrival, then position, row, head.
        parts = [x.unflatten(2, (self.num_ranks, -1)) for x in (q_BSHd, k_BSGd, v_BSGd)]
        sent_nSBhd = torch.cat(parts, 3).permute(2, 1, 0, 3, 4)
        own = sent_nSBhd.shape[1]
        whole_ND = exchange_rows(
            sent_nSBhd.flatten(0, 1).flatten(1), [own] * self.num_ranks, self.lengths(num_tokens), self.channel
        )
        whole_BChd = whole_ND.view(num_tokens, *sent_nSBhd.shape[2:]).transpose(0, 1)
        q, k, v = whole_BChd.split(heads, 2)
        return q, k, v

    def to_tokens(self, y_BChd: Tensor) -> Tensor:
        """All heads of this rank's positions: [B, C, H/n, d] -> [B, S, H, d], with gradient."""
        num_rows, num_tokens, heads, width = y_BChd.shape
        lengths = self.lengths(num_tokens)
        own = lengths[self.rank]
        rows_ND = exchange_rows(y_BChd.transpose(0, 1).flatten(1), lengths, [own] * self.num_ranks, self.channel)
        parts_nSBhd = rows_ND.view(self.num_ranks, own, num_rows, heads, width)
        return parts_nSBhd.permute(2, 1, 0, 3, 4).flatten(2, 3)
