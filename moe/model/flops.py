"""Sizes and arithmetic of a model, from its configuration alone: for throughput figures and plans. Torch-free.

Only work that the model's mathematics asks for is counted (model FLOPs): recomputed activations are not, and experts
that a token does not visit are not.
"""

from moe.model.config import ModelConfig, MoEConfig, resolve_head_dim


def swiglu_parameters(hidden_size: int, width: int) -> int:
    """Weights of one SwiGLU: three matrices of hidden_size × width."""
    return 3 * hidden_size * width


def active_expert_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Weights of the routed experts that one token meets in one MoE layer: top_k experts, not all of them."""
    return moe.top_k * swiglu_parameters(model.hidden_size, moe.moe_intermediate_size)


def active_matmul_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Weights that one token is multiplied by: projections, feed-forwards, routers, its own experts and the head.

    The embedding's lookup multiplies nothing, norms are negligible; both are left out. The head counts, tied or not.
    """
    attention = 2 * model.hidden_size * _attention_width(model) + 2 * model.hidden_size * _kv_width(model)
    dense = swiglu_parameters(model.hidden_size, model.intermediate_size)
    sparse = (
        model.hidden_size * moe.num_experts
        + active_expert_parameters(model, moe)
        + moe.num_shared_experts * swiglu_parameters(model.hidden_size, moe.moe_intermediate_size)
    )
    num_sparse = model.num_layers - model.num_dense_layers
    head = model.vocab_size * model.hidden_size
    return model.num_layers * attention + model.num_dense_layers * dense + num_sparse * sparse + head


def total_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Every trained weight of the model, all experts included; a tied head counts once."""
    idle_experts = (moe.num_experts - moe.top_k) * swiglu_parameters(model.hidden_size, moe.moe_intermediate_size)
    return active_parameters(model, moe) + (model.num_layers - model.num_dense_layers) * idle_experts


def active_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Weights in use for one token: all but the experts it does not visit. Embedding and norms included."""
    norms = (2 * model.num_layers + 1) * model.hidden_size
    if model.qk_norm:
        norms += 2 * model.num_layers * resolve_head_dim(model)
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return active_matmul_parameters(model, moe) + norms + embedding


def training_flops_per_token(model: ModelConfig, moe: MoEConfig, seq_len: int) -> float:
    """FLOPs of forward and backward for one token of a row of seq_len tokens.

    6 · active_matmul_parameters (a multiply and an add forward, twice that backward), plus attention: scores and
    weighted sum take 2 · 2 · width FLOPs forward per (query, key) pair, 12 · width with backward. Causal convention: a
    query sees half of the row, so 12 · num_layers · width · seq_len / 2 per token, with width = num_heads · head_dim. A
    row packed from several documents counts as one document: an upper bound of what attention needs.

    Source: Kaplan et al. 2020, "Scaling Laws", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B, which counts the
    full row (twice our attention term).
    """
    attention = 12 * model.num_layers * _attention_width(model) * seq_len / 2
    return 6 * active_matmul_parameters(model, moe) + attention


def _attention_width(model: ModelConfig) -> int:
    return model.num_heads * resolve_head_dim(model)


def _kv_width(model: ModelConfig) -> int:
    return model.num_kv_heads * resolve_head_dim(model)
