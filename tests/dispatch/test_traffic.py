"""What the counters say, against rows counted by hand and against closed forms."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.agreement import HEADER_LENGTH
from dispatch.all_to_all import AllToAllDispatcher
from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.overlap import Overlap
from dispatch.placement import place_experts
from dispatch.traffic import Link, Phase, Traffic, TrafficRecord, links_from
from moe.model.experts import Experts
from tests.dispatch.slow_link import slow_all_to_all
from tests.process_pool import ProcessPool


def links_of(ranks_per_node: int) -> list[str]:
    assert dist.group.WORLD is not None
    return [link.value for link in links_from(dist.group.WORLD, ranks_per_node)]


def test_links_follow_from_consecutive_ranks_of_a_node(process_pool: Callable[[int], ProcessPool]) -> None:
    assert process_pool(2).run(links_of, 1) == [["self", "across"], ["across", "self"]]
    assert process_pool(2).run(links_of, 2) == [["self", "node"], ["node", "self"]]


def hand_worked(dtype: torch.dtype, chunks: int) -> TrafficRecord:
    """Four experts on two nodes of one rank. Rank 0: tokens to (0, 2) and (1, 3); rank 1: one token to (0, 1)."""
    picks = [[[0, 2], [1, 3]], [[0, 1]]][dist.get_rank()]
    assert dist.group.WORLD is not None
    dispatcher = AllToAllDispatcher(
        place_experts(4, 2), dist.group.WORLD, ranks_per_node=1, overlap=Overlap(chunks=chunks)
    )
    x_TD = torch.ones(len(picks), 3, dtype=dtype, requires_grad=True)
    weights_TK = torch.ones(len(picks), 2)
    dispatcher.run(x_TD, torch.tensor(picks), weights_TK, lambda rows, counts: rows * 2).sum().backward()
    record = dispatcher.traffic.collect()
    assert dispatcher.traffic.collect().rows == {}
    return record


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("dtype", "row_bytes"), [(torch.float32, 12), (torch.bfloat16, 6)])
def test_rows_and_bytes_of_a_layer_worked_by_hand(
    process_pool: Callable[[int], ProcessPool], dtype: torch.dtype, row_bytes: int, chunks: int
) -> None:
    """Rank 0 keeps rows (0, 1) and sends (2, 3); rank 1 sends both of its rows. All come back, and so do gradients."""
    zero, one = process_pool(2).run(hand_worked, dtype, chunks)
    for phase in (Phase.forward, Phase.backward):
        # Rank 0: out 2 to itself, 2 across; home 2 to itself, 2 to rank 1.
        assert zero.rows_over(Link.self, phase) == 4
        assert zero.rows_over(Link.across, phase) == 4
        assert one.rows_over(Link.self, phase) == 0
        assert one.rows_over(Link.across, phase) == 4
        assert zero.rows_over(Link.node, phase) == one.rows_over(Link.node, phase) == 0
    assert zero.bytes_over(Link.across, Phase.backward) == 4 * row_bytes
    # Forward also tells the other rank a header once, to agree on terms, and how many rows of each chunk its two experts
    # get, behind a header.
    told = zero.bytes_over(Link.across, Phase.forward) - 4 * row_bytes
    assert told == 8 * (HEADER_LENGTH + HEADER_LENGTH + 2 * chunks)
    for record in (zero, one):
        assert 0 <= record.total_exposed_seconds <= record.total_seconds
        assert record.seconds[Phase.recompute] == 0


def rows_at_uniform_routing(ranks_per_node: int, num_tokens: int) -> tuple[int, int]:
    """(rows across nodes in forward's first half as counted, the same from the picks alone)."""
    num_experts, top_k, rank = 192, 4, dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, 1).indices
    assert dist.group.WORLD is not None
    dispatcher = AllToAllDispatcher(place_experts(num_experts, 8), dist.group.WORLD, ranks_per_node=ranks_per_node)
    with torch.no_grad():
        dispatcher.dispatch(torch.zeros(num_tokens, 1), ids_TK)
    node_TK = ids_TK // (num_experts // 8) // ranks_per_node
    return (
        dispatcher.traffic.collect().rows_over(Link.across),
        int((node_TK != rank // ranks_per_node).sum()),
    )


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_rows_across_nodes_match_the_closed_form(
    process_pool: Callable[[int], ProcessPool], ranks_per_node: int
) -> None:
    """k(n − 1)/n per token: 2.00 on 2 nodes, 3.00 on 4, for k = 4 of 192 experts."""
    num_tokens, nodes = 256, 8 // ranks_per_node
    results = process_pool(8).run(rows_at_uniform_routing, ranks_per_node, num_tokens)
    assert all(counted == expected for counted, expected in results)
    per_token = sum(counted for counted, _ in results) / (8 * num_tokens)
    expected = 4 * (nodes - 1) / nodes
    # Four standard deviations of the mean over 2048 tokens: a token's picks vary by at most k · p(1 − p).
    assert abs(per_token - expected) < 4 * math.sqrt(4 * (nodes - 1) / nodes**2 / 2048)


def seconds_under_latency() -> TrafficRecord:
    assert dist.group.WORLD is not None
    dispatcher = AllToAllDispatcher(place_experts(2, 2), dist.group.WORLD)
    x_TD = torch.ones(2, 3, requires_grad=True)
    with slow_all_to_all(["counts", "out", "home", "home reversed", "out reversed"], 0.05):
        dispatcher.run(x_TD, torch.tensor([[0], [1]]), torch.ones(2, 1), lambda rows, counts: rows * 2).sum().backward()
    return dispatcher.traffic.collect()


def test_seconds_are_those_the_link_took_and_the_step_waited(process_pool: Callable[[int], ProcessPool]) -> None:
    for record in process_pool(2).run(seconds_under_latency):
        assert record.seconds[Phase.forward] >= 0.15
        assert record.seconds[Phase.backward] >= 0.10
        assert record.exposed_seconds[Phase.forward] > 0.8 * record.seconds[Phase.forward]
        assert record.hidden_fraction is not None
        assert record.hidden_fraction < 0.2


class FakeClock:
    """Time that a test sets."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def reached(self, mark: float) -> bool:
        return mark <= self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start


class FakeWork:
    """An exchange that takes until `ends`."""

    def __init__(self, clock: FakeClock, ends: float, futures: bool) -> None:
        self._clock, self._ends, self._futures = clock, ends, futures
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._futures:
            raise RuntimeError("no futures here")
        return self._future

    def pass_time(self, now: float) -> None:
        if now >= self._ends and not self._future.done():
            self._clock.now = self._ends
            self._future.set_result(None)
        self._clock.now = now

    def wait(self) -> None:
        self.pass_time(max(self._clock.now, self._ends))


@pytest.mark.parametrize("futures", [True, False])
def test_time_with_two_exchanges_under_way_counts_once(futures: bool) -> None:
    """One from 0 to 4, waited for from 1; one from 1 to 6, waited for from 4.5, computing from 4 to 4.5."""
    clock, traffic, device = FakeClock(), Traffic(), torch.device("cpu")
    traffic._clock = clock
    first, second = FakeWork(clock, 4, futures), FakeWork(clock, 6, futures)
    one = traffic.issue(Phase.forward, device, lambda: first)  # type: ignore[arg-type, return-value]
    clock.now = 1
    two = traffic.issue(Phase.forward, device, lambda: second)  # type: ignore[arg-type, return-value]
    one.wait()
    clock.now = 4.5
    two.wait()
    record = traffic.collect()
    assert record.total_seconds == 6
    assert record.total_exposed_seconds == 4.5
    assert record.hidden_fraction == 0.25


def test_an_exchange_over_before_its_wait_is_hidden() -> None:
    clock, traffic = FakeClock(), Traffic()
    traffic._clock = clock
    work = FakeWork(clock, 2, True)
    timed = traffic.issue(Phase.backward, torch.device("cpu"), lambda: work)  # type: ignore[arg-type, return-value]
    work.pass_time(5)
    timed.wait()
    record = traffic.collect()
    assert (record.seconds[Phase.backward], record.exposed_seconds[Phase.backward]) == (2, 0)


def test_counters_stay_small_when_nobody_reads_them_a44() -> None:
    """A44: nothing grows with the number of forwards, read or not."""
    clock, traffic = FakeClock(), Traffic()
    traffic._clock = clock
    for number in range(100):
        clock.now = 2 * number
        work = FakeWork(clock, 2 * number + 1, True)
        traffic.issue(Phase.forward, torch.device("cpu"), lambda work=work: work).wait()  # type: ignore[misc]
        assert len(traffic._tickets) + len(traffic._waits) <= 2
    assert traffic.collect().total_seconds == 100


def test_without_communication_there_is_no_hidden_fraction() -> None:
    assert Traffic().collect().hidden_fraction is None


def share_of_counting() -> float:
    """Computing time in the counters over that of forward and backward of a layer in four chunks, on this rank."""
    group = dist.group.WORLD
    assert group is not None
    config = DispatchConfig(mode=DispatchMode.all_to_all, chunks=4)
    dispatcher = build_dispatcher(config, num_experts=16, group=group)
    experts = Experts(8, 128, 256)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            started = time.thread_time()
            result = function(*args)
            spent[0] += time.thread_time() - started
            return result

        return wrapper

    def issue(traffic: Traffic, phase: Phase, device: torch.device, start: Callable[[], dist.Work]) -> Any:
        started, outside = time.thread_time(), [0.0]

        def start_timed() -> dist.Work:
            begun = time.thread_time()
            work = start()
            outside[0] = time.thread_time() - begun
            return work

        result = plain_issue(traffic, phase, device, start_timed)
        spent[0] += time.thread_time() - started - outside[0]
        return result

    plain_issue = Traffic.issue
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(2048, 128, generator=generator, requires_grad=True)
    ids_TK = torch.rand(2048, 16, generator=generator).topk(4, 1).indices
    weights_TK = torch.rand(2048, 4, generator=generator)
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traffic, "issue", issue)
        for name in ("count", "count_bytes", "_waited"):
            patch.setattr(Traffic, name, timed(getattr(Traffic, name)))
        for _ in range(8):
            spent[0], started = 0.0, time.thread_time()
            dispatcher.run(x_TD, ids_TK, weights_TK, experts).sum().backward()
            dispatcher.traffic.collect()
            shares.append(spent[0] / (time.thread_time() - started))
    # Cold caches, of this process or after a neighbour's turn on the core, are no part of what counting costs.
    return min(shares)


def test_counting_costs_less_than_a_hundredth_of_a_step(process_pool: Callable[[int], ProcessPool]) -> None:
    """Of a small layer, whose 16 exchanges a step have little to hide behind. Waiting is no computing, so not in it."""
    assert max(process_pool(2).run(share_of_counting)) < 0.01
