"""router_topk: blocks of tokens equal the plain formula, in picks to the last bit, in sums and gradients to rounding."""

import itertools

import pytest
import torch
from torch import Tensor

from backends.ops.router_topk import IMPLEMENTATIONS, chunked, router_topk
from backends.ops.router_topk.chunked import blocks
from backends.ops.router_topk.scores import SCORES
from backends.ops.router_topk.spec import NO_EXPERT, Choice, Picks, Routed
from dispatch.interface import NOT_DISPATCHED

BLOCK = 12
"""Numbers of a block here: a few tokens, or less than one."""
SHAPES = [(3, 5, 8), (1, 1, 1), (2, 70, 32), (40, 3, 2), (0, 4, 4), (2, 0, 4)]
"""B, S, E: parts of rows; one expert; a token a block; several rows a block; nothing at all."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in every case: what fits into one is left to the reference."""
    monkeypatch.setattr(chunked, "_BLOCK", BLOCK)


def logits(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    num_rows, row_length, num_experts = shape
    generator = torch.Generator().manual_seed(num_experts)
    return 4 * torch.randn(num_rows * row_length, num_experts, generator=generator).to(dtype)


def valid(shape: tuple[int, int, int], padded: bool) -> Tensor:
    valid_BS = torch.ones(shape[:2], dtype=torch.bool)
    if padded and shape[1] > 1:
        valid_BS[::2, shape[1] // 2 :] = False
    return valid_BS


def run(
    implementation: str, logits_TE: Tensor, valid_BS: Tensor, choice: Choice, wanted: tuple[bool, ...], **given: object
) -> tuple[Routed, Tensor]:
    """The result, and the gradient of a sum over the wanted ones of weights, probabilities and z, each unlike the other."""
    logits_TE = logits_TE.clone().requires_grad_()
    routed = router_topk(logits_TE, valid_BS, choice, implementation=implementation, **given)  # type: ignore[arg-type]
    parts = []
    for take, value in zip(wanted, (routed.weights_TP, routed.probs_sum_BE, routed.z_sum), strict=True):
        if take:
            scale = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
            parts.append((value * scale).sum() if value.dim() else 0.01 * value)
    (gradient_TE,) = torch.autograd.grad(torch.stack([part.double() for part in parts]).sum(), logits_TE)
    return routed, gradient_TE


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    size = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative * size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_blocks_equal_the_whole(score: str, normalize: bool, shape: tuple[int, int, int]) -> None:
    num_experts = shape[2]
    bias_E = None if score == "softmax" else torch.linspace(-0.3, 0.3, num_experts)
    for padded, dtype in itertools.product([False, True], [torch.float32, torch.float64]):
        choice = Choice(score=score, top_k=min(4, num_experts), normalize=normalize)
        args = (logits(shape, dtype), valid(shape, padded), choice, (True, True, True))
        found, gradient_TE = run("chunked", *args, expert_bias_E=bias_E)
        expected, expected_TE = run("reference", *args, expert_bias_E=bias_E)
        assert torch.equal(found.ids_TP, expected.ids_TP)
        assert torch.equal(found.weights_TP, expected.weights_TP)
        assert torch.equal(found.tokens_per_expert_BE, expected.tokens_per_expert_BE)
        assert torch.equal(found.max_logit, expected.max_logit)
        for name in ("probs_sum_BE", "z_sum", "entropy_sum", "margin_sum"):
            close(getattr(found, name), getattr(expected, name), 2e-6)
        assert [value.dtype for value in found] == [value.dtype for value in expected]
        # Weights, sums and the gradient that comes back for them are fp32 for fp64 logits too.
        close(gradient_TE, expected_TE, 2e-6 if dtype == torch.float32 else 2e-7)
        if padded:
            assert not gradient_TE[~args[1].reshape(-1)].any()


@pytest.mark.parametrize("wanted", [w for w in itertools.product([True, False], repeat=3) if any(w)], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_any_part_of_the_result_may_stay_unused(score: str, wanted: tuple[bool, ...]) -> None:
    shape = (2, 6, 8)
    for normalize in (True, False):
        choice = Choice(score=score, top_k=3, normalize=normalize)
        # In fp64, where sums and their gradients alone are rounded to fp32.
        args = (logits(shape, torch.float64), valid(shape, True), choice, wanted)
        close(run("chunked", *args)[1], run("reference", *args)[1], 2e-7)


@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_those_of_finite_differences(score: str) -> None:
    """Both by autograd's own check in fp64, sums in fp32 left out."""
    shape = (2, 3, 5)
    picks = router_topk(logits(shape), valid(shape, True), Choice(score=score, top_k=2, normalize=True))
    given = Picks(picks.ids_TP, torch.zeros(6))
    for implementation, normalize in itertools.product(IMPLEMENTATIONS, [True, False]):
        choice = Choice(score=score, top_k=2, normalize=normalize)

        def weights(logits_TE: Tensor, choice: Choice = choice, implementation: str = implementation) -> Tensor:
            valid_BS = valid(shape, True)
            return router_topk(logits_TE, valid_BS, choice, picks=given, implementation=implementation).weights_TP

        assert torch.autograd.gradcheck(weights, logits(shape, torch.float64).requires_grad_())


def test_given_picks_are_kept_and_learned_from() -> None:
    """A token with fewer picks than others has NO_EXPERT in its place, weight 0 and no gradient from there."""
    ids_TP = torch.tensor([[2, 0], [1, NO_EXPERT], [NO_EXPERT, NO_EXPERT], [0, 3]])
    picks = Picks(ids_TP, torch.tensor([0.5, 0.25, 0.0, 1.0]))
    for normalize in (True, False):
        choice = Choice(score="softmax", top_k=1, normalize=normalize)
        args = (logits((1, 4, 4)), torch.ones(1, 4, dtype=torch.bool), choice, (True, False, False))
        found, gradient_TE = run("chunked", *args, picks=picks)
        expected, expected_TE = run("reference", *args, picks=picks)
        assert torch.equal(found.ids_TP, ids_TP)
        assert torch.equal(found.weights_TP, expected.weights_TP)
        assert found.tokens_per_expert_BE.tolist() == [[2, 1, 1, 1]]
        assert float(found.margin_sum) == 1.75
        close(gradient_TE, expected_TE, 2e-6)
        assert not gradient_TE[2].any()


def test_groups_limit_the_choice() -> None:
    choice = Choice(score="sigmoid", top_k=2, normalize=True, num_groups=4, topk_groups=2)
    args = (logits((2, 50, 16)), valid((2, 50, 16), True), choice, (True, True, True))
    found, expected = run("chunked", *args)[0], run("reference", *args)[0]
    assert torch.equal(found.ids_TP, expected.ids_TP)
    assert int((found.ids_TP // 4).sort().values.diff().ne(0).sum(1).max()) <= 1


def test_every_token_is_in_one_block() -> None:
    for num_rows, row_length, num_experts in [*SHAPES, (7, 30, 5), (100, 2, 2), (2, 3, 2 * BLOCK)]:
        tokens = torch.zeros(num_rows * row_length, dtype=torch.int64)
        for block in blocks(num_rows, row_length, num_experts):
            tokens[block.tokens] += 1
            assert block.rows.start * row_length <= block.tokens.start
            assert block.tokens.stop <= block.rows.stop * row_length
            if block.rows.stop - block.rows.start > 1:
                assert block.tokens.stop - block.tokens.start == (block.rows.stop - block.rows.start) * row_length
        assert bool((tokens == 1).all())


def test_what_fits_into_a_block_takes_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_BLOCK", 64)
    choice = Choice(score="softmax", top_k=2, normalize=True)
    names = []
    for num_tokens in (8, 9):
        logits_TE = torch.randn(num_tokens, 8, requires_grad=True)
        routed = router_topk(logits_TE, torch.ones(1, num_tokens, dtype=torch.bool), choice, implementation="chunked")
        assert routed.z_sum.grad_fn is not None
        names.append(routed.z_sum.grad_fn.name())
    assert names[0] != "_RouteBackward"
    assert names[1] == "_RouteBackward"


def test_the_absent_expert_is_the_one_that_dispatch_knows() -> None:
    assert NO_EXPERT == NOT_DISPATCHED


def test_shapes_that_disagree_are_refused() -> None:
    choice = Choice(score="softmax", top_k=1, normalize=False)
    with pytest.raises(ValueError, match=r"logits of 4 tokens, but valid_BS is \[1, 5\]"):
        router_topk(torch.zeros(4, 2), torch.ones(1, 5, dtype=torch.bool), choice)
