"""Balance losses and the bias update: the values of the reported faults, in the unit convention."""

import pytest
import torch
from torch import Tensor

from backends.ops.router_topk.reference import z_sum
from moe.model.balance import (
    balance_sum_batch,
    balance_sum_sequence,
    expert_bias_rate,
    expert_bias_update,
)
from moe.model.config import BiasRule, MoEConfig, RouterKind
from moe.model.outputs import RouterStats
from tests.model.cases import F1_LOGITS, context, f1, logits_router

TOP_K = 2
COLLAPSED = (10.0, 10.0, -10.0, -10.0)


def stats_of(logits_BSE: Tensor, valid_BS: Tensor | None = None, kind: RouterKind = RouterKind.softmax) -> RouterStats:
    valid_BS = torch.ones(logits_BSE.shape[:2], dtype=torch.bool) if valid_BS is None else valid_BS
    moe = MoEConfig(num_experts=logits_BSE.shape[-1], top_k=TOP_K, router=kind)
    return logits_router(moe)(logits_BSE, valid_BS, context(valid_BS)).stats


def batch_sum(stats: RouterStats) -> Tensor:
    return balance_sum_batch(stats.router_probs_sum_BE.sum(0), stats.tokens_per_expert_BE.sum(0))


def batch_loss(stats: RouterStats) -> Tensor:
    """The mean, as the trainer forms it: sum over valid tokens."""
    return batch_sum(stats) / (stats.tokens_per_expert_BE.sum() // TOP_K)


def sequence_loss(stats: RouterStats) -> Tensor:
    sums = balance_sum_sequence(stats.router_probs_sum_BE, stats.tokens_per_expert_BE)
    return sums / (stats.tokens_per_expert_BE.sum() // TOP_K)


def close(found: Tensor, *expected: float, atol: float = 1e-6) -> None:
    values = torch.tensor(expected if len(expected) > 1 else expected[0])
    torch.testing.assert_close(found.detach(), values, rtol=atol, atol=atol)


def test_f1_has_the_stated_counts_and_probabilities() -> None:
    stats = stats_of(f1())
    assert stats.tokens_per_expert_BE.tolist() == [[4, 3, 1, 0]]
    close(stats.router_probs_sum_BE[0] / 4, 0.542156, 0.301206, 0.097036, 0.059601)


def test_balance_loss_depends_on_routing() -> None:
    """A01: F1 gives 1.584640; even load exactly 1; all tokens to two of four experts 2."""
    close(batch_loss(stats_of(f1())), 1.584640)
    even = balance_sum_batch(torch.full((4,), 1.0), torch.tensor([2, 2, 2, 2])) / 4
    assert even == 1.0
    close(batch_loss(stats_of(torch.tensor(COLLAPSED).expand(1, 4, 4))), 2.0)


def test_padding_does_not_enter_the_balance_loss() -> None:
    """A02: tokens 0 and 1 alone give 1.611856, and so does F1 with 2 and 3 as padding; their gradient is exactly 0."""
    logits_BSE = f1()
    loss = batch_loss(stats_of(logits_BSE, torch.tensor([[True, True, False, False]])))
    close(loss, 1.611856)
    close(batch_loss(stats_of(f1()[:, :2])), 1.611856)
    loss.backward()
    assert logits_BSE.grad is not None
    assert not logits_BSE.grad[0, 2:].any()
    assert logits_BSE.grad[0, :2].all()


@pytest.mark.parametrize("kind", list(RouterKind))
def test_padding_alone_gives_zero(kind: RouterKind) -> None:
    """A02: 0 and not NaN, for both scopes, with gradients of 0."""
    logits_BSE = f1(2)
    stats = stats_of(logits_BSE, torch.zeros(2, 2, dtype=torch.bool), kind)
    total = batch_sum(stats) + balance_sum_sequence(stats.router_probs_sum_BE, stats.tokens_per_expert_BE)
    total = total + stats.z_sum
    assert total.item() == 0.0
    total.backward()
    assert logits_BSE.grad is not None
    assert not logits_BSE.grad.any()


def test_collapsed_layers_do_not_cancel() -> None:
    """A03: F2, two layers collapsed onto different experts: 2.0 each and in the mean; pooled they would give 1.0."""
    layers = [stats_of(torch.tensor(row).expand(1, 4, 4)) for row in (COLLAPSED, COLLAPSED[::-1])]
    probs_LE = torch.stack([layer.router_probs_sum_BE.sum(0) for layer in layers])
    counts_LE = torch.stack([layer.tokens_per_expert_BE.sum(0) for layer in layers])
    close(balance_sum_batch(probs_LE, counts_LE) / 4, 2.0, 2.0)


@pytest.mark.parametrize("coefficient", [1.0, 0.001])
def test_balance_gradient_arrives_in_the_right_size(coefficient: float) -> None:
    """A05: the unit loss's gradient with respect to token 0's logits, times the coefficient."""
    logits_BSE = f1()
    (coefficient * batch_loss(stats_of(logits_BSE))).backward()
    assert logits_BSE.grad is not None
    close(logits_BSE.grad[0, 0] / coefficient, 0.050431, -0.011058, -0.025854, -0.013518)


def test_accumulation_does_not_scale_the_balance_gradient() -> None:
    """A06: four copies of a 2-token block at once, or one after the other: sums over the step's 8 tokens, same gradient."""
    block_SE = torch.tensor(F1_LOGITS[:2])
    whole = block_SE.repeat(4, 1)[None].clone().requires_grad_()
    (batch_sum(stats_of(whole)) / 8).backward()
    parts = [block_SE[None].clone().requires_grad_() for _ in range(4)]
    for part in parts:
        (batch_sum(stats_of(part)) / 8).backward()
    assert whole.grad is not None
    torch.testing.assert_close(whole.grad[0], torch.cat([part.grad[0] for part in parts if part.grad is not None]))


def test_ranks_add_up_to_the_joint_batch() -> None:
    """A07: with counts of all ranks, the ranks' sums are the joint loss and their gradients the joint gradient."""
    joint = f1(2)
    (batch_sum(stats_of(joint)) / 4).backward()
    ranks = [row.detach()[None].clone().requires_grad_() for row in f1(2)]
    all_stats = [stats_of(rank) for rank in ranks]
    counts_E = sum(stats.tokens_per_expert_BE.sum(0) for stats in all_stats)
    assert isinstance(counts_E, Tensor)
    shares = [balance_sum_batch(stats.router_probs_sum_BE.sum(0), counts_E) / 4 for stats in all_stats]
    close(sum(shares, start=torch.zeros(())), 1.584640)
    for share in shares:
        share.backward()
    assert joint.grad is not None
    torch.testing.assert_close(joint.grad, torch.cat([rank.grad for rank in ranks if rank.grad is not None]))


def test_sequence_loss_does_not_depend_on_the_micro_batch() -> None:
    """A08: F1 as two rows: 1.611856 and 1.761594, mean 1.686725, at once or one by one, with equal gradients."""
    logits_BSE = f1(2)
    stats = stats_of(logits_BSE)
    close(sequence_loss(stats), 1.686725)
    sequence_loss(stats).backward()
    rows = [row.detach()[None].clone().requires_grad_() for row in f1(2)]
    losses = [sequence_loss(stats_of(row)) for row in rows]
    close(losses[0], 1.611856)
    close(losses[1], 1.761594)
    for loss in losses:
        (loss / 2).backward()
    assert logits_BSE.grad is not None
    torch.testing.assert_close(logits_BSE.grad, torch.cat([row.grad for row in rows if row.grad is not None]))


def test_scopes_differ_where_rows_specialise() -> None:
    """A08: one row all to experts 0 and 1, the other all to 2 and 3: 2.0 per sequence, 1.0 over the batch."""
    logits_BSE = torch.tensor([COLLAPSED, COLLAPSED[::-1]])[:, None].expand(2, 3, 4)
    close(sequence_loss(stats_of(logits_BSE)), 2.0)
    close(batch_loss(stats_of(logits_BSE)), 1.0)


def test_rows_weigh_by_their_tokens() -> None:
    """A row of 3 valid tokens with loss 2 and one of 1 with loss 2 ... against the mean over tokens by hand."""
    logits_BSE = torch.zeros(2, 3, 4)
    logits_BSE[0] = torch.tensor(COLLAPSED)
    valid_BS = torch.tensor([[True, True, True], [True, False, False]])
    # Row 0: loss 2.0 over 3 tokens. Row 1: equal logits choose experts 0 and 1, P = 1/4 each: loss 1.0 over 1 token.
    close(sequence_loss(stats_of(logits_BSE, valid_BS)), (3 * 2.0 + 1 * 1.0) / 4)


@pytest.mark.parametrize("kind", [RouterKind.sigmoid, RouterKind.sqrt_softplus])
@pytest.mark.parametrize("shift", [-80.0, -50.0, -20.0, 0.0, 20.0])
def test_tiny_scores_do_not_cheat(kind: RouterKind, shift: float) -> None:
    """A09: even load and equal logits give 1.0 at any shift (fault: 0.0716 at −50); uneven scores give more than 1."""
    stats = stats_of(torch.full((1, 4, 4), shift), kind=kind)
    even = torch.tensor([2, 2, 2, 2])
    close(balance_sum_batch(stats.router_probs_sum_BE.sum(0), even) / 4, 1.0)
    assert batch_loss(stats_of(f1() + shift, kind=kind)) > 1 - 1e-6


def test_z_loss_of_f1() -> None:
    """F1: mean logsumexp² is 5.954525 over any of its rows; padding does not enter (A02)."""
    logits_TE = f1()[0]
    close(z_sum(logits_TE, torch.ones(4, dtype=torch.bool)) / 4, 5.954525)
    for row in range(4):
        close(z_sum(logits_TE, torch.arange(4) == row), 5.954525)
    expected = (2 * logits_TE.logsumexp(-1, keepdim=True) * logits_TE.softmax(-1)).detach()
    (gradient,) = torch.autograd.grad(z_sum(logits_TE, torch.ones(4, dtype=torch.bool)), logits_TE)
    torch.testing.assert_close(gradient, expected)


def test_bias_moves_by_the_sign_of_the_load() -> None:
    """A14: counts 6, 2, 4, 4 at rate 0.001 give (−0.001, +0.001, 0, 0), in the storage that was registered."""
    bias_E = torch.zeros(4)
    storage = bias_E.data_ptr()
    expert_bias_update(bias_E, torch.tensor([6, 2, 4, 4]), 0.001)
    close(bias_E, -0.001, 0.001, 0.0, 0.0, atol=0)
    assert bias_E.data_ptr() == storage


def test_bias_moves_once_for_the_counts_of_the_whole_step() -> None:
    """A15: micro-batches (3, 1) twice give (−r, +r), not twice that; (4, 0) then (0, 4) give no move."""
    bias_E = torch.zeros(2)
    expert_bias_update(bias_E, torch.tensor([3, 1]) + torch.tensor([3, 1]), 0.01)
    close(bias_E, -0.01, 0.01, atol=0)
    expert_bias_update(bias_E, torch.tensor([4, 0]) + torch.tensor([0, 4]), 0.01)
    close(bias_E, -0.01, 0.01, atol=0)


def test_bias_sign_is_exact_for_large_counts() -> None:
    """One token more than the mean at 10¹² tokens still moves the bias: no rounding through floats."""
    bias_E = torch.zeros(3)
    expert_bias_update(bias_E, 10**12 + torch.tensor([1, 0, -1]), 0.5)
    assert bias_E.tolist() == [-0.5, 0.0, 0.5]


def test_proportional_rule_moves_by_the_share_of_the_mean() -> None:
    """Counts 6, 2, 4, 4 (mean 4) at rate 0.01: (4 − 6)/4 = −0.5, so −0.005, +0.005, 0, 0. No picks, no move."""
    bias_E = torch.zeros(4)
    storage = bias_E.data_ptr()
    expert_bias_update(bias_E, torch.tensor([6, 2, 4, 4]), 0.01, rule=BiasRule.proportional)
    close(bias_E, -0.005, 0.005, 0.0, 0.0, atol=1e-9)
    expert_bias_update(bias_E, torch.zeros(4, dtype=torch.int64), 0.01, rule=BiasRule.proportional)
    expert_bias_update(bias_E, torch.zeros(4, dtype=torch.int64), 0.01)
    close(bias_E, -0.005, 0.005, 0.0, 0.0, atol=1e-9)
    assert bias_E.data_ptr() == storage


@pytest.mark.parametrize("rule", list(BiasRule))
def test_bias_stays_inside_its_clamp(rule: BiasRule) -> None:
    bias_E = torch.zeros(2)
    for _ in range(9):
        expert_bias_update(bias_E, torch.tensor([8, 0]), 0.01, rule=rule, clamp=0.025)
    close(bias_E, -0.025, 0.025, atol=0)


def test_bias_stands_still_in_the_last_part() -> None:
    """Frozen after 0.8 of 10 steps: steps 1 to 8 move it, 9 and 10 do not; never frozen by default."""
    moe = MoEConfig(router=RouterKind.sigmoid, expert_bias_rate=0.5, expert_bias_freeze_after=0.8)
    assert [expert_bias_rate(moe, step, 10) for step in range(1, 11)] == [0.5] * 8 + [0.0] * 2
    always = MoEConfig(router=RouterKind.sigmoid, expert_bias_rate=0.5)
    assert {expert_bias_rate(always, step, 10) for step in range(1, 11)} == {0.5}


def test_other_conventions_are_multiples_of_ours() -> None:
    """F1 in Hugging Face's convention (fractions sum to k) is 3.169280: ours times k."""
    close(TOP_K * batch_loss(stats_of(f1())), 3.169280)
