"""Which mode `dispatch.mode=auto` becomes: decided once per job, from its shape and from what is measured at its start.

A token has q picks on a node that it wants at all. Flat, q rows cross to it. In two hops one crosses, and (1 − 1/R)·q go
on inside, for one in R has arrived already. With bandwidths `across` and `node`, each per rank with all ranks at work:

    flat     q / across                          two hops   c · (1 / across + (1 − 1/R) · q / node)

    two hops can pay when   node / across > c · (1 − 1/R) · q / (q − c)      and q > c

c is what a row costs in two hops beside one that goes straight: 1 for fp32; partial sums and their gradients go home in
fp32, so 1.5 for a two-byte dtype. docs/overlap.md derives it. The criterion knows bytes alone, and two hops take twice as
many collectives; so where it says yes, and the size of a step is known, a few steps of both are tried, and flat is taken
where it is faster by more than such a trial errs.

Source: with c = 1 and q = k/n the criterion published with the TerraceMoE simulator (R = 8: 1.75, 1.31, 1.17 for q = 2, 3,
4). Here q = k / Σ_b p_b at uniform routing, where p_b = 1 − C(E − E_b, k)/C(E, k) is the chance that a token wants node b,
which holds E_b of E experts.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import TokenDispatcher
from dispatch.placement import place_experts
from dispatch.topology import Topology

_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 24
_LONG_ENOUGH_SECONDS = 0.02
_REPETITIONS = 3
_TRIAL_ERROR = 0.05
"""Share of a step by which a trial may be wrong: at 400 Mbit/s one chose what was 5 to 8 % slower over many steps."""


class Bandwidths(NamedTuple):
    """Bytes per second that a rank gets through while all others send too."""

    across: float
    """To other nodes."""
    node: float
    """To other ranks of its node."""


def picks_per_wanted_node(experts_per_node: Sequence[int], top_k: int) -> float:
    """q: picks that a token has, on average, on a node that it wants at all, at uniform routing."""
    num_experts = sum(experts_per_node)
    wanted = [1 - math.comb(num_experts - here, top_k) / math.comb(num_experts, top_k) for here in experts_per_node]
    return top_k / sum(wanted)


def two_hops_pay(
    *,
    experts_per_node: Sequence[int],
    top_k: int,
    ranks_per_node: int,
    bandwidths: Bandwidths,
    row_element_size: int = 4,
) -> bool:
    """The criterion above. ranks_per_node: R, of the expert group; row_element_size: bytes of an element of a row."""
    if len(experts_per_node) < 2:
        return False
    cost = (2 * row_element_size + 2 * 4) / (4 * row_element_size)
    q = picks_per_wanted_node(experts_per_node, top_k)
    if q <= cost:
        return False
    return bandwidths.node / bandwidths.across > cost * (1 - 1 / ranks_per_node) * q / (q - cost)


class StepSize(NamedTuple):
    """What a trial needs to know of a rank's micro-step."""

    num_tokens: int
    hidden_size: int
    dtype: torch.dtype


def resolve_auto(
    config: DispatchConfig,
    *,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup,
    topology: Topology,
    device: torch.device,
    size: StepSize,
    placement: Sequence[int] | None = None,
) -> DispatchConfig:
    """The configuration with `auto` replaced by what it becomes (collective over the whole job if it is auto).

    size.num_tokens 0: not known, no trial. Over several nodes the choice hangs on measurements, so a run that must repeat
    bit by bit names its mode.
    """
    if config.mode is not DispatchMode.auto:
        return config
    bandwidths = measure_bandwidths(topology, device) if needs_bandwidths(topology) else None
    mode = choose_mode(
        experts_per_rank=place_experts(num_experts, dist.get_world_size(group), placement).experts_per_rank,
        top_k=top_k,
        topology=topology,
        bandwidths=bandwidths,
        row_element_size=size.dtype.itemsize,
    )
    if mode is DispatchMode.two_hop and size.num_tokens:
        modes = (DispatchMode.all_to_all, DispatchMode.two_hop)
        candidates = [
            build_dispatcher(
                replace(config, mode=candidate),
                num_experts=num_experts,
                group=group,
                placement=placement,
                topology=topology,
            )
            for candidate in modes
        ]
        flat, hops = time_dispatchers(candidates, num_experts=num_experts, top_k=top_k, size=size, device=device)
        if flat < (1 - _TRIAL_ERROR) * hops:
            mode = DispatchMode.all_to_all
    if bandwidths is not None:
        logging.getLogger(__name__).info(
            "dispatch.mode=auto takes %s: %.3g bytes/s a rank across nodes, %.3g inside", mode.value, *bandwidths
        )
    return replace(config, mode=mode)


def time_dispatchers(
    candidates: Sequence[TokenDispatcher], *, num_experts: int, top_k: int, size: StepSize, device: torch.device
) -> list[float]:
    """Seconds of forward and backward at uniform routing, without experts' work (collective; equal on all ranks)."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(size.num_tokens, size.hidden_size, generator=generator).to(device, size.dtype).requires_grad_()
    ids_TK = torch.rand(size.num_tokens, num_experts, generator=generator).topk(top_k, 1).indices.to(device)
    weights_TK = torch.ones(ids_TK.shape, device=device)

    def step(dispatcher: TokenDispatcher) -> None:
        dispatcher.run(x_TD, ids_TK, weights_TK, lambda rows_RD, _, weight_R=None, /: rows_RD * 1).sum().backward()
        # Reading a number waits for the device, whichever it is.
        float(x_TD.grad.sum() if x_TD.grad is not None else 0.0)

    # In turns, so that what else the machine does meets all of them; the first turn is left out.
    turns = [[_slowest_seconds(partial(step, dispatcher), device) for dispatcher in candidates] for _ in range(4)]
    return [min(times) for times in zip(*turns[1:], strict=True)]


def choose_mode(
    *,
    experts_per_rank: Sequence[int],
    top_k: int,
    topology: Topology,
    bandwidths: Bandwidths | None,
    row_element_size: int = 4,
) -> DispatchMode:
    """What auto becomes. bandwidths: None where they decide nothing, see `needs_bandwidths`."""
    if len(experts_per_rank) == 1:
        return DispatchMode.local
    if not needs_bandwidths(topology):
        return DispatchMode.all_to_all
    assert bandwidths is not None
    size = topology.node_size
    pays = two_hops_pay(
        experts_per_node=[sum(experts_per_rank[i : i + size]) for i in range(0, len(experts_per_rank), size)],
        top_k=top_k,
        ranks_per_node=size,
        bandwidths=bandwidths,
        row_element_size=row_element_size,
    )
    return DispatchMode.two_hop if pays else DispatchMode.all_to_all


def needs_bandwidths(topology: Topology) -> bool:
    """Whether bandwidths decide: the expert group lies on several nodes."""
    return topology.num_nodes > 1


def measure_bandwidths(topology: Topology, device: torch.device) -> Bandwidths:
    """Time all-to-alls across nodes and inside them, with all ranks at once (collective over the whole job).

    Sizes grow until an exchange takes 20 ms or moves 16 MiB, so even a slow link is done in about a second.
    """
    assert topology.cross_group is not None
    across = _all_to_all_bandwidth(topology.cross_group, device)
    # One rank per node: nothing goes inside, and the criterion does not ask.
    node = math.inf if topology.node_size == 1 else _all_to_all_bandwidth(_node_group(topology), device)
    return Bandwidths(across=across, node=node)


def _node_group(topology: Topology) -> dist.ProcessGroup:
    assert topology.node_group is not None
    return topology.node_group


def _all_to_all_bandwidth(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes per second and rank to other ranks of the group; the same answer on every rank of the job."""
    num_ranks = dist.get_world_size(group)
    num_bytes = _FIRST_BYTES
    while True:
        per_rank = num_bytes // num_ranks
        sent = torch.zeros(per_rank * num_ranks, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)

        def exchange(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            dist.all_to_all_single(received, sent, group=group)
            int(received[-1])

        times = [_slowest_seconds(exchange, device) for _ in range(_REPETITIONS)]
        # The first is left out: connections are made in it.
        seconds = statistics.median(times[1:])
        if seconds >= _LONG_ENOUGH_SECONDS or num_bytes >= _MOST_BYTES:
            return per_rank * (num_ranks - 1) / seconds
        num_bytes *= 4


def _slowest_seconds(action: Callable[[], None], device: torch.device) -> float:
    """Time of an action that all ranks begin together, of the slowest rank of the job."""
    dist.barrier()
    started = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
