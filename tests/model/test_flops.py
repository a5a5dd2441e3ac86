"""Sizes and FLOPs: by hand, and against the built model."""

import pytest

from moe.model.config import ModelConfig, MoEConfig
from moe.model.flops import (
    active_expert_parameters,
    active_matmul_parameters,
    active_parameters,
    total_parameters,
    training_flops_per_token,
)
from tests.model.cases import build, tiny_model, tiny_moe


def test_only_the_chosen_experts_count() -> None:
    """A47: hidden 4, width 8, three matrices, 8 experts, k = 2: 192 active weights a token, not 768; 1152 FLOPs."""
    model = ModelConfig(hidden_size=4, num_layers=1, num_dense_layers=0, num_heads=1, num_kv_heads=1)
    moe = MoEConfig(num_experts=8, top_k=2, moe_intermediate_size=8)
    assert active_expert_parameters(model, moe) == 192
    no_experts = MoEConfig(num_experts=8, top_k=0, moe_intermediate_size=8)
    with_experts, without = (training_flops_per_token(model, m, 16) for m in (moe, no_experts))
    assert with_experts - without == 1152


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        (tiny_model(), tiny_moe()),
        (tiny_model(tie_embeddings=False, qk_norm=False), tiny_moe(num_shared_experts=2)),
        (tiny_model(num_dense_layers=3), tiny_moe()),
        (tiny_model(num_dense_layers=0, num_heads=2, head_dim=None), tiny_moe(top_k=5)),
    ],
)
def test_total_is_the_built_model(model: ModelConfig, moe: MoEConfig) -> None:
    built = build(model, moe)
    assert total_parameters(model, moe) == sum(parameter.numel() for parameter in built.parameters())
    idle = sum(
        parameter[moe.top_k :].numel() for name, parameter in built.named_parameters() if ".experts." in name
    )  # fmt: skip
    assert active_parameters(model, moe) == total_parameters(model, moe) - idle


def test_flops_by_hand() -> None:
    """One sparse layer, hidden 4, 2 heads and 1 key/value head of width 2, vocabulary 10, tied; rows of 6 tokens.

    q and o: 2 · 4 · 4; k and v: 2 · 4 · 2; router 4 · 8; experts 192; head 10 · 4. Attention 12 · 1 · 4 · 6 / 2.
    """
    model = ModelConfig(
        vocab_size=10, hidden_size=4, num_layers=1, num_dense_layers=0, num_heads=2, num_kv_heads=1, tie_embeddings=True
    )
    moe = MoEConfig(num_experts=8, top_k=2, moe_intermediate_size=8)
    assert active_matmul_parameters(model, moe) == 32 + 16 + 32 + 192 + 40
    assert training_flops_per_token(model, moe, 6) == 6 * 312 + 144
