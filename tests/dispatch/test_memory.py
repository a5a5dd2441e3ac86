"""dispatch.save_memory: what is kept for backward, measured and by formula; and that nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backends.ops.expert_mlp.swiglu import weighted_swiglu
from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.interface import TokenDispatcher
from dispatch.traffic import Phase
from moe.model.experts import Experts
from tests.dispatch.cases import CASES, expert_weights, make_inputs, output_gradient, run_experts
from tests.process_pool import ProcessPool

MODES = ("local", "all_to_all", "all_gather", "two_hop")


def build(mode: str, num_experts: int, *, alone: bool = False, **config: Any) -> TokenDispatcher:
    group = None if alone else dist.group.WORLD
    return build_dispatcher(DispatchConfig(mode=DispatchMode[mode], **config), num_experts=num_experts, group=group)


def run_weighted(
    dispatcher: TokenDispatcher, inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, rank: int
) -> dict[str, Tensor]:
    """Outputs and all gradients; the experts multiply by the weight if they are given one."""
    x_TD = inputs[0].to(dtype).clone().requires_grad_()
    weights_TK = inputs[2].clone().requires_grad_()
    weight_eDD = expert_weights(dispatcher.num_experts)[list(dispatcher.local_expert_ids)].to(dtype).requires_grad_()

    def experts(rows_RD: Tensor, counts_e: Tensor, weight_R: Tensor | None = None, /) -> Tensor:
        results_RD = run_experts(rows_RD, counts_e, weight_eDD)
        return results_RD if weight_R is None else (results_RD * weight_R.unsqueeze(1)).to(dtype)

    y_TD = dispatcher.run(x_TD, inputs[1], weights_TK, experts)
    y_TD.backward(output_gradient(rank, y_TD))
    grads = {"grad_x": x_TD.grad, "grad_weights": weights_TK.grad, "grad_experts": weight_eDD.grad}
    return {"y": y_TD.detach(), **grads}  # type: ignore[dict-item]


def differences(mode: str, dtype: torch.dtype, chunks: int) -> list[str]:
    """Cases in which forgetting changes more than a rounding."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for case in CASES:
        inputs = make_inputs(case, rank, world_size, 7, 3)
        config = {"chunks": chunks, "alone": world_size == 1}
        kept = run_weighted(build(mode, 7, **config), inputs, dtype, rank)
        dispatcher = build(mode, 7, save_memory=True, **config)
        forgotten = run_weighted(dispatcher, inputs, dtype, rank)
        for name, expected in kept.items():
            error = (forgotten[name].double() - expected.double()).norm()
            if error > (1e-6 if dtype == torch.float32 else 1e-2) * expected.double().norm():
                found.append(f"{case}: {name} by {float(error / expected.double().norm())}")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_forgetting_changes_no_result(process_pool: Callable[[int], ProcessPool], mode: str) -> None:
    pool = process_pool(1 if mode == "local" else 2)
    assert not any(pool.run(differences, mode, torch.float32, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forgetting_works_in_chunks(process_pool: Callable[[int], ProcessPool], dtype: torch.dtype) -> None:
    assert process_pool(2).run(differences, "all_to_all", dtype, 3) == [[], []]


def saved_bytes(save_memory: bool, chunks: int, alone: bool) -> tuple[int, int, int]:
    """(floating bytes kept for backward beside parameters, rows sent, rows received) of a layer with SwiGLU experts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    num_tokens, hidden, width, num_experts, top_k = 20 + rank, 16, 24, 5, 2
    x_TD = torch.randn(num_tokens, hidden, generator=generator, requires_grad=True)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator, requires_grad=True)
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, 1).indices
    dispatcher = build(
        "local" if alone else "all_to_all", num_experts, alone=alone, save_memory=save_memory, chunks=chunks
    )
    experts = Experts(len(dispatcher.local_expert_ids), hidden, width)
    parameters = set()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
        parameters.add(parameter.data_ptr())
    saved: dict[int, int] = {}
    received = [0]

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def counted(rows_RD: Tensor, counts_e: Tensor, *weight_R: Tensor) -> Tensor:
        received[0] += rows_RD.shape[0]
        return experts(rows_RD, counts_e, *weight_R)  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, counted)
    y_TD.sum().backward()
    assert world_size == 1 or received[0] != ids_TK.numel()
    return sum(saved.values()), ids_TK.numel(), received[0]


@pytest.mark.parametrize(("world_size", "chunks"), [(1, 1), (2, 1), (2, 3)])
def test_saved_bytes_are_those_of_the_formula(
    process_pool: Callable[[int], ProcessPool], world_size: int, chunks: int
) -> None:
    """fp32, D = 16, F = 24: 4·(R·D + 2·R·F + N·D) + 4·T·K with everything kept, 4·2·R·F + 4·R without."""
    kept = process_pool(world_size).run(saved_bytes, False, chunks, world_size == 1)
    forgotten = process_pool(world_size).run(saved_bytes, True, chunks, world_size == 1)
    for num_bytes, sent, received in kept:
        assert num_bytes == 4 * (16 * received + 2 * 24 * received + 16 * sent) + 4 * sent
    for num_bytes, _, received in forgotten:
        assert num_bytes == 4 * 2 * 24 * received + 4 * received


@pytest.mark.parametrize("save_memory", [False, True])
def test_experts_that_take_tokens_keep_as_little_either_way(save_memory: bool) -> None:
    """One rank, T = 20, R = 40: x, which is alive anyhow, gate, up and a weight per row: 4·(T·D + 2·R·F + R)."""
    x_TD = torch.randn(20, 16, requires_grad=True)
    weights_TK = torch.rand(20, 2, requires_grad=True)
    ids_TK = torch.arange(40).view(20, 2) % 5
    experts = Experts(5, 16, 24)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dim() < 3:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    dispatcher = build("local", 5, alone=True, save_memory=save_memory)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, experts)
    y_TD.sum().backward()
    assert sum(saved.values()) == 4 * (20 * 16 + 2 * 40 * 24 + 40)


def test_weighted_swiglu_equals_the_plain_product() -> None:
    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (5, 4), (5,))]
    operands = [operand.float().requires_grad_() for operand in operands]
    plain = [operand.detach().double().requires_grad_() for operand in operands]
    gate, up, weight = plain
    expected = torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)
    grad = torch.randn(5, 4, generator=generator)
    expected.backward(grad.double())
    actual = weighted_swiglu(*operands)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(operands, plain, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-6, atol=1e-6)


def traffic_of(save_memory: bool, experts_keep_rows: bool) -> dict[Phase, int]:
    dispatcher = build("all_to_all", 4, save_memory=save_memory, chunks=2)
    x_TD, ids_TK, weights_TK = make_inputs("last_rank_without_tokens", dist.get_rank(), 2, 4, 5)
    scale_D = torch.ones(x_TD.shape[1], requires_grad=experts_keep_rows)
    y_TD = dispatcher.run(x_TD.requires_grad_(), ids_TK, weights_TK, lambda rows, *_: rows * scale_D)
    y_TD.sum().backward()
    record = dispatcher.traffic.collect()
    return {phase: sum(n for (of, _), n in record.rows.items() if of is phase) for phase in Phase}


@pytest.mark.parametrize("experts_keep_rows", [True, False])
def test_the_second_exchange_is_counted_and_always_ends(
    process_pool: Callable[[int], ProcessPool], experts_keep_rows: bool
) -> None:
    """5 tokens with 3 picks go out and home, in both phases; forgotten rows go out once more."""
    for save_memory, again in ((False, 0), (True, 15)):
        zero, one = process_pool(2).run(traffic_of, save_memory, experts_keep_rows, timeout=30.0)
        total = {phase: zero[phase] + one[phase] for phase in Phase}
        assert total == {Phase.forward: 30, Phase.recompute: again, Phase.backward: 30}


def recomputed(use_reentrant: bool) -> bool:
    """Whether a recomputed layer that forgets equals one that is not recomputed and keeps all."""
    rank = dist.get_rank()
    x_TD, ids_TK, weights_TK = make_inputs("random", rank, 2, 4, 5)
    grads = []
    for recompute in (False, True):
        dispatcher = build("all_to_all", 4, save_memory=recompute, chunks=2)
        leaf_TD, leaf_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        experts = Experts(2, x_TD.shape[1], 8)
        for number, parameter in enumerate(experts.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

        def layer(x_TD: Tensor, weights_TK: Tensor, run: Any = dispatcher.run, experts: Experts = experts) -> Tensor:
            result: Tensor = run(x_TD.sin(), ids_TK, weights_TK, experts)
            return result

        if recompute:
            y_TD = checkpoint(layer, leaf_TD, leaf_TK, use_reentrant=use_reentrant)
        else:
            y_TD = layer(leaf_TD, leaf_TK)
        y_TD.square().sum().backward()
        grads.append([leaf_TD.grad, leaf_TK.grad, *(parameter.grad for parameter in experts.parameters())])
    return all(
        bool((one - other).norm() <= 1e-6 * one.norm())  # type: ignore[union-attr, operator]
        for one, other in zip(*grads, strict=True)
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_forgetting_inside_recomputation_is_right(
    process_pool: Callable[[int], ProcessPool], use_reentrant: bool
) -> None:
    assert all(process_pool(2).run(recomputed, use_reentrant))
