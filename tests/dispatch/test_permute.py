"""Orders of rows, by hand and by property."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.interface import NOT_DISPATCHED
from dispatch.permute import by_expert_then_source, sort_picks


def test_picks_are_sorted_by_expert_then_token_then_pick() -> None:
    """Three tokens, two picks each, three experts; token 1 drops its second pick.

    token     0      1      2
    experts   2 0    2 −    0 2
    pick      0 1    2 3    4 5

    expert 0: picks 1 (token 0), 4 (token 2)      rows 0 1
    expert 1: none
    expert 2: picks 0 (token 0), 2 (1), 5 (2)     rows 2 3 4
    """
    order = sort_picks(torch.tensor([[2, 0], [2, NOT_DISPATCHED], [0, 2]]), 3)
    assert order.pick_N.tolist() == [1, 4, 0, 2, 5]
    assert order.token_N.tolist() == [0, 2, 0, 1, 2]
    assert order.tokens_per_expert_E.tolist() == [2, 0, 3]
    assert order.tokens_per_expert_E.dtype is torch.int64
    assert order.row_of_pick_KT.tolist() == [[2, 3, 1], [0, -1, 4]]
    assert not order.complete


def test_received_rows_go_from_source_order_to_expert_order() -> None:
    """Two sources, three local experts; a letter is a row.

    arrives   source 0: expert 0 [a b], 1 [], 2 [c]     source 1: expert 0 [d], 1 [e f], 2 []
    wanted    expert 0 [a b d], expert 1 [e f], expert 2 [c]
    """
    arrived = "abcdef"
    reordering = by_expert_then_source(torch.tensor([[2, 0, 1], [1, 2, 0]]), 6)
    wanted = "".join(arrived[row] for row in reordering.source_R.tolist())
    assert wanted == "abdefc"
    assert "".join(wanted[row] for row in reordering.inverse().source_R.tolist()) == arrived


@pytest.mark.parametrize(("ids", "text"), [([[0, 4]], "from 0 to 4"), ([[-2, 1]], "from -2 to 1")])
def test_an_expert_id_out_of_range_is_refused(ids: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=rf"{text} were given to a dispatcher of 4 experts.*0 … 3"):
        sort_picks(torch.tensor(ids), 4)


def test_no_tokens_is_an_order_too() -> None:
    order = sort_picks(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.tokens_per_expert_E.tolist() == [0, 0, 0]
    assert order.pick_N.shape == (0,)
    assert order.row_of_pick_KT.shape == (2, 0)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_an_order_holds_each_kept_pick_once(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(NOT_DISPATCHED, num_experts - 1), min_size=top_k, max_size=top_k)
    picks = data.draw(st.lists(row, max_size=12))
    ids_TK = torch.tensor(picks, dtype=torch.int64).view(len(picks), top_k)
    order = sort_picks(ids_TK, num_experts)
    kept = [pick for pick, expert in enumerate(ids_TK.flatten().tolist()) if expert != NOT_DISPATCHED]
    assert order.pick_N.tolist() == sorted(kept, key=lambda pick: ids_TK.flatten().tolist()[pick])
    assert order.complete == (len(kept) == ids_TK.numel())
    for pick, row_of_pick in enumerate(order.row_of_pick_KT.t().flatten().tolist()):
        assert row_of_pick == (order.pick_N.tolist().index(pick) if pick in kept else NOT_DISPATCHED)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_reordering_sorts_by_expert_and_keeps_the_sources_in_order(data: st.DataObject) -> None:
    num_sources, num_experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 4), min_size=num_experts, max_size=num_experts)
    counts = data.draw(st.lists(row, min_size=num_sources, max_size=num_sources))
    arrived = [(e, s, i) for s in range(num_sources) for e in range(num_experts) for i in range(counts[s][e])]
    reordering = by_expert_then_source(torch.tensor(counts), len(arrived))
    assert [arrived[row] for row in reordering.source_R.tolist()] == sorted(arrived)
    assert reordering.target_R[reordering.source_R].tolist() == list(range(len(arrived)))
