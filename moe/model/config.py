"""What the model is made of: plain dataclasses that `moe.config` composes. Torch-free: a recipe is refused fast."""

from dataclasses import dataclass
from enum import Enum


class RouterKind(Enum):
    """How logits become expert choices and weights."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class BalanceScope(Enum):
    """Over which tokens the load-balancing loss takes its fractions."""

    sequence = "sequence"
    batch = "batch"


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
    """softmax: probabilities over all experts, then top-k. sigmoid: scores in (0, 1), choice by score + expert bias."""
    normalize_topk: bool = True
    """Divide the K weights by their sum. Refused with top_k=1, where it would cut the router off from the task."""
    routed_scale: float = 1.0
    """Factor on the combine weights, after normalisation."""
    load_balancing_coef: float = 0.01
    """Coefficient of the load-balancing loss (1.0 at perfect balance, mean over MoE layers). 0 = none."""
    balance_scope: BalanceScope = BalanceScope.batch
    """batch: fractions over one micro-step of all ranks. sequence: per packed row, then their mean by tokens."""
    router_z_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of router logits (mean over MoE layers). 0 = none."""
    expert_bias_rate: float = 0.0
    """Step of the sign update of the selection bias, once per optimizer step; router=sigmoid only. 0 = no update."""
