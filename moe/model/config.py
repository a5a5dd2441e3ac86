"""What the model is made of: plain dataclasses that `moe.config` composes. Torch-free: a recipe is refused fast."""

from dataclasses import dataclass, field
from enum import Enum


class RouterKind(Enum):
    """How logits become expert choices and weights (docs/routers.md has the formulas)."""

    softmax = "softmax"
    sigmoid = "sigmoid"
    sqrt_softplus = "sqrt_softplus"
    sinkhorn = "sinkhorn"
    expert_choice = "expert_choice"
    hash = "hash"
    random = "random"
    balanced = "balanced"
    skewed = "skewed"


class RouterDType(Enum):
    """Precision of logits and scores."""

    fp32 = "fp32"
    fp64 = "fp64"


class BalanceScope(Enum):
    """Over which tokens the load-balancing loss takes its fractions, from the narrowest to the widest."""

    micro_batch = "micro_batch"
    sequence = "sequence"
    batch = "batch"
    global_batch = "global_batch"


class BiasRule(Enum):
    """How far the selection bias moves in a step."""

    sign = "sign"
    proportional = "proportional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTraits:
    """What a routing rule can do: a setting that needs what it lacks has no effect, and is refused."""

    expert_bias: bool = False
    """Chooses by score + bias, so that the bias can balance it."""
    balance_loss: bool = False
    """Its choice follows its probabilities, so that a load-balancing loss can balance it."""
    groups: bool = False
    """Can be limited to the experts of a few groups."""
    exact_top_k: bool = True
    """Every valid token gets exactly top_k different experts."""
    per_row: bool = False
    """A token's experts depend on the other tokens of its row, later ones too: not causal."""


ROUTER_TRAITS: dict[RouterKind, RouterTraits] = {
    RouterKind.softmax: RouterTraits(balance_loss=True, groups=True),
    RouterKind.sigmoid: RouterTraits(expert_bias=True, balance_loss=True, groups=True),
    RouterKind.sqrt_softplus: RouterTraits(expert_bias=True, balance_loss=True, groups=True),
    RouterKind.sinkhorn: RouterTraits(per_row=True),
    RouterKind.expert_choice: RouterTraits(exact_top_k=False, per_row=True),
    RouterKind.hash: RouterTraits(),
    RouterKind.random: RouterTraits(),
    RouterKind.balanced: RouterTraits(),
    RouterKind.skewed: RouterTraits(),
}
"""Of every router; the rules themselves are in `moe.model.routers.registry`."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The decoder around the sparse layers."""

    vocab_size: int = 4096
    """Rows of the embedding; every token id must be below it."""
    hidden_size: int = 256
    """Width D of the residual stream."""
    num_layers: int = 4
    """Blocks in all, dense ones included."""
    num_dense_layers: int = 1
    """The first so many blocks have a dense feed-forward; the rest are MoE. May equal num_layers (no MoE at all)."""
    intermediate_size: int = 768
    """Width of the dense SwiGLU."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key/value heads; divides num_heads."""
    head_dim: int | None = None
    """Width of a head; hidden_size / num_heads when null. Even, for rotary positions."""
    qk_norm: bool = True
    """RMSNorm over each query and key head before rotary positions."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = True
    """The head shares the embedding's weight."""
    init_std: float = 0.02
    """Standard deviation of the initial weights (table in moe/model/init.py)."""


def resolve_head_dim(model: ModelConfig) -> int:
    """Width of a head: model.head_dim, or hidden_size / num_heads when that is null."""
    return model.head_dim if model.head_dim is not None else model.hidden_size // model.num_heads


@dataclass(kw_only=True, slots=True)
class BalanceConfig:
    """Coefficients of load-balancing losses by the tokens that the fractions are taken over. 0 = none."""

    micro_batch: float = 0.0
    """One micro-batch of one rank: depends on the layout by definition, as other trainers' default does."""
    sequence: float = 0.0
    """Each packed row by itself, then their mean by tokens."""
    batch: float = 0.0
    """One micro-step of all ranks."""
    global_batch: float = 0.0
    """The whole optimizer step: all ranks and micro-steps. With trainer.accumulation above 1 it costs a forward more."""


@dataclass(kw_only=True, slots=True)
class MoEConfig:
    """The sparse layers: experts, router, balance."""

    num_experts: int = 8
    """Routed experts E per MoE layer."""
    top_k: int = 2
    """Experts K per token."""
    moe_intermediate_size: int = 256
    """Width F of a routed expert's SwiGLU."""
    num_shared_experts: int = 0
    """Experts that see every token; together one SwiGLU, num_shared_experts times as wide as a routed one."""
    router: RouterKind = RouterKind.softmax
    """softmax: probabilities over all experts, then top-k. sigmoid, sqrt_softplus: choice by score + expert bias.
    sinkhorn, expert_choice: balanced inside each row, not causal. hash: by token id. random, balanced, skewed: forced."""
    normalize_topk: bool = True
    """Divide the K weights by their sum. Refused with top_k=1, where it would cut the router off from the task."""
    routed_scale: float = 1.0
    """Factor on the combine weights, after normalisation."""
    num_groups: int = 1
    """Groups of neighbouring experts (as those of one node); 1 = no groups. Divides num_experts."""
    topk_groups: int = 1
    """Groups that a token's experts may come from: those with the largest sum of their two best scores."""
    router_dtype: RouterDType = RouterDType.fp32
    """Precision of logits, scores and weights inside the router, whatever the model's."""
    router_logit_cap: float = 0.0
    """Logits become cap · tanh(logit / cap), so that none exceeds it; z-loss sees these. 0 = none."""
    router_jitter: float = 0.0
    """Each input of the router is multiplied by a number between 1 - jitter and 1 + jitter; training only. 0 = none."""
    router_noise: float = 0.0
    """Standard deviation of the normal noise added to each logit; training only. 0 = none."""
    router_seed: int = 0
    """Of jitter, noise, hash and the forced routers."""
    freeze_router: bool = False
    """The router keeps its initial weight; hidden states still learn through it."""
    forced_skew: float = 1.0
    """router=skewed only: expert i is as popular as 1 / (i + 1)^skew."""
    load_balancing_coef: float = 0.01
    """Coefficient of the load-balancing loss (1.0 at perfect balance, mean over MoE layers). 0 = none."""
    balance_scope: BalanceScope = BalanceScope.global_batch
    """Tokens that load_balancing_coef's fractions are taken over: see `balance`."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Several load-balancing losses at once, in place of load_balancing_coef (which must be 0 then)."""
    router_z_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of router logits (mean over MoE layers). 0 = none."""
    expert_bias_rate: float = 0.0
    """Step of the update of the selection bias, once per optimizer step; routers with a bias only. 0 = no update."""
    expert_bias_rule: BiasRule = BiasRule.sign
    """sign: rate · sign(mean load - load). proportional: rate · (mean load - load) / mean load."""
    expert_bias_clamp: float = 0.0
    """The selection bias stays between -clamp and clamp. 0 = no bound."""
    expert_bias_freeze_after: float = 1.0
    """Share of trainer.max_steps after which the selection bias no longer moves. 1 = never."""


def pick_slots(moe: MoEConfig) -> int:
    """Width of the router's ids and weights: top_k, or num_experts where a token may get any number of experts."""
    return moe.top_k if ROUTER_TRAITS[moe.router].exact_top_k else moe.num_experts


def balance_terms(moe: MoEConfig) -> dict[BalanceScope, float]:
    """Coefficients above 0 of the load-balancing losses, by scope, from the narrowest to the widest."""
    terms = {scope: getattr(moe.balance, scope.name) for scope in BalanceScope}
    if moe.load_balancing_coef:
        terms[moe.balance_scope] += moe.load_balancing_coef
    return {scope: coefficient for scope, coefficient in terms.items() if coefficient}
