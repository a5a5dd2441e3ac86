"""Settings of routers and balance that have no effect, or contradict each other, are refused in words (A04)."""

import pytest

from moe.config import ConfigError, load_config
from moe.model.config import ROUTER_TRAITS, BalanceScope, MoEConfig, RouterKind, balance_terms


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("moe.router=hash", r"moe\.load_balancing_coef \(0\.01\) has no effect with moe\.router=hash"),
        ("moe.router=sinkhorn", r"moe\.load_balancing_coef \(0\.01\) has no effect with moe\.router=sinkhorn"),
        (
            "moe.router=balanced moe.load_balancing_coef=0 moe.balance.sequence=1e-3",
            r"moe\.balance\.sequence \(0\.001\) has no effect with moe\.router=balanced",
        ),
        (
            "moe.router=expert_choice moe.load_balancing_coef=0",
            r"moe\.normalize_topk \(true\) must be false with moe\.router=expert_choice",
        ),
        (
            "moe.balance.global_batch=1e-2",
            r"moe\.balance\.global_batch \(0\.01\) must not stand beside moe\.load_balancing_coef \(0\.01\)",
        ),
        ("moe.balance.batch=-1 moe.load_balancing_coef=0", r"moe\.balance\.batch \(-1\.0\) must not be negative"),
        ("moe.router=sqrt_softplus moe.forced_skew=2", r"moe\.forced_skew \(2\.0\) has no effect"),
        ("moe.expert_bias_clamp=1", r"moe\.expert_bias_clamp \(1\.0\) has no effect with moe\.expert_bias_rate=0"),
        ("moe.expert_bias_rule=proportional", r"moe\.expert_bias_rule \(proportional\) has no effect"),
        ("moe.expert_bias_freeze_after=0.9", r"moe\.expert_bias_freeze_after \(0\.9\) has no effect"),
        ("moe.router=sinkhorn moe.load_balancing_coef=0 moe.num_groups=2", r"moe\.num_groups \(2\) has no effect"),
        ("moe.topk_groups=2", r"moe\.topk_groups \(2\) must be at most moe\.num_groups \(1\)"),
        ("moe.num_groups=4 moe.topk_groups=4", r"moe\.topk_groups \(4\) must be below moe\.num_groups \(4\)"),
        ("moe.router_seed=5", r"moe\.router_seed \(5\) has no effect .*nothing is drawn"),
        (
            "moe.load_balancing_coef=0 moe.balance_scope=sequence",
            r"moe\.balance_scope \(sequence\) has no effect with moe\.load_balancing_coef=0",
        ),
        (
            "moe.router=sigmoid moe.expert_bias_rate=0.01 moe.expert_bias_freeze_after=0",
            r"moe\.expert_bias_rate \(0\.01\) has no effect with moe\.expert_bias_freeze_after=0",
        ),
        ("moe.num_groups=3", r"moe\.num_groups \(3\) must divide moe\.num_experts \(4\); choose one of 1, 2, 4"),
        ("moe.num_groups=2 moe.top_k=3", r"moe\.top_k \(3\) must be at most the experts of .* groups, 2"),
        ("moe.router_jitter=1", r"moe\.router_jitter \(1\.0\) must be at least 0 and below 1"),
    ],
)
def test_a_setting_without_effect_is_refused(overrides: str, message: str) -> None:
    """A04, A42: with path, value, rule and a way out."""
    with pytest.raises(ConfigError, match=message):
        load_config(overrides.split(" "), "tiny")


@pytest.mark.parametrize("kind", list(RouterKind))
def test_every_router_can_be_asked_for(kind: RouterKind) -> None:
    """With what its refusals propose, and nothing else."""
    traits = ROUTER_TRAITS[kind]
    overrides = [f"moe.router={kind.name}"]
    overrides += [] if traits.balance_loss else ["moe.load_balancing_coef=0"]
    overrides += [] if traits.exact_top_k else ["moe.normalize_topk=false"]
    overrides += ["moe.expert_bias_rate=1e-3"] if traits.expert_bias else []
    assert load_config(overrides, "tiny").moe.router is kind


def test_terms_of_both_ways_of_asking() -> None:
    one = MoEConfig(load_balancing_coef=0.02, balance_scope=BalanceScope.global_batch)
    assert balance_terms(one) == {BalanceScope.global_batch: 0.02}
    overrides = ["moe.load_balancing_coef=0", "moe.balance={global_batch: 1e-2, sequence: 1e-4}"]
    several = load_config(overrides, "tiny").moe
    assert list(balance_terms(several).items()) == [(BalanceScope.sequence, 1e-4), (BalanceScope.global_batch, 1e-2)]
    assert balance_terms(MoEConfig(load_balancing_coef=0)) == {}
