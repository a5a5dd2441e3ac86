"""What crosses between nodes, against closed forms and against a count by hand; odd numbers of ranks; any case at all."""

from collections.abc import Callable, Sequence
from math import comb

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import NOT_DISPATCHED
from dispatch.placement import place_experts
from dispatch.topology import Topology, build_topology, grid_shape, one_node
from dispatch.traffic import Link, Phase
from tests.dispatch.cases import Variant, make_inputs, run_layer, topologies
from tests.dispatch.test_modes import TOLERANCE, assert_close
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]
MODES = ("all_to_all", "all_gather", "two_hop")
NUM_EXPERTS, TOP_K, NUM_TOKENS, HIDDEN = 192, 4, 2048, 2


def crossing_rows(mode: str, ids: Sequence[Sequence[int]], rank: int, rank_of: Sequence[int], node_size: int) -> int:
    """Rows that tokens of a rank send to other nodes on their way out, counted token by token."""
    own, nodes = rank // node_size, (max(rank_of) + 1) // node_size
    rows = 0
    for picks in ids:
        targets = [rank_of[expert] // node_size for expert in picks if expert != NOT_DISPATCHED]
        if mode == "all_gather":
            rows += nodes - 1
        elif mode == "two_hop":
            rows += len(set(targets) - {own})
        else:
            rows += sum(target != own for target in targets)
    return rows


def closed_form(mode: str, nodes: int) -> float:
    """Rows per token at uniform routing."""
    if mode == "all_gather":
        return nodes - 1
    if mode == "two_hop":
        away = comb(NUM_EXPERTS - NUM_EXPERTS // nodes, TOP_K) / comb(NUM_EXPERTS, TOP_K)
        return (nodes - 1) * (1 - away)
    return TOP_K * (nodes - 1) / nodes


def uniform_ids(rank: int) -> Tensor:
    scores_TE = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(rank))
    return scores_TE.topk(TOP_K, 1).indices


def crossings_on_rank(node_size: int) -> dict[str, tuple[int, int, int]]:
    """Per mode: rows counted across nodes in forward (out and home) and in backward, and a count by hand."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    ids_TK = uniform_ids(rank)
    rank_of = place_experts(NUM_EXPERTS, dist.get_world_size()).rank_of_expert
    found = {}
    topology = build_topology(group, node_size)
    for mode in MODES:
        dispatcher = build_dispatcher(
            DispatchConfig(mode=DispatchMode[mode]), num_experts=NUM_EXPERTS, group=group, topology=topology
        )
        x_TD = torch.ones(NUM_TOKENS, HIDDEN, requires_grad=True)
        dispatcher.run(x_TD, ids_TK, torch.ones(NUM_TOKENS, TOP_K), lambda rows, counts, *_: rows).sum().backward()
        record = dispatcher.traffic.collect()
        found[mode] = (
            record.rows_over(Link.across, Phase.forward),
            record.rows_over(Link.across, Phase.backward),
            crossing_rows(mode, ids_TK.tolist(), rank, rank_of, node_size),
        )
    topology.close()
    return found


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (2, {"all_to_all": 2.00, "all_gather": 1.00, "two_hop": 0.94}),
        (4, {"all_to_all": 3.00, "all_gather": 3.00, "two_hop": 2.06}),
    ],
)
def test_rows_across_nodes_match_the_closed_form(process_pool: Pools, nodes: int, expected: dict[str, float]) -> None:
    """8 ranks, E = 192, k = 4. What goes out comes home, and backward does both again."""
    by_rank = process_pool(8).run(crossings_on_rank, 8 // nodes, timeout=300.0)
    for mode, per_token in expected.items():
        assert closed_form(mode, nodes) == pytest.approx(per_token, abs=0.005)
        of_ranks = [found[mode] for found in by_rank]
        out = sum(by_hand for _, _, by_hand in of_ranks)
        assert sum(forward for forward, _, _ in of_ranks) == 2 * out
        assert sum(backward for _, backward, _ in of_ranks) == 2 * out
        assert out / (8 * NUM_TOKENS) == pytest.approx(closed_form(mode, nodes), rel=0.01)


def subgroup_runs(
    sizes: Sequence[int],
) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Expert groups of the first so many ranks of 8; on 7, 192 experts. The ranks left over look on."""
    results = []
    for size in sizes:
        ranks = list(range(size))
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            continue
        assert isinstance(group, dist.ProcessGroup)
        num_experts = 192 if size == 7 else size + 2
        for placement in (None, [max(size - 1 - expert, 0) for expert in range(num_experts)]):
            inputs = make_inputs("random", dist.get_rank(), size, num_experts, size)
            reference, *ours = (
                run_layer(
                    build_dispatcher(
                        DispatchConfig(mode=DispatchMode[mode]), num_experts=num_experts, group=group,
                        placement=placement, topology=topology,
                    ),
                    inputs, torch.float32, dist.get_rank(),
                )
                for mode in ("reference", *MODES)
                for topology in ([one_node(group)] if mode in ("reference", "all_to_all") else row_of(group))
            )  # fmt: skip
            results += [(f"{size} ranks, placement {placement}", mine, reference) for mine in ours]
    return results


def row_of(group: dist.ProcessGroup) -> list[Topology]:
    """All ranks on one node, and each on a node of its own."""
    size = dist.get_world_size(group)
    alone = Topology(ranks_per_node=1, num_nodes=size, node_size=1, node_group=None, cross_group=group)
    return [one_node(group), alone]


def test_any_number_of_ranks_and_192_experts_on_seven(process_pool: Pools) -> None:
    assert place_experts(192, 7).experts_per_rank == [27, 27, 28, 27, 28, 27, 28]
    by_rank = process_pool(8).run(subgroup_runs, [3, 5, 6, 7, 8], timeout=300.0)
    assert [len(results) for results in by_rank] == [50, 50, 50, 40, 40, 30, 20, 10]
    for results in by_rank:
        for what, ours, reference in results:
            for name, expected in reference.items():
                if name in ("rows", "tokens_per_local_expert"):
                    assert torch.equal(ours[name], expected), (what, name)
                else:
                    assert_close(f"{what}: {name}", ours[name], expected, TOLERANCE[torch.float32])


def run_given(
    variants: Sequence[Variant],
    num_experts: int,
    inputs_of_rank: list[tuple[Tensor, Tensor, Tensor]],
    placement: list[int] | None,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    with topologies(variants, group) as of:
        *ours, reference = (
            run_layer(
                variant.build(num_experts, group, of[variant.ranks_per_node], placement),
                inputs_of_rank[rank],
                torch.float32,
                rank,
            )
            for variant in (*variants, Variant(mode="reference"))
        )
    return ours, reference


def any_layer(data: st.DataObject, world_size: int) -> tuple[int, list[tuple[Tensor, Tensor, Tensor]], list[int]]:
    """Any shapes, any skew, picks that go nowhere or twice to one expert, any placement."""
    num_experts = data.draw(st.integers(world_size, 9), label="experts")
    top_k = data.draw(st.integers(1, num_experts), label="top_k")
    favourite = data.draw(st.integers(0, num_experts - 1), label="favourite")
    any_pick = st.integers(NOT_DISPATCHED, num_experts - 1) | st.just(favourite)
    inputs = []
    for rank in range(world_size):
        row = st.lists(any_pick, min_size=top_k, max_size=top_k)
        picks = data.draw(st.lists(row, max_size=6), label=f"picks of rank {rank}")
        generator = torch.Generator().manual_seed(rank)
        ids_TK = torch.tensor(picks, dtype=torch.int64).view(len(picks), top_k)
        inputs.append(
            (torch.randn(len(picks), 6, generator=generator), ids_TK, torch.rand(ids_TK.shape, generator=generator))
        )
    own = list(range(world_size))
    rest = data.draw(
        st.lists(st.integers(0, world_size - 1), min_size=num_experts - world_size, max_size=num_experts - world_size)
    )
    return num_experts, inputs, data.draw(st.permutations([*own, *rest]), label="placement")


@pytest.mark.parametrize(
    ("world_size", "examples", "variants"),
    [
        (2, 12, [Variant(mode=m, ranks_per_node=n, chunks=c) for m in MODES[1:] for n, c in ((2, 1), (1, 2))]),
        (4, 8, [Variant(mode=m, ranks_per_node=2, chunks=c) for m in MODES for c in (1, 3)]),
    ],
)
def test_modes_equal_the_reference_for_anything(
    process_pool: Pools, world_size: int, examples: int, variants: list[Variant]
) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(data=st.data())
    def law(data: st.DataObject) -> None:
        num_experts, inputs, placement = any_layer(data, world_size)
        for of_variants, reference in process_pool(world_size).run(run_given, variants, num_experts, inputs, placement):
            for variant, ours in zip(variants, of_variants, strict=True):
                for name in ("y", "grad_x", "grad_topk_weights", "grad_experts"):
                    # Terms of a sum may cancel, and modes add them in another order.
                    assert_close(f"{variant}: {name}", ours[name], reference[name], 1e-5)

    law()


@pytest.mark.parametrize(
    ("expert_size", "ranks_per_node", "shape"),
    [(8, 4, (2, 4)), (8, 2, (4, 2)), (4, 8, (1, 4)), (7, 7, (1, 7)), (3, 1, (3, 1))],
)
def test_an_expert_group_is_a_grid(expert_size: int, ranks_per_node: int, shape: tuple[int, int]) -> None:
    assert grid_shape(expert_size, ranks_per_node) == shape


@pytest.mark.parametrize(("expert_size", "ranks_per_node"), [(6, 4), (7, 2), (4, 0)])
def test_uneven_nodes_are_refused(expert_size: int, ranks_per_node: int) -> None:
    with pytest.raises(
        ValueError, match=rf"ranks_per_node \({ranks_per_node}\) must divide parallel.expert \({expert_size}\)"
    ):
        grid_shape(expert_size, ranks_per_node)


@pytest.mark.parametrize("mode", MODES)
def test_more_ranks_than_experts_are_refused_in_every_mode(process_pool: Pools, mode: str) -> None:
    for message in process_pool(2).run(too_many_ranks, mode):
        assert "parallel.expert (2) must not exceed moe.num_experts (1)" in message


def too_many_ranks(mode: str) -> str:
    assert dist.group.WORLD is not None
    with pytest.raises(ValueError, match="must not exceed") as caught:
        Variant(mode=mode).build(1, dist.group.WORLD, one_node(dist.group.WORLD))
    return str(caught.value)
