"""The router and its rules by hand-worked values: weights, bias, groups, options, replay.

The laws that every router keeps are in test_router_conformance.py.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.ops.router_topk.reference import count_picks
from backends.ops.router_topk.scores import log_sqrt_softplus
from backends.ops.router_topk.select import stable_topk
from moe.errors import NumericError
from moe.model.balance import expert_bias_update
from moe.model.config import MoEConfig, RouterKind
from moe.model.router import Router, Routing
from moe.model.routers.randomness import token_keys
from moe.model.routers.replay import load_routes, recording, replaying, save_routes
from tests.model.cases import build, context, f1, logits_router, packed, route, tiny_moe


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


def groups_of_two(router: RouterKind, *, bias_E: Tensor, logits_E: Tensor | None = None) -> Routing:
    """8 experts in 4 groups, 2 of them allowed, 3 picks."""
    moe = MoEConfig(num_experts=8, top_k=3, router=router, num_groups=4, topk_groups=2, normalize_topk=False)
    layer = logits_router(moe)
    assert layer.expert_bias is not None
    layer.expert_bias.copy_(bias_E)
    logits_BSE = (torch.zeros(8) if logits_E is None else logits_E).view(1, 1, 8)
    return layer(logits_BSE, torch.ones(1, 1, dtype=torch.bool), context(torch.ones(1, 1)))


@pytest.mark.parametrize("router", [RouterKind.sigmoid, RouterKind.sqrt_softplus])
def test_group_limits_hold_with_negative_scores(router: RouterKind) -> None:
    """A12: biased scores −0.1 … −0.8 in 4 groups of which 2 are allowed: experts 0, 1, 2; weights are unbiased scores."""
    unbiased = 0.5 if router is RouterKind.sigmoid else math.log(2) ** 0.5
    routing = groups_of_two(router, bias_E=-unbiased - torch.arange(1, 9) / 10)
    assert routing.topk_expert_ids_TK.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(routing.topk_weights_TK, torch.full((1, 3), unbiased))


def test_a_group_counts_as_much_as_its_two_best() -> None:
    """A12: the group with the single best expert loses to one with two good ones: scores .9 .0 | .6 .5 | .1 .1 | .8 .2."""
    scores_E = torch.tensor([0.9, 0.0, 0.6, 0.5, 0.1, 0.1, 0.8, 0.2])
    routing = groups_of_two(RouterKind.sigmoid, bias_E=scores_E - 0.5)
    # Sums of two: .9, 1.1, .2, 1.0: groups 1 and 3, so the best expert of all is out.
    assert routing.topk_expert_ids_TK.tolist() == [[6, 2, 3]]


def test_sqrt_softplus_by_hand() -> None:
    """log(1 + e^0) = 0.693147, its root 0.832555; log(1 + e^1) = 1.313262, 1.145977; normalised by their sum."""
    logits = torch.tensor([[[1.0, 0.0, -1.0]]])
    raw = route(MoEConfig(num_experts=3, router=RouterKind.sqrt_softplus, normalize_topk=False), logits)
    even = route(MoEConfig(num_experts=3, router=RouterKind.sqrt_softplus), logits)
    torch.testing.assert_close(raw.topk_weights_TK, torch.tensor([[1.145977, 0.832555]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(even.topk_weights_TK, torch.tensor([[0.579205, 0.420795]]), rtol=0, atol=1e-6)


def test_log_sqrt_softplus_is_exact_over_the_whole_range() -> None:
    """Value and gradient against float64, where fp32's softplus has long become 0 or lost its digits."""
    x = torch.tensor([-300.0, -104.0, -50.0, -15.5, -15.0, -14.5, -1.0, 0.0, 1.0, 20.0, 90.0], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    expected = torch.where(exact < -30, exact / 2, (exact.exp().log1p()).log() / 2)
    found = log_sqrt_softplus(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    (mine,) = torch.autograd.grad(found.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-7)


def test_sinkhorn_evens_out_what_all_tokens_want() -> None:
    """Eight tokens prefer expert 0; those that prefer it least are sent on, so that each expert gets two."""
    want = torch.linspace(0.1, 3.0, 8)
    logits = torch.zeros(1, 8, 4)
    logits[0, :, 0] = want
    logits[0, :, 1] = torch.tensor([0.0, 0.0, 0.3, 0.3, 0.0, 0.0, 0.0, 0.0])
    moe = MoEConfig(num_experts=4, top_k=1, router=RouterKind.sinkhorn, normalize_topk=False)
    greedy = replace(moe, router=RouterKind.softmax)
    assert route(greedy, logits).stats.tokens_per_expert_BE.max() >= 6
    assert route(moe, logits).stats.tokens_per_expert_BE[0, 0] <= 3


def test_expert_choice_by_hand() -> None:
    """4 tokens, 2 experts, K = 1: each expert takes the floor(4 · 1 / 2) = 2 that give it the largest probability."""
    logits = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.1, -0.1]]])
    moe = MoEConfig(num_experts=2, top_k=1, router=RouterKind.expert_choice, normalize_topk=False)
    # P(expert 0) = .5, .88, .12, .55: tokens 1 and 3; P(expert 1) = .5, .12, .88, .45: tokens 2 and 0.
    routing = route(moe, logits)
    assert routing.topk_expert_ids_TK.tolist() == [[-1, 1], [0, -1], [-1, 1], [0, -1]]
    assert routing.stats.tokens_per_expert_BE.tolist() == [[2, 2]]
    torch.testing.assert_close(routing.topk_weights_TK[1], torch.tensor([0.880797, 0.0]))


def test_forced_routers_load_as_they_say() -> None:
    """Random: even within noise; balanced: within one of even in every row; skewed: as the weights of its draws."""
    logits = torch.zeros(4, 2000, 8)
    counts = {
        kind: route(MoEConfig(num_experts=8, top_k=1, router=kind, normalize_topk=False), logits).stats
        for kind in (RouterKind.random, RouterKind.balanced, RouterKind.skewed)
    }
    mean, deviation = 1000, (8000 / 8 * 7 / 8) ** 0.5
    random_E = counts[RouterKind.random].tokens_per_expert_BE.sum(0)
    assert (random_E - mean).abs().max() < 4 * deviation
    assert counts[RouterKind.balanced].tokens_per_expert_BE.tolist() == [[250] * 8] * 4
    popularity = 1 / torch.arange(1, 9)
    expected = 8000 * popularity / popularity.sum()
    skewed_E = counts[RouterKind.skewed].tokens_per_expert_BE.sum(0)
    assert ((skewed_E - expected).abs() < 4 * expected.sqrt()).all()


def test_hash_follows_the_token_alone() -> None:
    """Equal ids, equal experts, wherever they stand; another seed sends them elsewhere."""
    valid_BS = torch.ones(2, 50, dtype=torch.bool)
    tokens = context(valid_BS)
    logits = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0))
    ids = {}
    for seed in (0, 1):
        moe = MoEConfig(num_experts=16, router=RouterKind.hash, router_seed=seed)
        ids[seed] = route(moe, logits, valid_BS, tokens).topk_expert_ids_TK
        for token in range(19):
            rows = ids[seed][tokens.input_ids_BS.flatten() == token]
            assert (rows == rows[:1]).all()
    assert not torch.equal(ids[0], ids[1])
    with pytest.raises(ValueError, match=r"moe\.router \(hash\) needs token ids"):
        logits_router(MoEConfig(num_experts=16, router=RouterKind.hash))(logits, valid_BS)


def test_noise_has_the_stated_size_and_jitter_the_stated_range() -> None:
    """Standard deviation and mean of 40 000 draws; multiplied inputs within 1 ± jitter; neither in evaluation."""
    valid_BS = torch.ones(1, 5000, dtype=torch.bool)
    noisy = logits_router(MoEConfig(num_experts=8, router_noise=0.7))
    jittery = logits_router(MoEConfig(num_experts=8, router_jitter=0.1))
    ones = torch.ones(1, 5000, 8)
    keys = context(valid_BS)
    for router in (noisy, jittery):
        assert torch.equal(router.eval()._logits(ones[0], keys.keys_BS[0]), ones[0])
        router.train()
    noise = noisy._logits(ones[0], keys.keys_BS[0]).detach() - 1
    assert abs(float(noise.mean())) < 4 * 0.7 / 200
    assert abs(float(noise.std()) - 0.7) < 0.02
    shaken = jittery._logits(ones[0], keys.keys_BS[0]).detach()
    assert 0.9 <= float(shaken.min()) < 0.9005
    assert 1.0995 < float(shaken.max()) <= 1.1


def test_random_numbers_belong_to_the_document() -> None:
    """A39: a token's key is that of its document run alone; it depends on earlier tokens of it, on no later, on the step."""
    packed_batch = packed([[5, 4], [6]], row_tokens=9)
    alone = packed([[4]], row_tokens=4)._replace(input_ids_BS=packed_batch.input_ids_BS[:1, 5:9])
    keys = token_keys(packed_batch, 3)
    assert torch.equal(keys[0, 5:9], token_keys(alone, 3)[0])
    assert not (keys[0, 5:9] == token_keys(alone, 4)[0]).any()
    changed = packed_batch.input_ids_BS.clone()
    changed[0, 2] += 1
    after = token_keys(packed_batch._replace(input_ids_BS=changed), 3)
    assert (after == keys)[0].tolist() == [True, True, False, False, False, True, True, True, True]
    assert len(set(keys[0].tolist())) == 9


def test_the_margin_is_that_of_the_last_pick_over_the_next() -> None:
    """F1, k = 2: 1 − 0, 1 − 0, 1 − 0, 1 − 0; with k = E there is no next, and the margin is 0."""
    assert float(route(MoEConfig(num_experts=4), f1()).stats.margin_sum) == pytest.approx(4.0)
    assert float(route(MoEConfig(num_experts=4, top_k=4), f1()).stats.margin_sum) == 0.0


def test_logits_never_exceed_their_cap() -> None:
    moe = MoEConfig(num_experts=4, router_logit_cap=3.0)
    assert float(route(moe, 100 * f1()).stats.max_logit) <= 3.0
    assert float(route(moe, 0.01 * f1()).stats.max_logit) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_recorded_routes_can_be_replayed_and_saved(checkpoint_blocks: bool, tmp_path: Path) -> None:
    """A model that goes by its own record gives the same bits; another model's record is obeyed in every layer."""
    moe = tiny_moe(router=RouterKind.sigmoid)
    first, second = build(moe=moe, seed=0), build(moe=moe, seed=1)
    first.checkpoint_blocks = second.checkpoint_blocks = checkpoint_blocks
    batch = packed([[4, 3], [2, 4]], row_tokens=7)
    with recording(first) as routes:
        expected = first(batch)
    assert {index: ids.shape for index, ids in routes.items()} == {1: (2, 7, 2), 2: (2, 7, 2)}
    save_routes(tmp_path / "routes.safetensors", routes)
    saved = load_routes(tmp_path / "routes.safetensors")
    with replaying(first, saved):
        assert torch.equal(first(batch).lm_loss_sum, expected.lm_loss_sum)
    own = second(batch).router
    with replaying(second, saved), recording(second) as obeyed:
        output = second(batch)
        output.lm_loss_sum.backward()
    assert all(torch.equal(obeyed[index], routes[index]) for index in routes)
    assert torch.equal(output.router.tokens_per_expert_BE, expected.router.tokens_per_expert_BE)
    assert not torch.equal(own.tokens_per_expert_BE, expected.router.tokens_per_expert_BE)
    assert all(layer.router.replayed_ids_BSP is None for layer in second.moe_layers())
    assert all(layer.router.weight.grad.any() for layer in second.moe_layers())
    with pytest.raises(ValueError, match=r"no recorded routes for layers \[2\]"), replaying(second, {1: saved[1]}):
        pass
    with (
        pytest.raises(ValueError, match=r"recorded routes of layer 1 name experts .* the model has moe\.num_experts=5"),
        replaying(second, {1: saved[1] + 1, 2: saved[2]}),
    ):
        pass


def test_a_frozen_router_starts_as_any_other() -> None:
    """The same initial weight by name, as a buffer; the task's gradient passes through to what lies before."""
    free, frozen = build(moe=tiny_moe(), seed=3), build(moe=tiny_moe(freeze_router=True), seed=3)
    assert torch.equal(frozen.moe_layers()[0].router.weight, free.moe_layers()[0].router.weight)
    assert not [name for name, _ in frozen.named_parameters() if "router" in name]
    batch = packed([[4, 3]], row_tokens=7)
    assert torch.equal(frozen(batch).lm_loss_sum, free(batch).lm_loss_sum)
    frozen(batch).router.z_sum.sum().backward()
    assert frozen.embed.weight.grad.any()


@pytest.mark.parametrize("option", ["router_logit_cap", "router_jitter", "router_noise", "none"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_no_option_hides_a_logit_that_is_not_finite(option: str, bad: float) -> None:
    """A cap makes a finite number of infinity: it must stop the step all the same, at once or by the sums of the step."""
    moe = MoEConfig(num_experts=4, top_k=2, **({} if option == "none" else {option: 0.5}))
    router = logits_router(moe)
    router.train()
    x_BSD = torch.ones(1, 2, 4)
    with torch.no_grad():
        router.weight[1] = bad
    valid_BS = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(NumericError, match=r"layers\.3\.moe\.router: logits .*not finite"):
        router(x_BSD, valid_BS)
    router.stops_early = False
    assert not router(x_BSD, valid_BS).stats.max_logit.isfinite()
