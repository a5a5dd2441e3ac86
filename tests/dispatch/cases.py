"""Routing cases and the comparison of dispatchers, run on every rank of a pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import NOT_DISPATCHED, TokenDispatcher
from dispatch.topology import Topology, build_topology, one_node

HIDDEN = 6
CASES = (
    "random",
    "skewed",
    "all_to_one",
    "first_rank_without_tokens",
    "last_rank_without_tokens",
    "no_tokens_anywhere",
    "first_half_of_experts_only",
    "some_not_dispatched",
    "none_dispatched",
    "every_expert",
    "one_token_rank_zero",
)


def make_inputs(case: str, rank: int, world_size: int, num_experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] fp32, ids [T, K] int64, weights [T, K] fp32 of one rank; other ranks get others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens, top_k = 5 + 2 * rank, min(3, num_experts)
    if case == "no_tokens_anywhere" or (
        (case == "first_rank_without_tokens" and rank == 0)
        or (case == "last_rank_without_tokens" and rank == world_size - 1)
        or (case == "one_token_rank_zero" and rank > 0)
    ):
        num_tokens = 0
    if case == "one_token_rank_zero" and rank == 0:
        num_tokens = 1
    if case == "every_expert":
        top_k = num_experts
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
    if case == "skewed":
        scores_TE += torch.linspace(2.0, 0.0, num_experts)
    if case == "first_half_of_experts_only":
        scores_TE = scores_TE[:, : max(1, num_experts // 2)]
        top_k = min(top_k, scores_TE.shape[1])
    if case == "all_to_one":
        ids_TK = torch.full((num_tokens, 1), num_experts - 1)
    else:
        ids_TK = scores_TE.topk(top_k, dim=1).indices
    if case == "some_not_dispatched":
        ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 0.4, NOT_DISPATCHED)
        ids_TK[:2] = NOT_DISPATCHED
    if case == "none_dispatched":
        ids_TK = torch.full_like(ids_TK, NOT_DISPATCHED)
    x_TD = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights_TK = torch.rand(ids_TK.shape, generator=generator) + 0.1
    return x_TD, ids_TK, weights_TK


def expert_weights(num_experts: int) -> Tensor:
    """[E, D, D] fp32; a rank uses the rows of its experts."""
    return torch.randn(num_experts, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7)) / HIDDEN**0.5


def output_gradient(rank: int, y_TD: Tensor) -> Tensor:
    """A fixed gradient to send into y, different on every rank."""
    return torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(50 + rank)).to(y_TD.dtype)


def run_experts(rows_RD: Tensor, tokens_per_expert_e: Tensor, weight_eDD: Tensor) -> Tensor:
    """tanh(x · wᵀ) by expert: nonlinear, and different for each expert, so that a misplaced row shows."""
    pieces = torch.split(rows_RD, tokens_per_expert_e.tolist())
    return torch.cat([torch.tanh(piece @ w_DD.t()) for piece, w_DD in zip(pieces, weight_eDD.unbind(0), strict=True)])


def run_layer(
    dispatcher: TokenDispatcher,
    inputs: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    rank: int,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Outputs and all gradients of dispatch → experts → combine, on a device; the results are on the CPU."""
    x_TD, ids_TK, weights_TK = (given.to(device) for given in inputs)
    x_TD = x_TD.to(dtype).clone().requires_grad_()
    weights_TK = weights_TK.clone().requires_grad_()
    weight_EDD = expert_weights(dispatcher.num_experts)
    weight_eDD = weight_EDD[list(dispatcher.local_expert_ids)].to(device, dtype).requires_grad_()
    seen: list[Tensor] = []

    def experts(rows_RD: Tensor, tokens_per_expert_e: Tensor) -> Tensor:
        seen.extend((rows_RD.detach(), tokens_per_expert_e))
        return run_experts(rows_RD, tokens_per_expert_e, weight_eDD)

    y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, experts)
    y_TD.backward(output_gradient(rank, y_TD).to(device))
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    assert weight_eDD.grad is not None
    results = {
        "rows": seen[0],
        "tokens_per_local_expert": seen[1],
        "y": y_TD.detach(),
        "grad_x": x_TD.grad,
        "grad_topk_weights": weights_TK.grad,
        "grad_experts": weight_eDD.grad,
    }
    return {name: value.cpu() for name, value in results.items()}


def compare_with_reference(
    mode: str, cases: Sequence[tuple[str, int, int, list[int] | None]], dtype: torch.dtype
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """For each (case, num_experts, seed, placement): what the mode and the reference give on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for case, num_experts, seed, placement in cases:
        inputs = make_inputs(case, rank, world_size, num_experts, seed)
        of_modes = []
        for name in (mode, "reference"):
            config = DispatchConfig(mode=DispatchMode[name])
            dispatcher = build_dispatcher(config, num_experts=num_experts, group=dist.group.WORLD, placement=placement)
            of_modes.append(run_layer(dispatcher, inputs, dtype, rank))
        results.append((of_modes[0], of_modes[1]))
    return results


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A mode under given circumstances."""

    mode: str
    ranks_per_node: int | None = None
    chunks: int = 1

    def build(
        self, num_experts: int, group: dist.ProcessGroup, topology: Topology, placement: Sequence[int] | None = None
    ) -> TokenDispatcher:
        config = DispatchConfig(mode=DispatchMode[self.mode], chunks=self.chunks)
        return build_dispatcher(config, num_experts=num_experts, group=group, placement=placement, topology=topology)


@contextmanager
def topologies(variants: Sequence[Variant], group: dist.ProcessGroup) -> Iterator[dict[int | None, Topology]]:
    """A topology for each number of ranks per node."""
    of: dict[int | None, Topology] = {None: one_node(group)}
    for variant in variants:
        if variant.ranks_per_node not in of:
            of[variant.ranks_per_node] = build_topology(group, variant.ranks_per_node or 1)
    yield of
    for topology in of.values():
        topology.close()


def compare_variants(
    variants: Sequence[Variant], cases: Sequence[tuple[str, int, int, list[int] | None]], dtype: torch.dtype
) -> list[tuple[list[dict[str, Tensor]], dict[str, Tensor]]]:
    """For each (case, num_experts, seed, placement): what each variant and the reference give on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    results = []
    with topologies(variants, dist.group.WORLD) as of:
        for case, num_experts, seed, placement in cases:
            inputs = make_inputs(case, rank, world_size, num_experts, seed)
            *ours, reference = (
                run_layer(
                    variant.build(num_experts, dist.group.WORLD, of[variant.ranks_per_node], placement),
                    inputs,
                    dtype,
                    rank,
                )
                for variant in (*variants, Variant(mode="reference"))
            )
            results.append((ours, reference))
    return results


def dense_layer(
    inputs_of_rank: Sequence[tuple[Tensor, Tensor, Tensor]], num_experts: int
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Each rank's y and gradients, and the experts' gradients [E, D, D]: no dispatcher, one process, float64."""
    weight_EDD = expert_weights(num_experts).double().requires_grad_()
    of_rank = []
    for rank, (x_TD, ids_TK, weights_TK) in enumerate(inputs_of_rank):
        x_TD = x_TD.double().requires_grad_()
        weights_TK = weights_TK.double().requires_grad_()
        y_TD = torch.zeros_like(x_TD) + 0 * weights_TK.sum()
        for expert in range(num_experts):
            result_TD = torch.tanh(x_TD @ weight_EDD[expert].t())
            y_TD = y_TD + (weights_TK * (ids_TK == expert)).sum(1, keepdim=True) * result_TD
        y_TD.backward(output_gradient(rank, y_TD.float()).double())
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        of_rank.append({"y": y_TD.detach(), "grad_x": x_TD.grad, "grad_topk_weights": weights_TK.grad})
    assert weight_EDD.grad is not None
    return of_rank, weight_EDD.grad
