"""Capacity: which picks are kept, worked by hand, against loops, on one rank and on several, and with static shapes."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch.build import build_dispatcher, build_limiter, build_padded_dispatcher, expert_limit
from dispatch.capacity import ExpertLimit, Limiter, expert_capacity, keep_first, priorities, reference_keep_first
from dispatch.config import CapacityScope, DispatchConfig, DispatchMode, DropPolicy
from dispatch.interface import NOT_DISPATCHED
from dispatch.local import LocalDispatcher
from dispatch.padded import PaddedDispatcher
from dispatch.placement import place_experts
from dispatch.topology import one_node
from dispatch.traffic import Traffic
from tests.dispatch.cases import make_inputs, run_layer
from tests.dispatch.test_modes import TOLERANCE, assert_close
from tests.process_pool import ProcessPool

POLICIES = list(DropPolicy)


def limiter(policy: DropPolicy, num_experts: int, top_k: int, factor: float, **changes: Any) -> Limiter:
    """Of one rank."""
    settings: dict[str, Any] = {"min_capacity": 0, "static": False, "channel": None} | changes
    limit = ExpertLimit(num_experts=num_experts, top_k=top_k, factor=factor, **settings)
    return Limiter(policy=policy, seed=0, experts=limit, rank=None)


def limited(limiter: Limiter, ids_TK: Tensor, weights_TK: Tensor, valid_T: Tensor | None = None) -> Tensor:
    keys_TK = torch.randint(-(2**62), 2**62, ids_TK.shape, generator=torch.Generator().manual_seed(5))
    valid_T = torch.ones(ids_TK.shape[0], dtype=torch.bool) if valid_T is None else valid_T
    return limiter.limit(ids_TK, weights_TK, valid_T, keys_TK, layer_index=3, training=True)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "factor", "minimum", "expected"),
    [
        (5, 1, 4, 1.0, 0, 2),  # A19
        (3, 2, 2, 4.0, 0, 3),  # A20: the formula gives 12, there are 3 tokens
        (100, 1, 10, 1.1, 0, 11),  # 1.1 · 10 in floating point is above 11
        (1000, 3, 7, 0.7, 0, 300),  # exactly 300
        (1000, 3, 7, 0.7000001, 0, 300),  # a factor counts to six places
        (10, 1, 10, 0.1, 4, 4),
        (2, 1, 10, 0.1, 4, 2),
        (0, 2, 4, 8.0, 4, 0),
    ],
)
def test_capacity_is_an_exact_integer(
    num_tokens: int, top_k: int, num_experts: int, factor: float, minimum: int, expected: int
) -> None:
    given = {"top_k": top_k, "num_experts": num_experts, "factor": factor, "min_capacity": minimum}
    assert expert_capacity(num_tokens, **given) == expected
    assert int(expert_capacity(torch.tensor(num_tokens), **given)) == expected


@pytest.mark.parametrize(
    ("policy", "kept"), [(DropPolicy.probability, [1, 4]), (DropPolicy.position, [0, 1]), (DropPolicy.random, None)]
)
def test_over_capacity_never_crashes_a19(policy: DropPolicy, kept: list[int] | None) -> None:
    """A19: five tokens want expert 0 of four, capacity ⌈5/4⌉ = 2: two kept and three dropped, whatever the policy."""
    weights_TK = torch.tensor([[0.3], [0.6], [0.4], [0.2], [0.5]])
    ids_TK = limited(limiter(policy, 4, 1, 1.0), torch.zeros(5, 1, dtype=torch.int64), weights_TK)
    found = (ids_TK == 0).flatten().nonzero().flatten().tolist()
    assert len(found) == 2
    assert int((ids_TK == NOT_DISPATCHED).sum()) == 3
    assert kept is None or found == kept
    y_TD = LocalDispatcher(4).run(torch.ones(5, 2), ids_TK, weights_TK, lambda rows, counts, *_: rows)
    for token in range(5):
        # Served by its one expert, with its weight as it was; or nothing, so that the residual path alone goes on.
        assert torch.equal(y_TD[token], weights_TK[token].expand(2) * (token in found))


def test_padding_takes_no_capacity_a18() -> None:
    """A18: six tokens want expert 0, the first three are padding, capacity 3: all three real ones are kept."""
    ids_TK = torch.tensor([[NOT_DISPATCHED]] * 3 + [[0]] * 3)
    valid_T = torch.tensor([False] * 3 + [True] * 3)
    for policy in POLICIES:
        # ⌈3 · 1 · 2 / 2⌉ = 3; with the padding among the tokens it would be 6.
        assert torch.equal(limited(limiter(policy, 2, 1, 2.0), ids_TK, torch.rand(6, 1), valid_T), ids_TK)
        three = limited(limiter(policy, 2, 1, 1.0, min_capacity=1), ids_TK, torch.rand(6, 1), valid_T)
        assert int((three == 0).sum()) == 2, "⌈3/2⌉ of three tokens"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [False, True])
def test_capacity_sweep_a20(policy: DropPolicy, padded: bool) -> None:
    """A20: factor 0.1 … 8, T = 0 … 7, k = 1 … E: no exception, kept ≤ min(capacity, T), dropless when all fits."""
    num_experts = 4
    for factor in (0.1, 0.5, 1.0, 1.25, 2.0, 8.0):
        for num_tokens in range(8):
            for top_k in range(1, num_experts + 1):
                generator = torch.Generator().manual_seed(num_tokens)
                scores_TE = torch.rand(num_tokens, num_experts, generator=generator) + torch.linspace(1, 0, num_experts)
                inputs = (
                    torch.randn(num_tokens, 6, generator=generator),
                    scores_TE.topk(top_k, 1).indices,
                    torch.rand(num_tokens, top_k, generator=generator),
                )
                of_layer = limiter(policy, num_experts, top_k, factor, static=padded)
                ids_TK = limited(of_layer, inputs[1], inputs[2])
                assert of_layer.experts is not None
                capacity = int(of_layer.experts.capacity(num_tokens))
                before, after = (
                    torch.stack([(ids == expert).sum() for expert in range(num_experts)]) for ids in (inputs[1], ids_TK)
                )
                assert torch.equal(after, before.clamp(max=min(capacity, num_tokens)))
                dispatcher = (
                    PaddedDispatcher(place_experts(num_experts, 1), of_layer.experts, None, traffic=Traffic())
                    if padded
                    else LocalDispatcher(num_experts)
                )
                ours = run_layer(dispatcher, (inputs[0], ids_TK, inputs[2]), torch.float32, 0)
                expected = run_layer(LocalDispatcher(num_experts), (inputs[0], ids_TK, inputs[2]), torch.float32, 0)
                if factor * top_k / num_experts >= 1:
                    expected = run_layer(LocalDispatcher(num_experts), inputs, torch.float32, 0)
                for name in ("y", "grad_x", "grad_topk_weights", "grad_experts"):
                    assert_close(name, ours[name], expected[name], TOLERANCE[torch.float32])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_fast_choice_equals_the_loops(data: st.DataObject) -> None:
    num_bins = data.draw(st.integers(1, 5))
    bins = data.draw(st.lists(st.integers(NOT_DISPATCHED, num_bins - 1), max_size=30))
    few = st.lists(st.sampled_from([-(2**62), -1, 0, 1, 2**62]), min_size=len(bins), max_size=len(bins))
    priority = data.draw(st.none() | few)
    limits = data.draw(st.lists(st.integers(0, 8), min_size=num_bins, max_size=num_bins))
    kept = keep_first(
        torch.tensor(bins, dtype=torch.int64),
        None if priority is None else torch.tensor(priority, dtype=torch.int64),
        torch.tensor(limits),
    )
    assert kept.tolist() == reference_keep_first([bins], None if priority is None else [priority], limits)[0]


def test_probabilities_order_as_numbers_do() -> None:
    weights = torch.tensor([[-1.5, -0.0, 0.0, 1e-30, 0.25, 0.5, 1e30]])
    order = priorities(DropPolicy.probability, weights, None)
    assert order is not None
    assert order[0, 1] == order[0, 2]
    assert (order[0, 2:].diff() > 0).all()
    assert order[0, 0] < order[0, 1]


SKEWED = [("skewed", 8, 4), ("random", 7, 5), ("all_to_one", 4, 6), ("first_rank_without_tokens", 6, 7)]


def keys_of(ids_TK: Tensor, rank: int) -> Tensor:
    return torch.randint(-3, 3, ids_TK.shape, generator=torch.Generator().manual_seed(rank))


def limited_on_rank(config: DispatchConfig, placement: list[int] | None) -> list[tuple[Tensor, Tensor, int]]:
    """For each case: this rank's ids before and after, and the rows that its experts then get."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    results = []
    for case, num_experts, seed in SKEWED:
        _, ids_TK, weights_TK = make_inputs(case, rank, world_size, num_experts, seed)
        # Few different weights, so that there are ties between ranks.
        weights_TK = (weights_TK * 4).round() / 4
        top_k = ids_TK.shape[1]
        placed = None if placement is None else placement[:num_experts]
        dispatcher = build_dispatcher(config, num_experts=num_experts, group=group, placement=placed)
        limit = build_limiter(
            config, num_experts=num_experts, top_k=top_k, data_group=group, expert_group=group, placement=placed,
            topology=one_node(group), traffic=dispatcher.traffic, seed=1,
        )  # fmt: skip
        assert limit is not None
        after_TK = limit.limit(
            ids_TK, weights_TK, (ids_TK != NOT_DISPATCHED).any(1), keys_of(ids_TK, rank), layer_index=0, training=True
        )
        counts_e = dispatcher.dispatch(torch.ones(ids_TK.shape[0], 2), after_TK).tokens_per_local_expert_e
        results.append((ids_TK, after_TK, int(counts_e.sum())))
    return results


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_global_capacity_is_that_of_one_process(
    process_pool: Callable[[int], ProcessPool], world_size: int, policy: DropPolicy
) -> None:
    """Ranks that decide together keep what one process would keep of all their tokens in a row, by the loops."""
    config = DispatchConfig(mode=DispatchMode.all_to_all, capacity_factor=0.75, drop_policy=policy)
    by_rank = process_pool(world_size).run(limited_on_rank, config, None)
    for index, (case, num_experts, seed) in enumerate(SKEWED):
        inputs = [make_inputs(case, rank, world_size, num_experts, seed) for rank in range(world_size)]
        num_tokens, top_k = sum(ids.shape[0] for _, ids, _ in inputs), inputs[0][1].shape[1]
        capacity = min(num_tokens, -(-num_tokens * top_k * 3 // (num_experts * 4)))
        priority = [
            priorities(policy, (weights * 4).round() / 4, keys_of(ids, rank))
            for rank, (_, ids, weights) in enumerate(inputs)
        ]
        kept = reference_keep_first(
            [ids.flatten().tolist() for _, ids, _ in inputs],
            None if policy is DropPolicy.position else [p.flatten().tolist() for p in priority if p is not None],
            [capacity] * num_experts,
        )
        for rank in range(world_size):
            before, after, _ = by_rank[rank][index]
            assert torch.equal(before, inputs[rank][1])
            expected = before.flatten().where(torch.tensor(kept[rank], dtype=torch.bool), NOT_DISPATCHED)
            assert torch.equal(after.flatten(), expected), (case, rank)
        if case != "random":
            assert any((after != before).any() for before, after, _ in (of_rank[index] for of_rank in by_rank))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_gets_no_more_rows_than_its_bound(
    process_pool: Callable[[int], ProcessPool], policy: DropPolicy
) -> None:
    """Also when everything goes to one rank; exactly what exceeds is dropped, and is counted where its token lives."""
    bound, placement = 7, [1, 0, 1, 1, 1, 1, 1, 1]
    config = DispatchConfig(mode=DispatchMode.all_to_all, max_rows_per_rank=bound, drop_policy=policy)
    by_rank = process_pool(2).run(limited_on_rank, config, placement)
    for index, (case, _, _) in enumerate(SKEWED):
        before, after, rows = zip(*(of_rank[index] for of_rank in by_rank), strict=True)
        for holder in range(2):
            wanted = sum(int((torch.tensor(placement)[ids] == holder).sum()) for ids in before)
            assert rows[holder] == min(wanted, bound), (case, holder)
        dropped = sum(int((ids == NOT_DISPATCHED).sum()) for ids in after)
        assert dropped == sum(ids.numel() for ids in before) - sum(rows)


def padded_on_rank(placement: list[int] | None) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Static shapes against the reference, on the same limited picks."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    results = []
    for num_experts, factor, num_tokens in ((5, 1.0, 6), (5, 0.4, 6), (5, 4.0, 6), (5, 1.0, 0), (5, 0.01, 9)):
        config = DispatchConfig(
            capacity_factor=factor, pad_to_capacity=True, capacity_scope=CapacityScope["local"], check=rank >= 0
        )
        generator = torch.Generator().manual_seed(rank)
        scores_TE = torch.rand(num_tokens, num_experts, generator=generator) + torch.linspace(1, 0, num_experts)
        ids_TK = scores_TE.topk(3, 1).indices
        if num_tokens:
            ids_TK[-1] = NOT_DISPATCHED
        weights_TK = torch.rand(num_tokens, 3, generator=generator)
        x_TD = torch.randn(num_tokens, 6, generator=generator)
        limit = Limiter(
            policy=DropPolicy.probability,
            seed=0,
            experts=expert_limit(config, num_experts=num_experts, top_k=3, channel=None),
            rank=None,
        )
        inputs = (x_TD, limited(limit, ids_TK, weights_TK), weights_TK)
        padded = build_padded_dispatcher(config, num_experts=num_experts, top_k=3, group=group, placement=placement)
        reference = build_dispatcher(
            DispatchConfig(mode=DispatchMode.reference), num_experts=num_experts, group=group, placement=placement
        )
        results.append(tuple(run_layer(dispatcher, inputs, torch.float32, rank) for dispatcher in (padded, reference)))
    return results


@pytest.mark.parametrize("placement", [None, [1, 0, 1, 1, 1]])
def test_static_shapes_change_nothing(process_pool: Callable[[int], ProcessPool], placement: list[int] | None) -> None:
    for results in process_pool(2).run(padded_on_rank, placement):
        for ours, reference in results:
            for name in ("y", "grad_x", "grad_topk_weights", "grad_experts"):
                assert_close(name, ours[name], reference[name], TOLERANCE[torch.float32])


def unequal_tokens() -> str:
    group = dist.group.WORLD
    assert group is not None
    config = DispatchConfig(capacity_factor=1.0, pad_to_capacity=True)
    dispatcher = build_padded_dispatcher(config, num_experts=4, top_k=1, group=group)
    num_tokens = 4 + dist.get_rank()
    with pytest.raises(ValueError, match="equally many tokens") as caught:
        dispatcher.dispatch(torch.ones(num_tokens, 2), torch.zeros(num_tokens, 1, dtype=torch.int64))
    return str(caught.value)


def test_static_shapes_refuse_unequal_ranks_on_every_rank(process_pool: Callable[[int], ProcessPool]) -> None:
    first, second = process_pool(2).run(unequal_tokens, timeout=30.0)
    assert first == second
    assert "[4, 5]" in first


def test_static_shapes_need_nothing_on_the_host() -> None:
    """On fake tensors, which have shapes and no values, any read of a value raises; nothing here reads one."""
    with FakeTensorMode() as fake:
        of_layer = limiter(DropPolicy.probability, 4, 2, 1.25, static=True)
        ids_TK = torch.zeros(10, 2, dtype=torch.int64)
        x_TD = torch.randn(10, 6, requires_grad=True)
        weights_TK = torch.rand(10, 2, requires_grad=True)
        ids_TK = limited(of_layer, ids_TK, weights_TK)
        assert of_layer.experts is not None
        dispatcher = PaddedDispatcher(place_experts(4, 1), of_layer.experts, None, traffic=Traffic())
        y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, lambda rows, counts, *_: rows * 2)
        y_TD.sum().backward()
        assert x_TD.grad is not None
        assert x_TD.grad.shape == (10, 6)
    with fake, pytest.raises(Exception, match=r"_local_scalar_dense|bincount"):
        LocalDispatcher(4).run(x_TD.detach(), ids_TK, weights_TK.detach(), lambda rows, counts, *_: rows)


class NoValueRead(TorchDispatchMode):
    """Raises where a value of a tensor goes to the host, or a shape hangs on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def static_collectives(seeds: list[int]) -> list[tuple[list[str], list[int]]]:
    """For each routing after the first: all collectives of a step in order, and the sizes of what was sent."""
    group = dist.group.WORLD
    assert group is not None
    config = DispatchConfig(capacity_factor=1.25, pad_to_capacity=True, capacity_scope=CapacityScope["local"])
    dispatcher = build_padded_dispatcher(config, num_experts=6, top_k=2, group=group)
    limit = limiter(DropPolicy.probability, 6, 2, 1.25, static=True)
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        x_TD = torch.randn(9, 4, generator=generator, requires_grad=True)
        weights_TK = torch.rand(9, 2, generator=generator, requires_grad=True)
        ids_TK = torch.rand(9, 6, generator=generator).topk(2, 1).indices
        names: list[str] = []
        sizes: list[int] = []

        def recorded(name: str, original: Any, names: list[str] = names, sizes: list[int] = sizes) -> Any:
            def call(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
                names.append(name)
                sizes.append(sent.numel())
                return original(received, sent, *args, **kwargs)

            return call

        # Lists are read through `tolist`, which goes past the dispatch mode.
        forbidden = Mock(side_effect=AssertionError("tolist waits for the device"))
        with ExitStack() as stack:
            for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce"):
                stack.enter_context(patch.object(dist, name, recorded(name, getattr(dist, name))))
            if seed != seeds[0]:
                stack.enter_context(patch.object(Tensor, "tolist", forbidden))
                stack.enter_context(NoValueRead())
            ids_TK = limited(limit, ids_TK, weights_TK)
            dispatcher.run(x_TD, ids_TK, weights_TK, lambda rows, counts, *_: rows * 2).sum().backward()
        if seed != seeds[0]:
            found.append((names, sizes))
    return found


def test_static_shapes_exchange_rows_alone_after_the_first_call(process_pool: Callable[[int], ProcessPool]) -> None:
    """Two ranks, E = 6, T = 9, K = 2: ⌈9 · 2 · 1.25 / 6⌉ = 4 rows an expert whatever the routing, 6 · 4 rows of 4."""
    for of_rank in process_pool(2).run(static_collectives, [1, 2, 3]):
        for names, sizes in of_rank:
            assert names == ["all_to_all_single"] * 4, "out, home, and each reversed; no counts"
            assert sizes == [6 * 4 * 4] * 4
