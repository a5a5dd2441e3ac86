"""Laws of dispatch and combine, a layout worked by hand, and faults that other trainers had (numbers in the names)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import NOT_DISPATCHED, TokenDispatcher
from tests.dispatch.cases import compare_with_reference, expert_weights, make_inputs, run_experts, run_layer
from tests.dispatch.test_modes import TOLERANCE, assert_close
from tests.process_pool import ProcessPool

DISTRIBUTED_MODES = ["all_to_all", "reference"]


def build(mode: str, num_experts: int, placement: list[int] | None = None) -> TokenDispatcher:
    config = DispatchConfig(mode=DispatchMode[mode])
    return build_dispatcher(config, num_experts=num_experts, group=dist.group.WORLD, placement=placement)


def hand_worked(mode: str) -> dict[str, Any]:
    rank = dist.get_rank()
    x_TD = torch.tensor([[[10.0], [20.0]], [[30.0], [40.0]]][rank], requires_grad=True)
    ids_TK = torch.tensor([[[3, 0], [0, NOT_DISPATCHED]], [[2, 0], [0, 3]]][rank])
    weights_TK = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[1.0, 2.0], [0.5, 0.25]]][rank], requires_grad=True)
    dispatcher = build(mode, 4)
    rows_RD, counts_e, state = dispatcher.dispatch(x_TD, ids_TK)
    scale = torch.tensor([float(expert + 1) for expert in dispatcher.local_expert_ids])
    y_TD = dispatcher.combine(rows_RD * torch.repeat_interleave(scale, counts_e).unsqueeze(1), weights_TK, state)
    y_TD.sum().backward()
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return {
        "rows": rows_RD.flatten().tolist(),
        "counts": counts_e.tolist(),
        "y": y_TD.flatten().tolist(),
        "grad_x": x_TD.grad.flatten().tolist(),
        "grad_weights": weights_TK.grad.tolist(),
    }


@pytest.mark.parametrize("mode", DISTRIBUTED_MODES)
def test_two_ranks_by_hand(process_pool: Callable[[int], ProcessPool], mode: str) -> None:
    """Four experts, 0 and 1 on rank 0, 2 and 3 on rank 1; expert e multiplies by e + 1.

    rank 0   token a = 10 -> experts 3 (weight ¼), 0 (¾)      token b = 20 -> expert 0 (½), dropped (½)
    rank 1   token c = 30 -> experts 2 (1), 0 (2)             token d = 40 -> experts 0 (½), 3 (¼)

    rank 0 gets   expert 0: a b | c d       expert 1: nothing          rows 10 20 30 40, counts 4 0
    rank 1 gets   expert 2: c               expert 3: a | d            rows 30 10 40, counts 1 2

    a = ¼·4·10 + ¾·1·10 = 17.5    da = ¼·4 + ¾·1 = 1.75     dweights 40 10
    b = ½·1·20 = 10               db = ½                    dweights 20 0
    c = 1·3·30 + 2·1·30 = 150     dc = 3 + 2 = 5            dweights 90 30
    d = ½·1·40 + ¼·4·40 = 60      dd = ½ + 1 = 1.5          dweights 40 160
    """
    assert process_pool(2).run(hand_worked, mode) == [
        {
            "rows": [10, 20, 30, 40],
            "counts": [4, 0],
            "y": [17.5, 10],
            "grad_x": [1.75, 0.5],
            "grad_weights": [[40, 10], [20, 0]],
        },
        {
            "rows": [30, 10, 40],
            "counts": [1, 2],
            "y": [150, 60],
            "grad_x": [5, 1.5],
            "grad_weights": [[90, 30], [40, 160]],
        },
    ]


def there_and_back(mode: str, dtype: torch.dtype) -> bool:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    same = True
    for num_tokens in (0, 1, 17 + rank):
        x_TD = torch.randn(num_tokens, 5, generator=generator).to(dtype)
        ids_TK = torch.randint(0, 7, (num_tokens, 1), generator=generator)
        dispatcher = build(mode, 7)
        rows_RD, _, state = dispatcher.dispatch(x_TD, ids_TK)
        same = same and torch.equal(dispatcher.combine(rows_RD, torch.ones(num_tokens, 1), state), x_TD)
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "mode"), [(1, "local"), (2, "all_to_all"), (2, "reference")])
def test_dispatch_then_combine_is_identity(
    process_pool: Callable[[int], ProcessPool], world_size: int, mode: str, dtype: torch.dtype
) -> None:
    assert all(process_pool(world_size).run(there_and_back, mode, dtype))


def repeated_run(mode: str) -> bool:
    inputs = make_inputs("random", dist.get_rank(), dist.get_world_size(), 6, 3)
    first, second = (run_layer(build(mode, 6), inputs, torch.bfloat16, dist.get_rank()) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_two_runs_give_the_same_bits(process_pool: Callable[[int], ProcessPool]) -> None:
    assert all(process_pool(2).run(repeated_run, "all_to_all"))


def checkpointed_run(mode: str, use_reentrant: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """With and without activation checkpointing; rank 1 has no tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_TD, ids_TK, weights_TK = make_inputs("last_rank_without_tokens", rank, world_size, 4, 5)
    results = []
    for recompute in (False, True):
        dispatcher = build(mode, 4)
        x_TD = x_TD.detach().clone().requires_grad_()
        weights_TK = weights_TK.detach().clone().requires_grad_()
        weight_eDD = expert_weights(4)[list(dispatcher.local_expert_ids)].requires_grad_()

        def layer(
            x_TD: Tensor, weights_TK: Tensor, dispatcher: TokenDispatcher = dispatcher, weight_eDD: Tensor = weight_eDD
        ) -> Tensor:
            return dispatcher.run(x_TD, ids_TK, weights_TK, lambda rows, counts: run_experts(rows, counts, weight_eDD))

        y_TD = (
            checkpoint(layer, x_TD, weights_TK, use_reentrant=use_reentrant) if recompute else layer(x_TD, weights_TK)
        )
        y_TD.square().sum().backward()
        grads = {"x": x_TD.grad, "weights": weights_TK.grad, "experts": weight_eDD.grad}
        results.append({name: grad for name, grad in grads.items() if grad is not None})
    return results[0], results[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_changes_nothing(process_pool: Callable[[int], ProcessPool], use_reentrant: bool) -> None:
    for plain, recomputed in process_pool(2).run(checkpointed_run, "all_to_all", use_reentrant):
        assert plain.keys() == recomputed.keys() == {"x", "weights", "experts"}
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def uneven_wants(mode: str) -> float:
    """Only rank 0's tokens want a gradient; every rank must still take part in the backward exchange."""
    rank = dist.get_rank()
    x_TD, ids_TK, weights_TK = make_inputs("random", rank, dist.get_world_size(), 4, 6)
    x_TD.requires_grad_(rank == 0)
    build(mode, 4).run(x_TD, ids_TK, weights_TK, lambda rows, counts: rows * 2).sum().backward()
    return 0.0 if x_TD.grad is None else float((x_TD.grad - 2 * weights_TK.sum(1, keepdim=True)).abs().max())


@pytest.mark.parametrize("mode", DISTRIBUTED_MODES)
def test_backward_ends_when_only_one_rank_wants_a_gradient(
    process_pool: Callable[[int], ProcessPool], mode: str
) -> None:
    assert max(process_pool(2).run(uneven_wants, mode, timeout=30.0)) < 1e-6


@pytest.mark.parametrize(
    "case", ["first_half_of_experts_only", "first_rank_without_tokens", "last_rank_without_tokens"]
)
def test_a_rank_without_tokens_gets_zero_gradients_a21(process_pool: Callable[[int], ProcessPool], case: str) -> None:
    """A21: all tokens go to experts 0 and 1 of rank 0, or a source rank has none; backward ends and gradients exist."""
    cases = [(case, 4, 4, None)]
    of_rank = [
        results[0] for results in process_pool(2).run(compare_with_reference, "all_to_all", cases, torch.float32)
    ]
    for ours, reference in of_rank:
        for name, expected in reference.items():
            assert_close(name, ours[name], expected, TOLERANCE[torch.float32])
    if case == "first_half_of_experts_only":
        assert of_rank[1][0]["rows"].shape[0] == 0
        assert torch.equal(of_rank[1][0]["grad_experts"], torch.zeros_like(of_rank[1][0]["grad_experts"]))


def padding_takes_nothing(mode: str) -> tuple[list[int], list[float]]:
    # The first real token brings NaN and padding has NaN weights: neither may leak into another token's output.
    x_TD = torch.tensor([[1.0], [2.0], [3.0], [float("nan")], [5.0], [6.0]])
    ids_TK = torch.tensor([[NOT_DISPATCHED]] * 3 + [[0]] * 3)
    dispatcher = build(mode, 2)
    rows_RD, counts_e, state = dispatcher.dispatch(x_TD, ids_TK)
    weights_TK = torch.tensor([[float("nan")]] * 3 + [[1.0]] * 3)
    return counts_e.tolist(), dispatcher.combine(rows_RD, weights_TK, state).flatten().tolist()


@pytest.mark.parametrize(("world_size", "mode"), [(1, "local"), (1, "reference"), (2, "all_to_all"), (2, "reference")])
def test_padding_is_not_dispatched_a18(process_pool: Callable[[int], ProcessPool], world_size: int, mode: str) -> None:
    """A18, the part of dispatch: six tokens want expert 0, the first three are padding: three rows per rank arrive."""
    results = process_pool(world_size).run(padding_takes_nothing, mode)
    assert [count for counts, _ in results for count in counts] == [3 * world_size, 0]
    for _, y in results:
        assert y[:3] + y[4:] == [0, 0, 0, 5, 6]
        assert math.isnan(y[3])


def test_combine_weights_get_the_same_gradient_under_ep_a29(process_pool: Callable[[int], ProcessPool]) -> None:
    """A29: expert parallel 2 against one rank, same tokens, every mode: equal, non-zero gradients of the weights."""
    num_experts = 4
    for mode in DISTRIBUTED_MODES:
        cases = [("random", num_experts, 8, None)]
        of_rank = process_pool(2).run(compare_with_reference, mode, cases, torch.float32)
        for rank in range(2):
            alone = build_dispatcher(DispatchConfig(), num_experts=num_experts, group=None)
            expected = run_layer(alone, make_inputs("random", rank, 2, num_experts, 8), torch.float32, rank)
            actual = of_rank[rank][0][0]["grad_topk_weights"]
            assert actual.abs().min() > 0
            assert_close("grad_topk_weights", actual, expected["grad_topk_weights"], TOLERANCE[torch.float32])


def random_layer(data: st.DataObject, world_size: int) -> tuple[int, list[tuple[Tensor, Tensor, Tensor]]]:
    num_experts = data.draw(st.integers(world_size, 9), label="experts")
    top_k = data.draw(st.integers(1, min(4, num_experts)), label="top_k")
    of_rank = []
    for rank in range(world_size):
        row = st.lists(st.integers(NOT_DISPATCHED, num_experts - 1), min_size=top_k, max_size=top_k)
        picks = data.draw(st.lists(row, max_size=9), label=f"picks of rank {rank}")
        generator = torch.Generator().manual_seed(rank)
        ids_TK = torch.tensor(picks, dtype=torch.int64).view(len(picks), top_k)
        x_TD = torch.randn(len(picks), 6, generator=generator)
        of_rank.append((x_TD, ids_TK, torch.rand(ids_TK.shape, generator=generator)))
    return num_experts, of_rank


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_local_equals_reference_for_any_picks(data: st.DataObject) -> None:
    num_experts, (inputs,) = random_layer(data, 1)
    ours, reference = (
        run_layer(
            build_dispatcher(DispatchConfig(mode=mode), num_experts=num_experts, group=None), inputs, torch.float32, 0
        )
        for mode in (DispatchMode.local, DispatchMode.reference)
    )
    for name, expected in reference.items():
        assert_close(name, ours[name], expected, TOLERANCE[torch.float32])


def compare_given(
    num_experts: int, inputs_of_rank: list[tuple[Tensor, Tensor, Tensor]], placement: list[int] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank = dist.get_rank()
    ours, reference = (
        run_layer(build(mode, num_experts, placement), inputs_of_rank[rank], torch.float32, rank)
        for mode in ("all_to_all", "reference")
    )
    return ours, reference


def test_all_to_all_equals_reference_for_any_picks_and_placement(process_pool: Callable[[int], ProcessPool]) -> None:
    @settings(deadline=None, max_examples=15)
    @given(data=st.data())
    def law(data: st.DataObject) -> None:
        num_experts, inputs_of_rank = random_layer(data, 2)
        rest = data.draw(st.lists(st.integers(0, 1), min_size=num_experts - 2, max_size=num_experts - 2))
        placement = data.draw(st.permutations([0, 1, *rest]), label="placement")
        for ours, reference in process_pool(2).run(compare_given, num_experts, inputs_of_rank, placement):
            for name, expected in reference.items():
                assert_close(name, ours[name], expected, TOLERANCE[torch.float32])

    law()
