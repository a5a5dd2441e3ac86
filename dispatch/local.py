"""Dispatch when this rank holds every expert: sort, no exchange. On the token path, with one rank per expert group."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dispatch.interface import Dispatched, ExpertFunction
from dispatch.permute import PickOrder, sort_picks
from dispatch.rows import gather_rows, sum_rows
from dispatch.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """What combine needs to undo dispatch."""

    order: PickOrder


class LocalDispatcher:
    """A TokenDispatcher without communication."""

    def __init__(self, num_experts: int) -> None:
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
        rows_RD, tokens_per_expert_E, state = self.dispatch(x_TD, topk_expert_ids_TK)
        y_TD = self.combine(experts(rows_RD, tokens_per_expert_E), topk_weights_TK, state)
        return y_TD if beside is None else y_TD + beside()
