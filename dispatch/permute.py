"""Orders of rows: pure functions on integers, used on the token path before and after rows move.

Legend: T tokens, K picks per token, E experts (or slots), N kept picks, P source ranks, e local experts,
R received rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.interface import NOT_DISPATCHED


@dataclass(frozen=True, slots=True, kw_only=True)
class PickOrder:
    """The kept picks of this rank, sorted by expert, then token, then pick. Row n of the sorted rows is pick n here."""

    num_tokens: int
    """T."""
    pick_N: Tensor
    """int64: flat pick t · K + k of row n."""
    token_N: Tensor
    """int64: token t of row n."""
    row_of_pick_KT: Tensor
    """int64: row of pick (t, k), or NOT_DISPATCHED. Pick-major, since sums over picks read it one k at a time."""
    tokens_per_expert_E: Tensor
    """int64, sums to N."""
    complete: bool
    """Whether every pick is kept (N = T·K), so that no masking is needed."""


def sort_picks(topk_expert_ids_TK: Tensor, num_experts: int) -> PickOrder:
    """Sort the picks that go somewhere by expert, then token, then pick.

    topk_expert_ids_TK: int64, 0 … num_experts − 1, or NOT_DISPATCHED. One token may pick an expert more than once.

    Raises ValueError when an id is outside that range.
    """
    num_tokens, top_k = topk_expert_ids_TK.shape
    # Shifted by one, NOT_DISPATCHED counts as bin 0 and sorts first; an id out of range shows in the number of bins.
    bin_M = (topk_expert_ids_TK - NOT_DISPATCHED).flatten()
    try:
        count_per_bin = torch.bincount(bin_M, minlength=num_experts + 1)
    except RuntimeError as error:
        raise ValueError(_range_message(topk_expert_ids_TK, num_experts)) from error
    if count_per_bin.numel() != num_experts + 1:
        raise ValueError(_range_message(topk_expert_ids_TK, num_experts))
    num_left_out = int(count_per_bin[0])
    pick_N = torch.argsort(bin_M, stable=True)[num_left_out:]
    row_of_pick_M = torch.full_like(bin_M, NOT_DISPATCHED)
    row_of_pick_M[pick_N] = torch.arange(pick_N.numel(), device=pick_N.device)
    return PickOrder(
        num_tokens=num_tokens,
        pick_N=pick_N,
        token_N=torch.div(pick_N, top_k, rounding_mode="floor"),
        row_of_pick_KT=row_of_pick_M.view(num_tokens, top_k).t().contiguous(),
        tokens_per_expert_E=count_per_bin[1:],
        complete=num_left_out == 0,
    )


def check_ids(topk_expert_ids_TK: Tensor, num_experts: int) -> None:
    """Raise ValueError when an id is neither NOT_DISPATCHED nor that of an expert."""
    if topk_expert_ids_TK.numel():
        low, high = torch.aminmax(topk_expert_ids_TK)
        if low < NOT_DISPATCHED or high >= num_experts:
            raise ValueError(_range_message(topk_expert_ids_TK, num_experts))


def _range_message(topk_expert_ids_TK: Tensor, num_experts: int) -> str:
    low, high = int(topk_expert_ids_TK.min()), int(topk_expert_ids_TK.max())
    return (
        f"expert ids from {low} to {high} were given to a dispatcher of {num_experts} experts; an id must be "
        f"{NOT_DISPATCHED} (goes nowhere) or in 0 … {num_experts - 1}: check moe.num_experts on the router and here"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """A bijection of R rows: row i of the result is row source_R[i] of the input, and target_R is its inverse."""

    source_R: Tensor
    target_R: Tensor

    def inverse(self) -> "Reordering":
        """The way back."""
        return Reordering(source_R=self.target_R, target_R=self.source_R)


def by_expert_then_source(rows_per_source_and_expert_Pe: Tensor, num_rows: int) -> Reordering:
    """From rows sorted by (source rank, local expert) to rows sorted by (local expert, source rank).

    rows_per_source_and_expert_Pe: int64, sums to num_rows. Inside a block of one source and expert the order stays.
    """
    count_eP = rows_per_source_and_expert_Pe.t()
    first_row_before_Pe = _exclusive_cumsum(rows_per_source_and_expert_Pe.flatten()).view_as(
        rows_per_source_and_expert_Pe
    )
    first_row_after_eP = _exclusive_cumsum(count_eP.flatten()).view_as(count_eP)
    shift_eP = first_row_before_Pe.t() - first_row_after_eP
    shift_R = torch.repeat_interleave(shift_eP.flatten(), count_eP.flatten(), output_size=num_rows)
    rows_R = torch.arange(num_rows, device=shift_R.device)
    source_R = rows_R + shift_R
    target_R = torch.empty_like(source_R)
    target_R[source_R] = rows_R
    return Reordering(source_R=source_R, target_R=target_R)


def _exclusive_cumsum(count_N: Tensor) -> Tensor:
    return torch.cumsum(count_N, 0) - count_N
