"""Balance terms through the step that the trainer runs: there when asked for, of one size however a step is cut."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.config import load_config
from moe.model.batch import TokenBatch
from moe.model.config import BalanceConfig, BalanceScope, BiasRule, MoEConfig, RouterKind
from tests.faults.objective import Step, cut, one_step, own_rank, rows
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]
CUT_ANYWHERE = [BalanceScope.sequence, BalanceScope.batch, BalanceScope.global_batch]


def step_of_rank(moe: MoEConfig, batches_by_rank: Sequence[Sequence[TokenBatch]]) -> dict[str, Any]:
    """Runs on every rank; plain lists come back, since a pipe would share tensors by handle."""
    step = one_step(moe, batches_by_rank[own_rank()])
    return vars(step) | {"router_gradients": [gradient.tolist() for gradient in step.router_gradients]}


def run(process_pool: Pools, moe: MoEConfig, batches_by_rank: Sequence[Sequence[TokenBatch]]) -> Step:
    results = process_pool(len(batches_by_rank)).run(step_of_rank, moe, batches_by_rank)
    assert all(result == results[0] for result in results)
    return Step(**results[0] | {"router_gradients": [torch.tensor(g) for g in results[0]["router_gradients"]]})


def settings(scope: BalanceScope = BalanceScope.batch, **changes: Any) -> MoEConfig:
    base: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 8, "load_balancing_coef": 1.0}
    return MoEConfig(**(base | {"balance_scope": scope} | changes))


def assert_same_gradients(found: Step, expected: Step) -> None:
    for mine, theirs in zip(found.router_gradients, expected.router_gradients, strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("overrides", [[], ["moe.balance_scope=sequence"], ["moe.balance_scope=global_batch"]])
def test_asking_for_the_loss_in_a_recipe_turns_it_on(process_pool: Pools, overrides: list[str]) -> None:
    """A04: coefficient 0.01 through the recipe, nothing else: loss(0.01) − loss(0) = 0.01 × reported balance loss.

    A47: and the language loss that is logged has nothing of it. With coefficient 0 there is no term.
    """
    batches = [cut(rows(4, 6), 2)]
    steps = []
    for coefficient in ("0.01", "0"):
        recipe = [f"moe.load_balancing_coef={coefficient}", *(overrides if coefficient != "0" else [])]
        moe = dataclasses.replace(load_config(recipe, "tiny").moe, moe_intermediate_size=8)
        steps.append(run(process_pool, moe, batches))
    asked, without = steps
    reported = next(iter(asked.balance_losses.values()))
    assert min(reported) > 1
    assert asked.lm_loss == without.lm_loss == without.total_loss
    assert asked.total_loss - without.total_loss == pytest.approx(0.01 * sum(reported) / len(reported), rel=1e-6)
    added = flat(asked.router_gradients) - flat(without.router_gradients)
    assert added.abs().max() > 1e-6


@pytest.mark.parametrize("scope", CUT_ANYWHERE)
def test_accumulation_does_not_scale_the_balance_term(process_pool: Pools, scope: BalanceScope) -> None:
    """A06: four copies of a 2-token row in one micro-batch or in four: equal router gradients from the term alone."""
    block = rows(1, 2, labels=False)
    four = TokenBatch(*(tensor.repeat(4, 1) for tensor in block))
    whole = run(process_pool, settings(scope), [[four]])
    parts = run(process_pool, settings(scope), [cut(four, 4)])
    assert_same_gradients(parts, whole)
    assert parts.balance_losses[scope.name] == pytest.approx(whole.balance_losses[scope.name], rel=1e-6)


@pytest.mark.parametrize("scope", CUT_ANYWHERE)
@pytest.mark.parametrize("term", ["language", "balance"])
def test_data_parallel_does_not_scale_either_term(process_pool: Pools, term: str, scope: BalanceScope) -> None:
    """A07: two ranks with identical batches against one rank, for each term by itself."""
    batch = rows(2, 6, labels=term == "language")
    moe = settings(scope, load_balancing_coef=1.0 if term == "balance" else 0.0)
    assert_same_gradients(run(process_pool, moe, [[batch], [batch]]), run(process_pool, moe, [[batch]]))


def test_the_global_batch_is_the_same_however_it_is_cut(process_pool: Pools) -> None:
    """Eight different rows as 1 × 8, 4 micro-batches, and 2 ranks × 2 micro-batches; the batch scope does differ there."""
    whole = rows(8, 6, labels=False)
    moe = settings(BalanceScope.global_batch)
    expected = run(process_pool, moe, [[whole]])
    quarters = cut(whole, 4)
    assert_same_gradients(run(process_pool, moe, [quarters]), expected)
    assert_same_gradients(run(process_pool, moe, [[quarters[0], quarters[2]], [quarters[1], quarters[3]]]), expected)
    per_micro_step = run(process_pool, settings(BalanceScope.batch), [quarters])
    departure = flat(per_micro_step.router_gradients) - flat(expected.router_gradients)
    assert departure.abs().max() > 1e-3 * flat(expected.router_gradients).abs().max()


def test_the_micro_batch_scope_follows_the_layout(process_pool: Pools) -> None:
    """As its name says: with one row a micro-batch it is the sequence scope, with all rows in one it is the batch scope."""
    whole = rows(4, 6, labels=False)
    micro, sequence, batch = (
        settings(s) for s in (BalanceScope.micro_batch, BalanceScope.sequence, BalanceScope.batch)
    )
    assert_same_gradients(run(process_pool, micro, [cut(whole, 4)]), run(process_pool, sequence, [[whole]]))
    assert_same_gradients(run(process_pool, micro, [[whole]]), run(process_pool, batch, [[whole]]))
    assert_same_gradients(run(process_pool, micro, cut_for_ranks(whole)), run(process_pool, micro, [cut(whole, 2)]))


def cut_for_ranks(batch: TokenBatch) -> list[list[TokenBatch]]:
    return [[part] for part in cut(batch, 2)]


def test_several_balance_losses_add_up(process_pool: Pools) -> None:
    """Two scopes at once: the gradient is the sum of theirs, and each is reported by itself."""
    batches = [cut(rows(4, 6, labels=False), 2)]
    both = settings(
        load_balancing_coef=0.0,
        balance=BalanceConfig(sequence=0.25, global_batch=2.0),
        balance_scope=BalanceScope.batch,
    )
    found = run(process_pool, both, batches)
    sequence = run(process_pool, settings(BalanceScope.sequence, load_balancing_coef=0.25), batches)
    widest = run(process_pool, settings(BalanceScope.global_batch, load_balancing_coef=2.0), batches)
    expected = flat(sequence.router_gradients) + flat(widest.router_gradients)
    torch.testing.assert_close(flat(found.router_gradients), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert found.balance_losses == sequence.balance_losses | widest.balance_losses
    assert found.total_loss == pytest.approx(sequence.total_loss + widest.total_loss, rel=1e-6)


@pytest.mark.parametrize("rule", list(BiasRule))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_bias_moves_once_a_step_from_all_picks(process_pool: Pools, num_ranks: int, rule: BiasRule) -> None:
    """A15: with 4 micro-batches on 1 rank, or 2 on each of 2, one move by the picks of all of them."""
    moe = settings(
        router=RouterKind.sigmoid, load_balancing_coef=0.0, expert_bias_rate=0.01, expert_bias_rule=rule
    )  # fmt: skip
    quarters = cut(rows(4, 5), 4)
    batches = [quarters] if num_ranks == 1 else [quarters[:2], quarters[2:]]
    step = run(process_pool, moe, batches)
    for bias, picks in zip(step.biases, step.tokens_per_expert, strict=True):
        assert sum(picks) == 4 * 5 * 2
        mean = sum(picks) / 4
        moves = [(mean - c) / mean if rule is BiasRule.proportional else (mean > c) - (mean < c) for c in picks]
        assert bias == pytest.approx([0.01 * move for move in moves], abs=1e-9)
