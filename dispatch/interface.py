"""The dispatcher contract: on the token path, between the router's choice and the experts, and back.

Legend: T tokens on this rank, D hidden, K picks per token, N kept assignments on this rank, E experts in all,
e local experts, R rows that this rank's experts receive.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from dispatch.traffic import Traffic

NOT_DISPATCHED = -1
"""Expert id of a pick that goes nowhere: padding, or dropped by capacity. Its share of the output is 0."""


class ExpertFunction(Protocol):
    """What stands between dispatch and combine. Called once a chunk, even with zero rows."""

    def __call__(self, rows_RD: Tensor, tokens_per_local_expert_e: Tensor, weight_R: Tensor | None = None, /) -> Tensor:
        """Results [R, D] of rows sorted by local expert; tokens_per_local_expert_e: int64.

        weight_R: fp32, given with `dispatch.save_memory` alone: multiply each row's result by it, best before the last
        matrix product, so that the result itself need not be kept for the gradient of the weight.
        The result must depend on the rows through autograd, so that every rank takes part in the exchange of backward.
        """
        ...


class Dispatched(NamedTuple):
    """What the experts of this rank see."""

    rows_RD: Tensor
    """Rows sorted by local expert, inside one expert by source rank, token, pick: the order is reproducible."""
    tokens_per_local_expert_e: Tensor
    """int64, sums to R."""
    state: object
    """Frozen record that the same dispatcher's `combine` needs; opaque to everyone else."""


class TokenDispatcher(Protocol):
    """Moves token rows to the ranks of their experts and weighted results back.

    Every mode equals `dispatch.reference` in outputs and in the gradients with respect to x, topk_weights and whatever
    the experts hold. All ranks of the expert group call together, ranks without tokens too.
    """

    num_experts: int
    local_expert_ids: tuple[int, ...]
    """Global ids of the experts on this rank, in the order of the stacked weights."""
    traffic: Traffic
    """What was sent and waited for since somebody last collected it."""

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Bring each row to every rank that holds one of its chosen experts.

        topk_expert_ids_TK: int64 global ids, or NOT_DISPATCHED. Differentiable with respect to x_TD.
        """
        ...

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Bring results back: y[t] = Σ_k weight[t, k] · row(t, k), summed in fp32, as [T, D] in the rows' dtype.

        topk_weights_TK: fp32. Differentiable with respect to both.
        """
        ...

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine; a mode may do it in chunks so that exchange and computation overlap.

        beside: work that needs no exchange, such as shared experts, called once, if possible while rows are on their
        way; what it returns ([T, D]) is added to the result.
        """
        ...

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """In place of `run` when this rank's router output is not finite: the others, which wait for its counts, learn of
        it there and raise, and so can the caller. Arguments as `run` would have had them.
        """
        ...
