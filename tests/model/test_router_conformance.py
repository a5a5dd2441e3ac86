"""The laws of every router: parametrised over the registry, so that a new one cannot be there without keeping them.

Laws about processes and accumulation are in tests/distributed/test_router_layouts.py, over the same registry.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backends.ops.router_topk.scores import SCORES
from dispatch.interface import NOT_DISPATCHED
from moe.errors import NumericError
from moe.model.balance import balance_sum_batch
from moe.model.config import ROUTER_TRAITS, MoEConfig, RouterDType, RouterKind, pick_slots
from moe.model.router import Router, Routing
from moe.model.routers.registry import ROUTERS
from moe.model.routers.rule import TokenContext
from tests.model import routing_reference as reference
from tests.model.cases import context, logits_router, route

KINDS = list(ROUTERS)
SHAPES = {
    "5 experts": (5, 2, 2, 7),
    "every expert": (6, 6, 1, 3),
    "one token": (4, 2, 1, 1),
    "one expert": (1, 1, 2, 3),
    "no rows": (4, 2, 0, 5),
    "no tokens": (4, 2, 3, 0),
    "top-1 of 7": (7, 1, 2, 9),
    "513 experts": (513, 8, 2, 5),
}
"""Experts, picks, rows, tokens of a row."""

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def config(kind: RouterKind, num_experts: int = 5, top_k: int = 2, **changes: object) -> MoEConfig:
    """A configuration of that kind; not normalised where that would be refused."""
    settings: dict[str, object] = {
        "router": kind, "num_experts": num_experts, "top_k": top_k, "routed_scale": 1.5,
        "normalize_topk": top_k > 1 and ROUTER_TRAITS[kind].exact_top_k,
    }  # fmt: skip
    return MoEConfig(**(settings | changes))  # type: ignore[arg-type]


def random_logits(num_rows: int, num_tokens: int, num_experts: int, seed: int = 0, size: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(num_rows, num_tokens, num_experts, generator=generator)


def some_valid(num_rows: int, num_tokens: int, seed: int = 1) -> Tensor:
    return torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.7


def documented_counts(moe: MoEConfig, valid_BS: Tensor) -> Tensor:
    """Picks of each row."""
    valid_B = valid_BS.sum(1)
    if ROUTER_TRAITS[moe.router].exact_top_k:
        return valid_B * moe.top_k
    return valid_B * moe.top_k // moe.num_experts * moe.num_experts


def same(found: Routing, expected: Routing) -> None:
    """To the last bit."""
    assert torch.equal(found.topk_expert_ids_TK, expected.topk_expert_ids_TK)
    assert torch.equal(found.topk_weights_TK, expected.topk_weights_TK)
    for name, value in found.stats._asdict().items():
        assert torch.equal(value, getattr(expected.stats, name)), name


def test_it_is_known_everywhere(kind: RouterKind) -> None:
    """In the configuration's traits, in the reference, and in the documentation with its own heading."""
    assert list(ROUTERS) == list(RouterKind) == list(ROUTER_TRAITS) == list(reference.SELECT)
    text = (Path(__file__).parents[2] / "docs" / "routers.md").read_text("utf-8")
    assert f"\n### `{kind.name}`" in text


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("padding", ["none", "some", "all"])
def test_counts_and_weights_are_as_documented(kind: RouterKind, shape: tuple[int, ...], padding: str) -> None:
    """Counts sum to T·K (or the documented number) and agree with the ids; weights finite, non-negative, summing right."""
    num_experts, top_k, num_rows, num_tokens = shape
    moe = config(kind, num_experts, top_k)
    valid_BS = {"none": torch.ones, "all": torch.zeros}.get(padding, torch.ones)(num_rows, num_tokens).bool()
    if padding == "some":
        valid_BS = some_valid(num_rows, num_tokens)
    ids_TK, weights_TK, stats = route(moe, random_logits(num_rows, num_tokens, num_experts, size=30.0), valid_BS)
    valid_T = valid_BS.flatten()
    assert (ids_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert ids_TK.shape == weights_TK.shape == (num_rows * num_tokens, pick_slots(moe))
    assert torch.equal(stats.tokens_per_expert_BE.sum(1), documented_counts(moe, valid_BS))
    for b in range(num_rows):
        row_ids = ids_TK.view(num_rows, num_tokens, ids_TK.shape[1])[b].flatten()
        expected = torch.bincount(row_ids[row_ids != NOT_DISPATCHED], minlength=num_experts)
        assert torch.equal(stats.tokens_per_expert_BE[b], expected)
    for row, valid in zip(ids_TK.tolist(), valid_T.tolist(), strict=True):
        picked = [expert for expert in row if expert != NOT_DISPATCHED]
        assert len(set(picked)) == len(picked)
        assert all(0 <= expert < num_experts for expert in picked)
        if ROUTER_TRAITS[kind].exact_top_k or not valid:
            assert len(picked) == (top_k if valid else 0)
    assert weights_TK.isfinite().all()
    assert (weights_TK >= 0).all()
    assert not weights_TK[ids_TK == NOT_DISPATCHED].any()
    if moe.normalize_topk:
        torch.testing.assert_close(weights_TK[valid_T].sum(-1), torch.full((int(valid_T.sum()),), 1.5))
    elif SCORES[ROUTERS[kind].score].is_distribution:
        assert (weights_TK.sum(-1) <= 1.5 * (1 + 1e-6)).all()
    torch.testing.assert_close(stats.router_probs_sum_BE.sum(1), valid_BS.sum(1).float())
    assert stats.margin_sum >= 0
    assert all(value.isfinite().all() for value in stats)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_counts(kind: RouterKind, side: str) -> None:
    """A02: a padded row gives what the bare row gives in every sum, and padded tokens get no gradient at all."""
    moe = config(kind)
    bare, padding = random_logits(2, 7, 5), random_logits(2, 4, 5, seed=9, size=50.0)
    tokens, others = context(torch.ones(2, 7)), context(torch.ones(2, 4), seed=8)
    order = slice(None) if side == "right" else slice(None, None, -1)
    joined = torch.cat([bare, padding][order], dim=1).requires_grad_()
    valid_BS = torch.tensor([[True] * 7, [False] * 4][order][0] + [[True] * 7, [False] * 4][order][1]).expand(2, 11)
    padded_tokens = TokenContext(
        *(torch.cat([a, b][order], dim=1) for a, b in zip(tokens[:2], others[:2], strict=True))
    )
    found, expected = route(moe, joined, valid_BS, padded_tokens), route(moe, bare, tokens=tokens)
    for name, value in found.stats._asdict().items():
        torch.testing.assert_close(value, getattr(expected.stats, name), rtol=1e-6, atol=0, msg=name)
    assert torch.equal(found.topk_expert_ids_TK[valid_BS.flatten()], expected.topk_expert_ids_TK)
    (found.stats.router_probs_sum_BE[:, 0].sum() + found.stats.z_sum + found.topk_weights_TK.sum(0)[0]).backward()
    assert joined.grad is not None
    assert not joined.grad[~valid_BS].any()
    assert joined.grad[valid_BS].any(dim=-1).all()


def test_rows_do_not_look_at_each_other(kind: RouterKind) -> None:
    """Any cut into micro-batches gives the same ids, weights and counts to the last bit; sums add up."""
    moe = config(kind)
    logits, valid_BS = random_logits(4, 6, 5), some_valid(4, 6)
    tokens = context(valid_BS)
    whole = route(moe, logits, valid_BS, tokens)
    parts = [
        route(moe, logits[rows], valid_BS[rows], TokenContext(*(tensor[rows] for tensor in tokens[:2])))
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert torch.equal(torch.cat([part.topk_expert_ids_TK for part in parts]), whole.topk_expert_ids_TK)
    assert torch.equal(torch.cat([part.topk_weights_TK for part in parts]), whole.topk_weights_TK)
    for name in ("tokens_per_expert_BE", "router_probs_sum_BE"):
        assert torch.equal(torch.cat([getattr(part.stats, name) for part in parts]), getattr(whole.stats, name)), name
    for name in ("z_sum", "entropy_sum", "margin_sum"):
        total = sum(getattr(part.stats, name) for part in parts)
        torch.testing.assert_close(total, getattr(whole.stats, name), rtol=1e-6, atol=1e-6, msg=name)


def test_evaluation_and_recomputation_leave_no_trace(kind: RouterKind) -> None:
    """A13, A17: same bits when computed again, with jitter and noise too; no buffer, attribute or generator moves."""
    moe = config(kind, router_jitter=0.1, router_noise=0.5)
    router = logits_router(moe)
    logits, valid_BS = random_logits(2, 7, 5), some_valid(2, 7)
    tokens = context(valid_BS)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    attributes, random_state = dict(vars(router)), torch.get_rng_state()
    expected = router(logits, valid_BS, tokens)
    router.eval()
    with torch.no_grad():
        quiet = router(logits, valid_BS, tokens)
        router(random_logits(3, 4, 5), some_valid(3, 4), context(torch.ones(3, 4)))
    router.train()
    assert not torch.equal(quiet.topk_weights_TK, expected.topk_weights_TK)
    again = checkpoint(router, logits.requires_grad_(), valid_BS, tokens, use_reentrant=False)
    same(again, expected)
    again.topk_weights_TK.sum().backward()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: value for name, value in vars(router).items() if name[0] != "_"} == {
        name: value for name, value in attributes.items() if name[0] != "_"
    }
    assert all(torch.equal(before[name], tensor) for name, tensor in router.state_dict().items())


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "unnormalised": {"normalize_topk": False},
    "capped": {"router_logit_cap": 4.0},
    "fp64": {"router_dtype": RouterDType.fp64},
    "groups": {"num_experts": 6, "num_groups": 3, "topk_groups": 2},
    "single pick": {"top_k": 1, "normalize_topk": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_equal_the_float64_reference(kind: RouterKind, variant: str) -> None:
    """Ids, weights, sums; gradients of a task, of the balance loss and of the z-loss by the logits."""
    changes = VARIANTS[variant]
    if "num_groups" in changes and not ROUTER_TRAITS[kind].groups:
        pytest.skip("cannot be limited to groups: refused by moe/rules/routing.py")
    moe = config(kind, **changes)  # type: ignore[arg-type]
    num_experts = moe.num_experts
    router = logits_router(moe)
    bias_E = torch.linspace(0.3, -0.3, num_experts)
    if router.expert_bias is not None:
        router.expert_bias.copy_(bias_E)
    valid_BS = some_valid(3, 8)
    tokens = context(valid_BS)
    logits = random_logits(3, 8, num_experts).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    capped = exact if not moe.router_logit_cap else moe.router_logit_cap * (exact / moe.router_logit_cap).tanh()

    found = router(logits, valid_BS, tokens)
    width = found.topk_expert_ids_TK.shape[1]
    task_weights = torch.randn(24, num_experts, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    terms = {name: torch.zeros((), dtype=torch.float64) for name in ("task", "balance", "z")}
    probs_sum = torch.zeros(num_experts, dtype=torch.float64)
    counts = [0] * num_experts
    for b in range(3):
        row = reference.Row(
            logits=capped[b].tolist(), valid=valid_BS[b].tolist(),
            bias=bias_E.tolist() if ROUTER_TRAITS[kind].expert_bias else [0.0] * num_experts,
            keys=tokens.keys_BS[b].tolist(), ids=tokens.input_ids_BS[b].tolist(), layer_index=3,
        )  # fmt: skip
        for s, ids in enumerate(reference.SELECT[kind](row, moe)):
            t = b * 8 + s
            mine = [i for i in found.topk_expert_ids_TK[t].tolist() if i != NOT_DISPATCHED]
            if not row.valid[s]:
                assert mine == []
                continue
            assert mine == ids
            weights, probs = reference.weights_of(capped[b, s], ids, moe)
            for place, (expert, weight) in enumerate(zip(ids, weights, strict=True)):
                place = expert if width == num_experts and not ROUTER_TRAITS[kind].exact_top_k else place
                torch.testing.assert_close(
                    found.topk_weights_TK[t, place].double(), weight.detach(), rtol=1e-5, atol=1e-7
                )
                terms["task"] = terms["task"] + weight * task_weights[t, expert]
                counts[expert] += 1
            probs_sum = probs_sum + probs
            terms["z"] = terms["z"] + capped[b, s].exp().sum().log() ** 2
    fractions = torch.tensor(counts, dtype=torch.float64) / max(sum(counts), 1)
    terms["balance"] = num_experts * (fractions * probs_sum).sum()

    ids_TK = found.topk_expert_ids_TK
    picked = task_weights.float().gather(1, ids_TK.clamp(min=0))
    sums = found.stats
    mine_terms = {
        "task": (found.topk_weights_TK * picked).sum(),
        "balance": balance_sum_batch(sums.router_probs_sum_BE.sum(0), sums.tokens_per_expert_BE.sum(0)),
        "z": sums.z_sum,
    }
    for name, expected in terms.items():
        torch.testing.assert_close(mine_terms[name].double(), expected.detach(), rtol=1e-5, atol=1e-6, msg=name)
        if not expected.requires_grad:
            continue
        (gradient,) = torch.autograd.grad(mine_terms[name], logits, retain_graph=True)
        (exact_gradient,) = torch.autograd.grad(expected, exact, retain_graph=True)
        # Where load is even the balance gradient is 0, and only the rounding of its terms (near 1) is left.
        scale = max(float(exact_gradient.abs().max()), 0.1)
        torch.testing.assert_close(
            gradient.double(), exact_gradient, rtol=0, atol=1e-5 * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_ties_are_stable(kind: RouterKind) -> None:
    """Equal logits: the same ids every time, and those of a token do not depend on who stands beside it in other rows."""
    moe = config(kind, 8, 3)
    for size in (0.0, 1e-8, -80.0):
        logits = torch.full((3, 8, 8), size)
        whole = route(moe, logits)
        same(route(moe, logits), whole)
        if ROUTER_TRAITS[kind].balance_loss:
            assert whole.topk_expert_ids_TK.tolist() == [[0, 1, 2]] * 24
        if kind is RouterKind.sinkhorn:
            assert whole.topk_expert_ids_TK.tolist() == [[0, 1, 2]] * 24
        if kind is RouterKind.expert_choice:
            # Of equal tokens the first 8 · 3 / 8 = 3 of each row, for every expert.
            taken = (whole.topk_expert_ids_TK != NOT_DISPATCHED).view(3, 8, 8)
            assert taken.all(-1).tolist() == [[True] * 3 + [False] * 5] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_stop_before_dispatch_with_layer_and_rank(
    kind: RouterKind, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "6")
    x_BSD = torch.zeros(1, 5, 5)
    x_BSD[0, 2, 1] = bad
    message = r"layers\.3\.moe\.router: logits of 1 of 5 tokens are not finite \(rank 6\)"
    with pytest.raises(NumericError, match=message):
        route(config(kind), x_BSD)


def test_scores_are_fp32_whatever_the_weights_are(kind: RouterKind) -> None:
    """A bf16 router equals, to the last bit, an fp32 router with the same (rounded) weights and inputs."""
    half = Router(16, config(kind), layer_index=0)
    torch.nn.init.normal_(half.weight, generator=torch.Generator().manual_seed(0))
    half.to(torch.bfloat16)
    full = copy.deepcopy(half).float()
    x_BSD = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    valid_BS = torch.ones(2, 7, dtype=torch.bool)
    same(half(x_BSD, valid_BS, context(valid_BS)), full(x_BSD.float(), valid_BS, context(valid_BS)))


def test_a_frozen_router_has_no_parameter_and_lets_gradients_through(kind: RouterKind) -> None:
    """Its weight is a saved buffer that stays fp32; hidden states still get the task's gradient."""
    frozen = Router(5, config(kind, freeze_router=True), layer_index=3)
    frozen.weight.copy_(torch.eye(5) + 0.001)
    frozen.to(torch.bfloat16)
    assert list(frozen.parameters()) == []
    assert frozen.weight.dtype == torch.float32
    assert "weight" in frozen.state_dict()
    logits = random_logits(2, 7, 5).requires_grad_()
    frozen(logits, torch.ones(2, 7, dtype=torch.bool), context(torch.ones(2, 7))).topk_weights_TK[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.any()


def test_replayed_ids_are_obeyed_and_weighed_as_chosen_ones(kind: RouterKind) -> None:
    """Its own ids replayed give its own routing; others are taken, with weights from today's logits."""
    router = logits_router(config(kind))
    logits, valid_BS = random_logits(2, 7, 5), some_valid(2, 7)
    chosen = router(logits, valid_BS, context(valid_BS))
    router.replayed_ids_BSP = chosen.topk_expert_ids_TK.view(2, 7, -1)
    again = router(logits, valid_BS, context(valid_BS))
    same(Routing(*again[:2], again.stats._replace(margin_sum=chosen.stats.margin_sum)), chosen)
    router.replayed_ids_BSP = torch.tensor([4, 2]).expand(2, 7, 2)
    forced = router(logits, valid_BS, context(valid_BS))
    assert forced.topk_expert_ids_TK[valid_BS.flatten()].tolist() == [[4, 2]] * int(valid_BS.sum())
    assert forced.stats.tokens_per_expert_BE.sum(0).tolist() == [0, 0, int(valid_BS.sum()), 0, int(valid_BS.sum())]
    with pytest.raises(ValueError, match=r"layers\.3\.moe\.router: recorded routes are of \[2, 7\] rows and tokens"):
        router(logits[:1], valid_BS[:1], context(valid_BS[:1]))


def test_selection_bias_exists_exactly_where_it_is_used(kind: RouterKind) -> None:
    names = [name for name, _ in Router(8, config(kind), layer_index=0).named_buffers()]
    assert names == (["expert_bias"] if ROUTER_TRAITS[kind].expert_bias else [])
