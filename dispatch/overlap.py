"""Exchange and computation at the same time: tokens go through a mode in chunks. On the token path, around all modes.

With C chunks, while the experts work on one, the next is on its way to them and the one before is on its way home:

    send 0 | beside | receive 0, send 1 | experts 0 | return 0 | receive 1, send 2 | experts 1 | home 0, return 1 | …

`receive` and `home` wait. Backward does the same from the last chunk to the first: its order is the mirror image of
forward's (dispatch/exchange.py says why), so the steps below stand in an order that reads well from both ends. One
exchange each way is under way at a time; starting all at once would let them share the link, and delay the first.

Legend: T tokens, D hidden, K picks per token, N kept picks, R received rows, e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dispatch.config import DispatchConfig
from dispatch.exchange import Flight, Pending, Transfer, begin, end
from dispatch.interface import Dispatched, ExpertFunction
from dispatch.memory import Recall
from dispatch.traffic import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What may run beside an exchange. Never changes the mathematics."""

    chunks: int = 1
    """Into how many pieces the tokens of a rank are cut, by position; the same on all ranks."""
    forward: bool = True
    """Whether exchanges of forward are left under way while the experts work."""
    backward: bool = True
    """The same of backward."""
    shared: bool = True
    """Whether `beside` (the shared experts) runs while the first exchange is under way; if not, it runs last."""


def overlap_from(config: DispatchConfig) -> Overlap:
    """What the configuration asks for."""
    return Overlap(
        chunks=config.chunks,
        forward=config.overlap_forward,
        backward=config.overlap_backward,
        shared=config.overlap_shared,
    )


class Stages(Protocol):
    """A mode, cut at its exchanges. Each stage works on one chunk; `plan` is the mode's own record of that chunk.

    All is linear but `plan`; the exchanges in between are `outward` and `homeward`.
    """

    def plan(
        self,
        x_TD: Tensor,
        topk_expert_ids_of_chunk: Sequence[Tensor],
        topk_weights_of_chunk: Sequence[Tensor] | None = None,
    ) -> Sequence[Any]:
        """Decide where all rows of all chunks go; may tell other ranks. x_TD: for its width and dtype alone.

        topk_weights_of_chunk: for modes that send weights out with the rows; None when `dispatch` stands alone.
        """
        ...

    def pack(self, x_TD: Tensor, plan: Any) -> Tensor:
        """Rows to send, from the chunk's tokens."""
        ...

    def outward(self, plan: Any) -> Transfer:
        """The exchange that takes them to the experts."""
        ...

    def unpack(self, rows: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """(rows_RD sorted for the experts, tokens_per_local_expert_e), from what arrived."""
        ...

    def repack(self, rows_RD: Tensor, plan: Any) -> Tensor:
        """Rows to send home, from the experts' results."""
        ...

    def homeward(self, plan: Any) -> Transfer:
        """The exchange that takes them home."""
        ...

    def finish(self, rows: Tensor, topk_weights_TK: Tensor, plan: Any) -> Tensor:
        """The chunk's result [T, D], from what came home."""
        ...

    def row_weights(self, plan: Any) -> Tensor | None:
        """None; or after `unpack` the weight [R] fp32 of each row, by which the experts then multiply (save_memory)."""
        ...


def run_stages(
    stages: Stages,
    overlap: Overlap,
    x_TD: Tensor,
    topk_expert_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    experts: ExpertFunction,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The mode's `run`: see TokenDispatcher.run and this file's head. Chunks without tokens take part like all others."""
    chunks = overlap.chunks
    sizes = chunk_sizes(x_TD.shape[0], chunks)
    # split, not slices: the backward of a slice would write a full-size zero gradient per chunk.
    x_of_chunk = x_TD.split(sizes) if chunks > 1 else (x_TD,)
    weights_of_chunk = topk_weights_TK.split(sizes) if chunks > 1 else (topk_weights_TK,)
    ids_of_chunk = topk_expert_ids_TK.split(sizes) if chunks > 1 else (topk_expert_ids_TK,)
    plans = stages.plan(x_TD, ids_of_chunk, weights_of_chunk)
    outward = begin(stages.pack(x_of_chunk[0], plans[0]), stages.outward(plans[0]))
    y_beside = beside() if beside is not None and overlap.shared else None
    homeward = None
    y_of_chunk: list[Tensor] = []
    recalls: list[Recall] = []

    def come_home(chunk: int, homeward: Flight) -> Tensor:
        home = end(homeward)
        return recalls[chunk].fetch_before(home) if recalls else home

    for chunk, plan in enumerate(plans):
        last = chunk + 1 == chunks
        next_rows = None if last else stages.pack(x_of_chunk[chunk + 1], plans[chunk + 1])
        arrived = end(outward)
        if next_rows is not None:
            outward = begin(next_rows, stages.outward(plans[chunk + 1]))
        rows_RD, tokens_per_local_expert_e = stages.unpack(arrived, plan)
        weight_R = stages.row_weights(plan)
        if weight_R is None:
            results_RD = experts(rows_RD, tokens_per_local_expert_e)
        else:
            recalls.append(_recall(stages, x_of_chunk[chunk].detach(), plan))
            rows_RD = recalls[-1].forget_after(rows_RD)
            with recalls[-1].forgetting(rows_RD):
                results_RD = experts(rows_RD, tokens_per_local_expert_e, weight_R)
        results = stages.repack(results_RD, plan)
        # Else this chunk's rows would be alive while the next one's are made.
        del arrived, rows_RD, results_RD
        if homeward is not None:
            before = come_home(chunk - 1, homeward)
            homeward = begin(results, stages.homeward(plan))
            y_of_chunk.append(stages.finish(before, weights_of_chunk[chunk - 1], plans[chunk - 1]))
        else:
            homeward = begin(results, stages.homeward(plan))
    assert homeward is not None
    y_of_chunk.append(stages.finish(come_home(chunks - 1, homeward), weights_of_chunk[-1], plans[-1]))
    y_TD = torch.cat(y_of_chunk) if chunks > 1 else y_of_chunk[0]
    if beside is not None and not overlap.shared:
        y_beside = beside()
    return y_TD if y_beside is None else y_TD + y_beside


def _recall(stages: Stages, x_TD: Tensor, plan: Any) -> Recall:
    """How to fetch a chunk's rows again; its exchange is waited for at once where backward's are."""
    transfer = stages.outward(plan)

    def start() -> Pending | Tensor:
        pending = transfer.start(stages.pack(x_TD, plan), Phase.recompute)
        return pending if transfer.channel.backward_async else pending.wait()

    return Recall(start, lambda arrived: stages.unpack(arrived, plan)[0])


def chunk_sizes(num_tokens: int, chunks: int) -> list[int]:
    """Lengths that differ by at most one and sum to num_tokens, the longer first; zeros when tokens are few."""
    return [num_tokens // chunks + (chunk < num_tokens % chunks) for chunk in range(chunks)]


def dispatch_stages(stages: Stages, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
    """The mode's `dispatch`: all tokens as one chunk, whose plan is the state."""
    (plan,) = stages.plan(x_TD, (topk_expert_ids_TK,))
    arrived = end(begin(stages.pack(x_TD, plan), stages.outward(plan)))
    return Dispatched(*stages.unpack(arrived, plan), plan)


def combine_stages(stages: Stages, rows_RD: Tensor, topk_weights_TK: Tensor, plan: object) -> Tensor:
    """The mode's `combine`."""
    came_home = end(begin(stages.repack(rows_RD, plan), stages.homeward(plan)))
    return stages.finish(came_home, topk_weights_TK, plan)
