"""Rules on routing and balancing."""

from collections.abc import Iterator

from moe.model.config import ROUTER_TRAITS, BalanceScope, BiasRule, MoEConfig, RouterKind
from moe.rules.words import divisors
from moe.schema import Problem, RunConfig


def choice(config: RunConfig) -> Iterator[Problem]:
    moe = config.moe
    if moe.top_k > moe.num_experts:
        yield Problem(
            path="moe.top_k",
            value=moe.top_k,
            rule=f"must be at most moe.num_experts ({moe.num_experts})",
            way_out=f"choose {moe.num_experts} or less, or more experts",
            involves=("moe.num_experts",),
        )
    if moe.top_k == 1 and moe.normalize_topk:
        yield Problem(
            path="moe.normalize_topk",
            value="true",
            rule="must be false with moe.top_k=1: a weight that is always 1 cuts the router off from the task",
            way_out="set moe.normalize_topk=false",
            involves=("moe.top_k",),
        )
    traits = ROUTER_TRAITS[moe.router]
    if not traits.exact_top_k and moe.normalize_topk:
        yield Problem(
            path="moe.normalize_topk",
            value="true",
            rule=f"must be false with moe.router={moe.router.name}: a token that one expert takes would weigh 1, untaught",
            way_out="set moe.normalize_topk=false",
            involves=("moe.router",),
        )
    if moe.expert_bias_rate > 0 and not traits.expert_bias:
        yield Problem(
            path="moe.expert_bias_rate",
            value=moe.expert_bias_rate,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="set moe.router=sigmoid (moe=bias_balanced sets both), or moe.expert_bias_rate=0",
            involves=("moe.router",),
        )
    if moe.router is not RouterKind.skewed and moe.forced_skew != 1:
        yield Problem(
            path="moe.forced_skew",
            value=moe.forced_skew,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="set moe.router=skewed, or leave it out",
            involves=("moe.router",),
        )
    yield from _bias_schedule(config)
    yield from _groups(config)
    fresh = MoEConfig()
    draws = moe.router in (RouterKind.hash, RouterKind.random, RouterKind.balanced, RouterKind.skewed)
    if moe.router_seed != fresh.router_seed and not (draws or moe.router_jitter or moe.router_noise):
        yield Problem(
            path="moe.router_seed",
            value=moe.router_seed,
            rule=f"has no effect with moe.router={moe.router.name} and neither jitter nor noise: nothing is drawn",
            way_out="leave it out, or set moe.router_jitter or moe.router_noise",
            involves=("moe.router", "moe.router_jitter", "moe.router_noise"),
        )
    if moe.balance_scope is not fresh.balance_scope and moe.load_balancing_coef == 0:
        yield Problem(
            path="moe.balance_scope",
            value=moe.balance_scope.name,
            rule="has no effect with moe.load_balancing_coef=0",
            way_out="set moe.load_balancing_coef=0.01, say, or leave the scope out",
            involves=("moe.load_balancing_coef",),
        )


def _bias_schedule(config: RunConfig) -> Iterator[Problem]:
    """How the selection bias moves says nothing when it does not."""
    moe = config.moe
    if moe.expert_bias_rate > 0:
        if moe.expert_bias_freeze_after == 0:
            yield Problem(
                path="moe.expert_bias_rate",
                value=moe.expert_bias_rate,
                rule="has no effect with moe.expert_bias_freeze_after=0: the bias is frozen from the start",
                way_out="set moe.expert_bias_freeze_after=0.9, say, or moe.expert_bias_rate=0",
                involves=("moe.expert_bias_freeze_after",),
            )
        return
    for path, value, neutral in (
        ("moe.expert_bias_rule", moe.expert_bias_rule.name, BiasRule.sign.name),
        ("moe.expert_bias_clamp", moe.expert_bias_clamp, 0.0),
        ("moe.expert_bias_freeze_after", moe.expert_bias_freeze_after, 1.0),
    ):
        if value != neutral:
            yield Problem(
                path=path,
                value=value,
                rule="has no effect with moe.expert_bias_rate=0",
                way_out=f"set moe.expert_bias_rate=1e-3 (with a router that has a bias), or {path}={neutral}",
                involves=("moe.expert_bias_rate",),
            )


def _groups(config: RunConfig) -> Iterator[Problem]:
    """Group-limited routing."""
    moe = config.moe
    if moe.num_groups < 1 or (moe.num_groups == 1 and moe.topk_groups == 1):
        return
    if not ROUTER_TRAITS[moe.router].groups:
        yield Problem(
            path="moe.num_groups",
            value=moe.num_groups,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="choose moe.router=softmax, sigmoid or sqrt_softplus, or moe.num_groups=1 and moe.topk_groups=1",
            involves=("moe.router", "moe.topk_groups"),
        )
    elif moe.num_experts % moe.num_groups:
        yield Problem(
            path="moe.num_groups",
            value=moe.num_groups,
            rule=f"must divide moe.num_experts ({moe.num_experts})",
            way_out=f"choose one of {divisors(moe.num_experts)}",
            involves=("moe.num_experts",),
        )
    elif moe.topk_groups > moe.num_groups:
        yield Problem(
            path="moe.topk_groups",
            value=moe.topk_groups,
            rule=f"must be at most moe.num_groups ({moe.num_groups})",
            way_out=f"choose {moe.num_groups} or less, or more moe.num_groups",
            involves=("moe.num_groups",),
        )
    elif moe.topk_groups == moe.num_groups:
        yield Problem(
            path="moe.topk_groups",
            value=moe.topk_groups,
            rule=f"must be below moe.num_groups ({moe.num_groups}): with all groups allowed there is no limit",
            way_out=f"choose {moe.num_groups - 1} or less, or moe.num_groups=1 and moe.topk_groups=1",
            involves=("moe.num_groups",),
        )
    elif moe.top_k > (allowed := moe.topk_groups * (moe.num_experts // moe.num_groups)):
        yield Problem(
            path="moe.top_k",
            value=moe.top_k,
            rule=f"must be at most the experts of moe.topk_groups ({moe.topk_groups}) groups, {allowed}",
            way_out=f"choose {allowed} or less, or more moe.topk_groups",
            involves=("moe.topk_groups", "moe.num_groups", "moe.num_experts"),
        )


def balance(config: RunConfig) -> Iterator[Problem]:
    """One way of asking for a load-balancing loss, and only of a router that it can balance."""
    moe = config.moe
    listed = {f"moe.balance.{scope.name}": getattr(moe.balance, scope.name) for scope in BalanceScope}
    listed = {path: value for path, value in listed.items() if value}
    if listed and moe.load_balancing_coef:
        path, value = next(iter(listed.items()))
        yield Problem(
            path=path,
            value=value,
            rule=(
                f"must not stand beside moe.load_balancing_coef ({moe.load_balancing_coef}), "
                f"which asks for moe.balance_scope={moe.balance_scope.name} already"
            ),
            way_out=(
                f"set moe.load_balancing_coef=0 and name every scope in moe.balance, or leave {path} out "
                f"and set moe.balance_scope"
            ),
            involves=("moe.load_balancing_coef",),
        )
    if not ROUTER_TRAITS[moe.router].balance_loss:
        asked = {**listed, "moe.load_balancing_coef": moe.load_balancing_coef}
        for path, value in asked.items():
            if value:
                yield Problem(
                    path=path,
                    value=value,
                    rule=f"has no effect with moe.router={moe.router.name}, whose choice follows no probabilities",
                    way_out=f"set {path}=0",
                    involves=("moe.router",),
                )
