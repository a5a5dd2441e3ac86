"""Dispatch when this rank holds every expert: sort, no exchange. On the token path, with one rank per expert group."""

from collections.abc import Callable
from dataclasses import dataclass

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
        """dispatch, experts, combine, in one piece."""
        if self._save_memory:
            y_TD = self._run_forgetting(x_TD, topk_expert_ids_TK, topk_weights_TK, experts)
        else:
            rows_RD, tokens_per_expert_E, state = self.dispatch(x_TD, topk_expert_ids_TK)
            y_TD = self.combine(experts(rows_RD, tokens_per_expert_E), topk_weights_TK, state)
        return y_TD if beside is None else y_TD + beside()

    def refuse(self, x_TD: Tensor, top_k: int) -> None:
        """Nobody waits."""

    def _run_forgetting(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: ExpertFunction
    ) -> Tensor:
        order = sort_picks(topk_expert_ids_TK, self.num_experts)
        recall = Recall(x_TD.detach, lambda x_TD: gather_rows(x_TD, order))
        rows_RD = recall.forget_after(gather_rows(x_TD, order))
        weight_R = topk_weights_TK.float().flatten().index_select(0, order.pick_N)
        with recall.forgetting(rows_RD):
            results_RD = experts(rows_RD, order.tokens_per_expert_E, weight_R)
        return add_rows(recall.fetch_before(results_RD), order).to(results_RD.dtype)
