"""Routing rules and the router around them: hand-worked values, ties, padding, precision, and the stop on bad numbers."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dispatch.interface import NOT_DISPATCHED
from moe.errors import NumericError
from moe.model.balance import expert_bias_update
from moe.model.config import MoEConfig, RouterKind
from moe.model.router import ROUTERS, Router, Routing, count_picks, stable_topk
from tests.model.cases import f1, logits_router

KINDS = list(ROUTERS)


def route(moe: MoEConfig, logits_TE: Tensor, valid: list[bool] | None = None) -> Routing:
    """Route one row of tokens whose logits are given."""
    valid_BS = (
        torch.ones(1, logits_TE.shape[0], dtype=torch.bool)
        if valid is None
        else torch.tensor([valid], dtype=torch.bool)
    )
    return logits_router(moe)(logits_TE[None], valid_BS)


def test_every_kind_of_the_configuration_has_a_rule() -> None:
    assert list(ROUTERS) == list(RouterKind)


def test_weights_follow_normalize_topk() -> None:
    """A11: logits (2, 1, 0, −1), k = 2."""
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    raw = route(MoEConfig(num_experts=4, normalize_topk=False), logits_TE)
    normalised = route(MoEConfig(num_experts=4, normalize_topk=True), logits_TE)
    scaled = route(MoEConfig(num_experts=4, normalize_topk=True, routed_scale=2.5), logits_TE)
    torch.testing.assert_close(raw.topk_weights_TK, torch.tensor([[0.643914, 0.236883]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(normalised.topk_weights_TK, torch.tensor([[0.731059, 0.268941]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(scaled.topk_weights_TK, 2.5 * normalised.topk_weights_TK)
    assert raw.topk_expert_ids_TK.tolist() == normalised.topk_expert_ids_TK.tolist() == [[0, 1]]


def test_top_1_weight_is_the_probability_before_selection_and_learns() -> None:
    """A10: logits (2, 0), k = 1: weight 0.880797, gradient (0.104994, −0.104994)."""
    logits_TE = torch.tensor([[2.0, 0.0]], requires_grad=True)
    routing = route(MoEConfig(num_experts=2, top_k=1, normalize_topk=False), logits_TE)
    routing.topk_weights_TK.sum().backward()
    torch.testing.assert_close(routing.topk_weights_TK.detach(), torch.tensor([[0.880797]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits_TE.grad, torch.tensor([[0.104994, -0.104994]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
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
    routing = route(moe, f1().detach()[0] + shift)
    torch.testing.assert_close(routing.topk_weights_TK.sum(-1), torch.full((4,), 2.5))
    torch.testing.assert_close(routing.stats.router_probs_sum_BE.sum(), torch.tensor(4.0))


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 2**31), num_tokens=st.integers(0, 9), num_experts=st.integers(2, 9), data=st.data()
)  # fmt: skip
def test_laws_of_every_router(
    kind: RouterKind, seed: int, num_tokens: int, num_experts: int, data: st.DataObject
) -> None:
    """Counts sum to valid tokens · K; weights finite, non-negative, summing as documented; padding gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(2, num_experts))
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, router=kind, routed_scale=1.5)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator) * 30
    valid_T = torch.rand(num_tokens, generator=generator) < 0.7
    ids_TK, weights_TK, stats = route(moe, logits_TE, valid_T.tolist())
    assert ids_TK.dtype == torch.int64
    assert weights_TK.dtype == torch.float32
    num_valid = int(valid_T.sum())
    assert int(stats.tokens_per_expert_BE.sum()) == num_valid * top_k
    assert torch.equal(stats.tokens_per_expert_BE[0], torch.bincount(ids_TK[valid_T].flatten(), minlength=num_experts))
    assert all(len(set(row)) == top_k and min(row) >= 0 for row in ids_TK[valid_T].tolist())
    assert (ids_TK[~valid_T] == NOT_DISPATCHED).all()
    assert not weights_TK[~valid_T].any()
    assert (weights_TK >= 0).all()
    torch.testing.assert_close(weights_TK[valid_T].sum(-1), torch.full((num_valid,), 1.5))
    torch.testing.assert_close(stats.router_probs_sum_BE.sum(), torch.tensor(float(num_valid)))
    expected_max = logits_TE[valid_T].abs().max() if num_valid else torch.tensor(0.0)
    assert stats.max_logit == expected_max
    assert not stats.dropped_per_expert_E.any()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_go_to_the_lower_expert(kind: RouterKind) -> None:
    """All logits equal, in every number of experts: the first K."""
    for num_experts in (2, 3, 8, 65, 512):
        routing = route(MoEConfig(num_experts=num_experts, router=kind), torch.zeros(3, num_experts))
        assert routing.topk_expert_ids_TK.tolist() == [[0, 1]] * 3


def test_stable_topk_equals_a_stable_sort() -> None:
    """Coarse scores, so that almost all are tied; both zeros, tiny, huge and negative numbers; K = 1 … E."""
    values = torch.tensor([-3e38, -1.5, -1e-42, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 3e38])
    for num_experts in (1, 2, 7, 64, 513):
        scores_TE = values[torch.randint(len(values), (200, num_experts), generator=torch.Generator().manual_seed(1))]
        expected = torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices
        for top_k in {1, min(3, num_experts), num_experts}:
            assert torch.equal(stable_topk(scores_TE, top_k), expected[:, :top_k])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_no_gradient_and_changes_no_sum(kind: RouterKind) -> None:
    """A02: F1 with tokens 2 and 3 as padding is tokens 0 and 1 alone, for every field; the padded rows' gradient is 0."""
    moe = MoEConfig(num_experts=4, router=kind)
    logits_BSE = f1()
    padded = logits_router(moe)(logits_BSE, torch.tensor([[True, True, False, False]]))
    alone = logits_router(moe)(f1().detach()[:, :2], torch.ones(1, 2, dtype=torch.bool))
    for name, value in padded.stats._asdict().items():
        torch.testing.assert_close(value, getattr(alone.stats, name), rtol=1e-6, atol=0, msg=name)
    (padded.stats.router_probs_sum_BE[0, 0] + padded.stats.z_sum + padded.topk_weights_TK[:, 0].sum()).backward()
    assert logits_BSE.grad is not None
    assert not logits_BSE.grad[0, 2:].any()
    assert logits_BSE.grad[0, :2].any(dim=-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_fp32_whatever_the_weights_are(kind: RouterKind) -> None:
    """A bf16 router equals, to the last bit, an fp32 router with the same (rounded) weights and inputs."""
    moe = MoEConfig(num_experts=5, router=kind)
    half = Router(16, moe, layer_index=0)
    torch.nn.init.normal_(half.weight, generator=torch.Generator().manual_seed(0))
    half.to(torch.bfloat16)
    full = copy.deepcopy(half).float()
    x_BSD = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    valid_BS = torch.ones(2, 7, dtype=torch.bool)
    found, expected = half(x_BSD, valid_BS), full(x_BSD.float(), valid_BS)
    assert torch.equal(found.topk_expert_ids_TK, expected.topk_expert_ids_TK)
    assert torch.equal(found.topk_weights_TK, expected.topk_weights_TK)
    assert all(torch.equal(a, b) for a, b in zip(found.stats, expected.stats, strict=True))


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


def test_only_routers_with_a_selection_bias_carry_one() -> None:
    for kind, rule in ROUTERS.items():
        names = [name for name, _ in Router(8, MoEConfig(router=kind), layer_index=0).named_buffers()]
        assert names == (["expert_bias"] if rule.uses_expert_bias else [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_logits_stop_before_dispatch_with_layer_and_rank(
    kind: RouterKind, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "6")
    logits_TE = torch.zeros(5, 4)
    logits_TE[2, 1] = bad
    with pytest.raises(
        NumericError, match=r"layers\.3\.moe\.router: logits of 1 of 5 tokens are not finite \(rank 6\)"
    ):
        route(MoEConfig(num_experts=4, router=kind), logits_TE)


def test_counts_are_exact_and_by_row() -> None:
    """Two rows of 3 tokens, K = 2: (0 1)(1 2)(padding) and (3 0)(0 3)(1 0)."""
    ids_TK = torch.tensor([[0, 1], [1, 2], [-1, -1], [3, 0], [0, 3], [1, 0]])
    assert count_picks(ids_TK, 2, 4).tolist() == [[1, 2, 1, 0], [3, 1, 0, 2]]
    assert count_picks(ids_TK[:0], 2, 4).tolist() == [[0] * 4] * 2
    assert count_picks(ids_TK[:0], 0, 4).shape == (0, 4)


def test_forward_changes_nothing_in_the_router() -> None:
    """A13, A17: no counter lives in forward, in training or in evaluation."""
    moe = MoEConfig(num_experts=4, router=RouterKind.sigmoid)
    router = logits_router(moe)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    attributes = set(vars(router))
    for _ in range(2):
        router(f1(), torch.ones(1, 4, dtype=torch.bool))
        router.eval()
    assert set(vars(router)) == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in router.state_dict().items())
