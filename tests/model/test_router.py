"""The router and its rules by hand-worked values: weights, bias, groups, options, replay.

The laws that every router keeps are in test_router_conformance.py.
"""

import pytest
import torch

from moe.model.balance import expert_bias_update
from moe.model.config import MoEConfig, RouterKind
from moe.model.router import Router, count_picks
from moe.model.routers.topk import stable_topk
from tests.model.cases import f1, logits_router, route


def test_weights_follow_normalize_topk() -> None:
    """A11: logits (2, 1, 0, −1), k = 2."""
    logits_TE = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
    raw = route(MoEConfig(num_experts=4, normalize_topk=False), logits_TE)
    normalised = route(MoEConfig(num_experts=4, normalize_topk=True), logits_TE)
    scaled = route(MoEConfig(num_experts=4, normalize_topk=True, routed_scale=2.5), logits_TE)
    torch.testing.assert_close(raw.topk_weights_TK, torch.tensor([[0.643914, 0.236883]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(normalised.topk_weights_TK, torch.tensor([[0.731059, 0.268941]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(scaled.topk_weights_TK, 2.5 * normalised.topk_weights_TK)
    assert raw.topk_expert_ids_TK.tolist() == normalised.topk_expert_ids_TK.tolist() == [[0, 1]]


def test_top_1_weight_is_the_probability_before_selection_and_learns() -> None:
    """A10: logits (2, 0), k = 1: weight 0.880797, gradient (0.104994, −0.104994)."""
    logits_TE = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    routing = route(MoEConfig(num_experts=2, top_k=1, normalize_topk=False), logits_TE)
    routing.topk_weights_TK.sum().backward()
    torch.testing.assert_close(routing.topk_weights_TK.detach(), torch.tensor([[0.880797]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits_TE.grad, torch.tensor([[[0.104994, -0.104994]]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", list(RouterKind))
def test_top_1_with_normalised_weights_is_refused(kind: RouterKind) -> None:
    """A10: normalised after the selection, the one weight is always 1 and the router never learns from the task."""
    with pytest.raises(ValueError, match=r"moe\.normalize_topk \(true\) with moe\.top_k \(1\).*choose"):
        Router(8, MoEConfig(num_experts=4, top_k=1, router=kind), layer_index=0)


def test_sigmoid_weights_come_from_unbiased_scores() -> None:
    """A12: the bias decides who is chosen, and leaves no trace in weights or probabilities."""
    moe = MoEConfig(num_experts=4, router=RouterKind.sigmoid, normalize_topk=False)
    router = logits_router(moe)
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    valid_BS = torch.ones(1, 1, dtype=torch.bool)
    plain = router(logits_TE[None], valid_BS)
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    biased = router(logits_TE[None], valid_BS)
    assert plain.topk_expert_ids_TK.tolist() == [[0, 1]]
    assert biased.topk_expert_ids_TK.tolist() == [[3, 1]]
    torch.testing.assert_close(biased.topk_weights_TK, logits_TE.sigmoid()[:, [3, 1]])
    assert torch.equal(biased.stats.router_probs_sum_BE, plain.stats.router_probs_sum_BE)


def test_negative_biased_scores_still_choose_the_best() -> None:
    """A12, without groups: biased scores −0.1 … −0.8 choose the first three; nothing is masked with 0."""
    moe = MoEConfig(num_experts=8, top_k=3, router=RouterKind.sigmoid)
    router = logits_router(moe)
    assert router.expert_bias is not None
    router.expert_bias.copy_(-0.5 - torch.arange(1, 9) / 10)
    routing = router(torch.zeros(1, 1, 8), torch.ones(1, 1, dtype=torch.bool))
    assert routing.topk_expert_ids_TK.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("shift", [-50.0, -20.0, 0.0, 20.0])
def test_normalised_sigmoid_weights_sum_to_the_scale_however_small(shift: float) -> None:
    """A09: no epsilon eats the weights of tiny scores."""
    moe = MoEConfig(num_experts=4, top_k=3, router=RouterKind.sigmoid, routed_scale=2.5)
    routing = route(moe, f1().detach() + shift)
    torch.testing.assert_close(routing.topk_weights_TK.sum(-1), torch.full((4,), 2.5))
    torch.testing.assert_close(routing.stats.router_probs_sum_BE.sum(), torch.tensor(4.0))


def test_stable_topk_equals_a_stable_sort() -> None:
    """Coarse scores, so that almost all are tied; both zeros, tiny, huge and negative numbers; K = 1 … E."""
    values = torch.tensor([-3e38, -1.5, -1e-42, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 3e38])
    for num_experts in (1, 2, 7, 64, 513):
        scores_TE = values[torch.randint(len(values), (200, num_experts), generator=torch.Generator().manual_seed(1))]
        expected = torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices
        for top_k in {1, min(3, num_experts), num_experts}:
            assert torch.equal(stable_topk(scores_TE, top_k), expected[:, :top_k])


def test_expert_bias_stays_fp32_and_in_its_place() -> None:
    """A16: 0.5 plus a hundred times 0.001 is 0.6 after every kind of cast; bf16 would stay at 0.5. A14: same storage."""
    casts = {
        "to": lambda m: m.to(torch.bfloat16),
        "bfloat16": lambda m: m.bfloat16(),
        "half": lambda m: m.half(),
        "to(device, dtype)": lambda m: m.to("cpu", torch.float16),
        "parent": lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
        "double": lambda m: m.double(),
    }
    for name, cast in casts.items():
        router = Router(8, MoEConfig(num_experts=2, router=RouterKind.sigmoid), layer_index=0)
        assert router.expert_bias is not None
        router.expert_bias.copy_(torch.tensor([0.5, 0.123456789]))
        storage = router.expert_bias.data_ptr()
        router = cast(router)
        assert router.weight.dtype != torch.float32, name
        assert router.expert_bias.dtype == torch.float32, name
        assert router.expert_bias.data_ptr() == storage, name
        assert router.expert_bias[1] == torch.tensor(0.123456789), name
        for _ in range(100):
            expert_bias_update(router.expert_bias, torch.tensor([0, 2]), 0.001)
        assert abs(float(router.expert_bias[0]) - 0.599999) < 1e-6, name
        assert router.state_dict()["expert_bias"].data_ptr() == storage, name


def test_a_bf16_router_takes_a_saved_bias_in_fp32() -> None:
    """A16: through save, cast and load the bias keeps every bit."""
    moe = MoEConfig(num_experts=2, router=RouterKind.sigmoid)
    saved = {"weight": torch.ones(2, 8), "expert_bias": torch.tensor([0.123456789, -0.3])}
    router = Router(8, moe, layer_index=0).to(torch.bfloat16)
    router.load_state_dict(saved)
    assert torch.equal(router.state_dict()["expert_bias"], saved["expert_bias"])


def test_counts_are_exact_and_by_row() -> None:
    """Two rows of 3 tokens, K = 2: (0 1)(1 2)(padding) and (3 0)(0 3)(1 0)."""
    ids_TK = torch.tensor([[0, 1], [1, 2], [-1, -1], [3, 0], [0, 3], [1, 0]])
    assert count_picks(ids_TK, 2, 4).tolist() == [[1, 2, 1, 0], [3, 1, 0, 2]]
    assert count_picks(ids_TK[:0], 2, 4).tolist() == [[0] * 4] * 2
    assert count_picks(ids_TK[:0], 0, 4).shape == (0, 4)
