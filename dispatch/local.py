"""Dispatch when this rank holds every expert: sort, no exchange. On the token path, with one rank per expert group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from dispatch.interface import Dispatched, ExpertFunction
from dispatch.memory import Recall
from dispatch.permute import PickOrder, sort_picks
from dispatch.rows import add_rows, gather_rows, sum_rows
from dispatch.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """What combine needs to undo dispatch."""

    order: PickOrder


@runtime_checkable
class TokenExperts(Protocol):
    """Experts that may take rows from their tokens, and add results up, by themselves: cheaper where all is in one place."""

    def for_tokens(
        self, x_TD: Tensor, token_R: Tensor, weight_R: Tensor, tokens_per_local_expert_e: Tensor
    ) -> Tensor | None:
        """y[t] = Σ over the rows i of token t of weight[i] · result[i], in fp32 and by ascending i, as [T, D] in x's dtype.

        token_R: int64, token of row i, sorted by expert. weight_R: fp32. None when this would gain nothing.
        """
        ...


class LocalDispatcher:
    """A TokenDispatcher without communication."""

    def __init__(self, num_experts: int, *, save_memory: bool = False) -> None:
        """save_memory: see dispatch/memory.py."""
        self._save_memory = save_memory
        self.num_experts = num_experts
        self.local_expert_ids = tuple(range(num_experts))
        self.traffic = Traffic()

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor) -> Dispatched:
        """Rows of the kept picks, sorted by expert, then token, then pick."""
        order = sort_picks(topk_expert_ids_TK, self.num_experts)
        return Dispatched(gather_rows(x_TD, order), order.tokens_per_expert_E, LocalState(order=order))

    def combine(self, rows_RD: Tensor, topk_weights_TK: Tensor, state: object) -> Tensor:
        """Weighted sum over each token's kept picks."""
        assert isinstance(state, LocalState)
        return sum_rows(rows_RD, topk_weights_TK, state.order)

    def run(
        self,
        x_TD: Tensor,
        topk_expert_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        experts: ExpertFunction,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """dispatch, experts, combine, in one piece.

        Experts that take tokens add a token's results up by ascending expert, not by ascending pick.
        """
        order = sort_picks(topk_expert_ids_TK, self.num_experts)
        y_TD = None
        if isinstance(experts, TokenExperts):
            weight_R = topk_weights_TK.float().flatten().index_select(0, order.pick_N)
            y_TD = experts.for_tokens(x_TD, order.token_N, weight_R, order.tokens_per_expert_E)
        if y_TD is None and self._save_memory:
            y_TD = self._run_forgetting(x_TD, order, topk_weights_TK, experts)
        elif y_TD is None:
            results_RD = experts(gather_rows(x_TD, order), order.tokens_per_expert_E)
            y_TD = sum_rows(results_RD, topk_weights_TK, order)
        return y_TD if beside is None else y_TD + beside()

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """Nobody waits."""

    def _run_forgetting(
        self, x_TD: Tensor, order: PickOrder, topk_weights_TK: Tensor, experts: ExpertFunction
    ) -> Tensor:
        recall = Recall(x_TD.detach, lambda x_TD: gather_rows(x_TD, order))
        rows_RD = recall.forget_after(gather_rows(x_TD, order))
        weight_R = topk_weights_TK.float().flatten().index_select(0, order.pick_N)
        with recall.forgetting(rows_RD):
            results_RD = experts(rows_RD, order.tokens_per_expert_E, weight_R)
        return add_rows(recall.fetch_before(results_RD), order).to(results_RD.dtype)
