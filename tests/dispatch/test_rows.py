"""Sums over picks go piece by piece on a CPU: the same bits whatever the size of a piece, and the right ones."""

import pytest
import torch
from torch import Tensor

from dispatch import rows
from dispatch.interface import NOT_DISPATCHED
from dispatch.permute import sort_picks


def run(ids_TK: Tensor, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    order = sort_picks(ids_TK, 5)
    rows_ND = torch.randn(order.pick_N.numel(), 6, generator=generator).to(dtype).requires_grad_()
    x_TD = torch.randn(ids_TK.shape[0], 6, generator=generator).to(dtype).requires_grad_()
    weights_TK = torch.rand(ids_TK.shape, generator=generator).requires_grad_()
    y_TD = rows.sum_rows(rows_ND + rows.gather_rows(x_TD, order), weights_TK, order)
    y_TD.backward(torch.randn(y_TD.shape, generator=generator).to(dtype))
    assert rows_ND.grad is not None
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return [y_TD.detach(), rows_ND.grad, x_TD.grad, weights_TK.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("complete", [True, False])
def test_pieces_change_no_bit(complete: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.rand(13, 5, generator=generator).topk(3, 1).indices
    if not complete:
        ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 0.4, NOT_DISPATCHED)
    whole = run(ids_TK, dtype)
    for elements in (1, 6 * 4, 6 * 13):
        monkeypatch.setattr(rows, "_PIECE_ELEMENTS", elements)
        assert all(torch.equal(one, other) for one, other in zip(whole, run(ids_TK, dtype), strict=True))


def test_sum_is_by_ascending_pick_in_fp32_and_rounded_once() -> None:
    """Two experts, one token; in bf16 the sum 256 + 1 + 1 by steps would stay 256, rounded once it is 258."""
    order = sort_picks(torch.tensor([[1, 0, 0]]), 2)
    rows_ND = torch.tensor([[1.0], [1.0], [256.0]], dtype=torch.bfloat16)
    assert rows.sum_over_picks(rows_ND, None, order, torch.bfloat16).tolist() == [[258.0]]
    assert rows.sum_over_picks(rows_ND, torch.tensor([[0.5, 1.0, 2.0]]), order).tolist() == [[131.0]]
