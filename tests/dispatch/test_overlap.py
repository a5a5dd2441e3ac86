"""Chunks change when things happen, and nothing else. Order is tested as a list of events, never by speed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dispatch.all_to_all import AllToAllDispatcher
from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.exchange import Pending
from dispatch.overlap import Overlap, chunk_sizes
from dispatch.placement import place_experts
from dispatch.topology import build_topology
from dispatch.traffic import Phase
from tests.dispatch.cases import CASES, expert_weights, make_inputs, output_gradient, run_experts, run_layer
from tests.dispatch.slow_link import busy, slow_all_to_all
from tests.process_pool import ProcessPool


def all_to_all(num_experts: int, placement: list[int] | None = None, **overlap: Any) -> AllToAllDispatcher:
    placed = place_experts(num_experts, dist.get_world_size(), placement)
    assert dist.group.WORLD is not None
    return AllToAllDispatcher(placed, dist.group.WORLD, overlap=Overlap(**overlap))


@given(num_tokens=st.integers(0, 1000), chunks=st.integers(1, 20))
def test_chunks_cover_all_tokens_evenly(num_tokens: int, chunks: int) -> None:
    sizes = chunk_sizes(num_tokens, chunks)
    assert len(sizes) == chunks
    assert sum(sizes) == num_tokens
    assert max(sizes) - min(sizes) <= 1


OVERLAPS: list[dict[str, Any]] = [
    {"chunks": 2, "forward": False},
    {"chunks": 3, "backward": False, "shared": False},
    {"chunks": 12},
]


def run_scaled(dispatcher: AllToAllDispatcher, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Experts that multiply elementwise: what they make of a row does not depend on the rows around it."""
    x_TD, ids_TK, weights_TK = (tensor.clone() for tensor in inputs)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    scale_eD = expert_weights(dispatcher.num_experts)[list(dispatcher.local_expert_ids), 0].requires_grad_()
    shared_D = torch.ones(x_TD.shape[1], requires_grad=True)
    y_TD = dispatcher.run(
        x_TD,
        ids_TK,
        weights_TK,
        lambda rows_RD, counts_e: rows_RD * torch.repeat_interleave(scale_eD, counts_e, 0),
        beside=lambda: x_TD * shared_D,
    )
    y_TD.backward(output_gradient(dist.get_rank(), y_TD))
    named = {"grad_x": x_TD.grad, "grad_weights": weights_TK.grad, "grad_experts": scale_eD.grad}
    return {"y": y_TD.detach(), "grad_shared": shared_D.grad, **named}  # type: ignore[dict-item]


def compare_chunked(overlaps: list[dict[str, Any]], dtype: torch.dtype) -> list[str]:
    """Every case and overlap against one chunk; returns what differs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    differences = []
    for case in CASES:
        for num_experts, placement in ((world_size, None), (7, [1, 0, 1, 1, 0, 1, 1])):
            inputs = make_inputs(case, rank, world_size, num_experts, 3)
            plain = run_layer(all_to_all(num_experts, placement), inputs, dtype, rank)
            plain_scaled = run_scaled(all_to_all(num_experts, placement), inputs)
            for overlap in overlaps:
                chunked = run_layer(all_to_all(num_experts, placement, **overlap), inputs, dtype, rank)
                scaled = run_scaled(all_to_all(num_experts, placement, **overlap), inputs)
                where = f"{case}, {num_experts} experts, {overlap}"
                # Each token's sums are the same; only sums over tokens (weights' gradients) are taken in pieces.
                for name in ("y", "grad_x", "grad_weights"):
                    if not torch.equal(scaled[name], plain_scaled[name]):
                        differences.append(f"{where}: bits of {name}")
                for name in ("y", "grad_x", "grad_topk_weights", "grad_experts"):
                    error = (chunked[name].double() - plain[name].double()).norm()
                    size = plain[name].double().norm()
                    if error > (1e-6 if dtype == torch.float32 else 1e-2) * size:
                        differences.append(f"{where}: {name} by {float(error / size)}")
    return differences


@pytest.mark.parametrize(("dtype", "overlaps"), [(torch.float32, OVERLAPS), (torch.bfloat16, [{"chunks": 3}])])
def test_chunks_change_no_result(
    process_pool: Callable[[int], ProcessPool], dtype: torch.dtype, overlaps: list[dict[str, Any]]
) -> None:
    assert process_pool(2).run(compare_chunked, overlaps, dtype) == [[], []]


def checkpointed(use_reentrant: bool) -> tuple[bool, dict[Phase, int]]:
    """Whether a recomputed chunked layer equals the plain one; rows by phase of the recomputed one."""
    rank = dist.get_rank()
    x_TD, ids_TK, weights_TK = make_inputs("last_rank_without_tokens", rank, dist.get_world_size(), 4, 5)
    grads: list[list[Tensor | None]] = []
    for recompute in (False, True):
        dispatcher = all_to_all(4, chunks=3)
        leaf_TD, leaf_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        weight_eDD = expert_weights(4)[list(dispatcher.local_expert_ids)].requires_grad_()

        def layer(
            x_TD: Tensor,
            weights_TK: Tensor,
            dispatcher: AllToAllDispatcher = dispatcher,
            weight_eDD: Tensor = weight_eDD,
        ) -> Tensor:
            return dispatcher.run(
                x_TD, ids_TK, weights_TK, lambda rows, counts: run_experts(rows, counts, weight_eDD), lambda: x_TD.sin()
            )

        if recompute:
            y_TD = checkpoint(layer, leaf_TD, leaf_TK, use_reentrant=use_reentrant)
        else:
            y_TD = layer(leaf_TD, leaf_TK)
        y_TD.square().sum().backward()
        grads.append([leaf_TD.grad, leaf_TK.grad, weight_eDD.grad])
        record = dispatcher.traffic.collect()
    same = all(
        one is not None and other is not None and torch.equal(one, other) for one, other in zip(*grads, strict=True)
    )
    return same, {phase: sum(n for (of, _), n in record.rows.items() if of is phase) for phase in Phase}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_of_chunks_changes_nothing_and_counts_as_such(
    process_pool: Callable[[int], ProcessPool], use_reentrant: bool
) -> None:
    (same_0, rows_0), (same_1, rows_1) = process_pool(2).run(checkpointed, use_reentrant)
    assert same_0
    assert same_1
    # Rank 0 has all 5 tokens with 3 picks. All go out and come home, once in each phase.
    for phase in Phase:
        assert rows_0[phase] + rows_1[phase] == 2 * 15


class _Note(torch.autograd.Function):
    """Writes down when it runs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, events: list[str]) -> Tensor:
        ctx.name, ctx.events = name, events
        events.append(name)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(f"{ctx.name} backward")
        return grad * 2, None, None


def events_of(overlap: dict[str, Any]) -> list[str]:
    """What happens when, on this rank; rank 1 has no tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_TD, ids_TK, weights_TK = make_inputs("last_rank_without_tokens", rank, world_size, 4, 5)
    x_TD.requires_grad_()
    chunks = range(overlap["chunks"])
    there = ["counts", "out 0"]
    for chunk in chunks[1:]:
        there += [f"out {chunk}", f"home {chunk - 1}"]
    there.append(f"home {chunks[-1]}")
    # The reverse exchange of "home 2" takes gradients out to the experts again.
    back = [f"{name} reversed" for name in reversed(there[1:])]
    with slow_all_to_all(there + back) as events:
        number = iter(chunks)

        def experts(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
            return _Note.apply(rows_RD, f"experts {next(number)}", events)

        y_TD = all_to_all(4, **overlap).run(
            x_TD, ids_TK, weights_TK, experts, beside=lambda: _Note.apply(x_TD, "beside", events)
        )
        events.append("backward begins")
        y_TD.sum().backward()
    return events


FORWARD = [
    *("issue counts", "wait counts"),
    *("issue out 0", "beside", "wait out 0", "issue out 1", "experts 0", "issue home 0"),
    *("wait out 1", "issue out 2", "experts 1", "wait home 0", "issue home 1"),
    *("wait out 2", "experts 2", "wait home 1", "issue home 2", "wait home 2"),
]
BACKWARD = [
    *("issue home 2 reversed", "wait home 2 reversed", "issue home 1 reversed"),
    *("experts 2 backward", "issue out 2 reversed", "wait home 1 reversed", "issue home 0 reversed"),
    *("experts 1 backward", "wait out 2 reversed", "issue out 1 reversed", "wait home 0 reversed"),
    *("experts 0 backward", "wait out 1 reversed", "issue out 0 reversed", "beside backward", "wait out 0 reversed"),
]


def test_experts_work_while_rows_are_on_their_way_in_both_directions(
    process_pool: Callable[[int], ProcessPool],
) -> None:
    for events in process_pool(2).run(events_of, {"chunks": 3}):
        assert events == [*FORWARD, "backward begins", *BACKWARD]


def events_of_two_hops() -> list[str]:
    """The same on two nodes of one rank, three chunks, in two hops: ids of all chunks go before the rows."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_TD, ids_TK, weights_TK = make_inputs("last_rank_without_tokens", rank, world_size, 4, 5)
    x_TD.requires_grad_()
    there = ["counts", "out 0", "out 1", "home 0", "out 2", "home 1", "home 2"]
    topology = build_topology(group, 1)
    with slow_all_to_all(there + [f"{name} reversed" for name in reversed(there[1:])]) as events:
        number = iter(range(3))
        dispatcher = build_dispatcher(
            DispatchConfig(mode=DispatchMode.two_hop, chunks=3), num_experts=4, group=group, topology=topology
        )

        def experts(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
            return _Note.apply(rows_RD, f"experts {next(number)}", events)

        y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, experts, lambda: _Note.apply(x_TD, "beside", events))
        events.append("backward begins")
        y_TD.sum().backward()
    topology.close()
    return events


def test_the_hop_across_nodes_is_what_is_left_under_way(process_pool: Callable[[int], ProcessPool]) -> None:
    for events in process_pool(2).run(events_of_two_hops):
        assert events == [*FORWARD, "backward begins", *BACKWARD]


def waits_at_once(events: list[str]) -> bool:
    """Whether every issue is followed by its own wait."""
    issued = [i for i, event in enumerate(events) if event.startswith("issue")]
    return all(events[i + 1] == events[i].replace("issue", "wait") for i in issued)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_direction_is_switched_on_its_own(process_pool: Callable[[int], ProcessPool], direction: str) -> None:
    for events in process_pool(2).run(events_of, {"chunks": 3, direction: False}):
        cut = events.index("backward begins")
        forward, backward = events[:cut], events[cut + 1 :]
        assert waits_at_once(forward) == (direction == "forward")
        assert waits_at_once(backward) == (direction == "backward")
        assert (forward == FORWARD) == (direction == "backward")
        assert (backward == BACKWARD) == (direction == "forward")


def test_shared_experts_run_beside_the_first_exchange_or_last(process_pool: Callable[[int], ProcessPool]) -> None:
    for events in process_pool(2).run(events_of, {"chunks": 1}):
        start = events.index("issue out 0")
        assert events[start : start + 4] == ["issue out 0", "beside", "wait out 0", "experts 0"]
        assert events[-3:] == ["issue out 0 reversed", "beside backward", "wait out 0 reversed"]
    for events in process_pool(2).run(events_of, {"chunks": 1, "shared": False}):
        assert events[events.index("backward begins") - 1] == "beside"
        assert events[events.index("backward begins") + 1] == "beside backward"


def hidden_under_latency(overlap: dict[str, Any]) -> dict[Phase, float]:
    """Hidden fraction per phase where each exchange takes 30 ms and a chunk's experts 100 ms, both without a core."""
    x_TD, ids_TK, weights_TK = make_inputs("random", dist.get_rank(), dist.get_world_size(), 4, 5)
    x_TD.requires_grad_()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            busy(0.1)
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            busy(0.1)
            return grad.clone()

    dispatcher = all_to_all(4, **overlap)
    with slow_all_to_all([str(number) for number in range(1 + 4 * overlap["chunks"])], 0.03):
        dispatcher.run(x_TD, ids_TK, weights_TK, lambda rows, counts: Slow.apply(rows)).sum().backward()
    record = dispatcher.traffic.collect()
    return {
        phase: 1 - record.exposed_seconds[phase] / record.seconds[phase] for phase in (Phase.forward, Phase.backward)
    }


def test_latency_is_hidden_behind_computation_except_at_both_ends(
    process_pool: Callable[[int], ProcessPool],
) -> None:
    """With 4 chunks, 2 of 8 exchanges (and the counts) have nothing beside them; the others may share their time.

    Forward: counts, out 0 and home 3 are exposed; out 1, (home 0, out 2), (home 1, out 3), home 2 run beside experts: 3
    of 7 stretches of time. Backward, without counts: 2 of 6. On a busy machine a stretch may last longer, so the bounds
    are loose; without overlap all but the call that starts an exchange is exposed.
    """
    for hidden in process_pool(2).run(hidden_under_latency, {"chunks": 4}):
        assert hidden[Phase.forward] > 0.4
        assert hidden[Phase.backward] > 0.5
    for hidden in process_pool(2).run(hidden_under_latency, {"chunks": 4, "forward": False, "backward": False}):
        assert hidden[Phase.forward] < 0.2
        assert hidden[Phase.backward] < 0.2


def wants_unevenly(overlap: dict[str, Any]) -> float:
    rank = dist.get_rank()
    x_TD, ids_TK, weights_TK = make_inputs("random", rank, dist.get_world_size(), 4, 6)
    x_TD.requires_grad_(rank == 0)
    all_to_all(4, **overlap).run(x_TD, ids_TK, weights_TK, lambda rows, counts: rows * 2).sum().backward()
    return 0.0 if x_TD.grad is None else float((x_TD.grad - 2 * weights_TK.sum(1, keepdim=True)).abs().max())


def test_backward_of_chunks_ends_when_only_one_rank_wants_a_gradient(
    process_pool: Callable[[int], ProcessPool],
) -> None:
    assert max(process_pool(2).run(wants_unevenly, {"chunks": 3}, timeout=30.0)) < 1e-6


def random_chunked(picks_of_rank: list[list[list[int]]], chunks: int) -> float:
    ids_TK = torch.tensor(picks_of_rank[dist.get_rank()], dtype=torch.int64).view(-1, 2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(len(ids_TK), 6, generator=generator), ids_TK, torch.rand(ids_TK.shape, generator=generator)
    plain = run_layer(all_to_all(5), inputs, torch.float32, dist.get_rank())
    chunked = run_layer(all_to_all(5, chunks=chunks), inputs, torch.float32, dist.get_rank())
    return max(
        float((chunked[name] - plain[name]).norm() / plain[name].norm().clamp(min=1e-30))
        for name in ("y", "grad_x", "grad_topk_weights", "grad_experts")
    )


def test_any_picks_may_be_chunked(process_pool: Callable[[int], ProcessPool]) -> None:
    row = st.lists(st.integers(-1, 4), min_size=2, max_size=2)

    @settings(deadline=None, max_examples=15)
    @given(picks=st.lists(st.lists(row, max_size=9), min_size=2, max_size=2), chunks=st.integers(2, 6))
    def law(picks: list[list[list[int]]], chunks: int) -> None:
        assert max(process_pool(2).run(random_chunked, picks, chunks)) < 1e-6

    law()


def test_a_buffer_is_kept_until_its_exchange_is_over() -> None:
    class Waiting:
        def wait(self) -> None:
            gc.collect()
            assert alive() is not None

    sent = torch.ones(3, 2)
    alive = weakref.ref(sent)
    pending = Pending(sent, torch.zeros(3, 2), Waiting())  # type: ignore[arg-type]
    del sent
    pending.wait()
    gc.collect()
    assert alive() is None
