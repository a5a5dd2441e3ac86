"""Initial weights: the same in every layout, different from expert to expert, of the widths in the table."""

import pytest
import torch
from torch import Tensor

from moe.model.config import ModelConfig, MoEConfig, RouterKind
from moe.model.experts import Experts
from moe.model.init import initialise
from moe.model.transformer import Transformer
from tests.model.cases import build, tiny_model, tiny_moe


class ExpertsOfOneRank:
    """The part of a dispatcher that `initialise` reads."""

    def __init__(self, num_experts: int, local_expert_ids: tuple[int, ...]) -> None:
        self.num_experts = num_experts
        self.local_expert_ids = local_expert_ids


def build_rank(local_expert_ids: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model of 4 experts that keeps some of them, as a layout does it."""
    moe = tiny_moe(num_experts=4)
    with torch.device("meta"):
        model = Transformer(tiny_model(), moe)
        for layer in model.moe_layers():
            layer.dispatcher = ExpertsOfOneRank(4, local_expert_ids)  # type: ignore[assignment]
            layer.experts = Experts(len(local_expert_ids), 12, moe.moe_intermediate_size)
    initialise(model, seed=seed, device="cpu", dtype=dtype)
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_start_different_and_alike_in_every_layout(size: int) -> None:
    """A27: at expert-parallel size 1, 2, 4, expert i is the same, experts differ pairwise, the rest is equal on all ranks."""
    whole = dict(build_rank((0, 1, 2, 3)).named_parameters())
    ranks = [tuple(range(start, start + 4 // size)) for start in range(0, 4, 4 // size)]
    parts = [dict(build_rank(ids).named_parameters()) for ids in ranks]
    for name, expected in whole.items():
        if ".experts." in name:
            joined = torch.cat([part[name] for part in parts])
            assert torch.equal(joined, expected), name
            for i in range(4):
                for j in range(i):
                    assert not torch.equal(joined[i], joined[j]), name
        else:
            assert all(torch.equal(part[name], expected) for part in parts), name


def test_layers_names_and_seeds_differ() -> None:
    first = dict(build(seed=0).named_parameters())
    second = dict(build(seed=1).named_parameters())
    assert all(torch.equal(value, dict(build(seed=0).named_parameters())[name]) for name, value in first.items())
    drawn: list[tuple[str, Tensor]] = [(name, value) for name, value in first.items() if "norm" not in name]
    for index, (name, value) in enumerate(drawn):
        assert not torch.equal(value, second[name]), name
        for other_name, other in drawn[:index]:
            assert value.shape != other.shape or not torch.equal(value, other), (name, other_name)


def test_bf16_is_the_rounded_fp32_draw() -> None:
    exact, rounded = dict(build().named_parameters()), dict(build(dtype=torch.bfloat16).named_parameters())
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())


def test_widths_follow_the_table() -> None:
    """Standard deviations within 5 % on tensors of ten thousand weights and more; means within 5 standard errors."""
    model_config = ModelConfig(
        vocab_size=512, hidden_size=128, num_layers=8, num_dense_layers=7, intermediate_size=128, tie_embeddings=False
    )
    moe = MoEConfig(num_experts=80, moe_intermediate_size=32, num_shared_experts=4, router=RouterKind.sigmoid)
    model = build(model_config, moe)
    to_stream = 0.02 / 4  # sqrt(2 · 8 layers) = 4
    stds = {
        "embed.weight": 0.02,
        "head.weight": 0.02,
        "layers.0.attention.q_proj.weight": 0.02,
        "layers.0.attention.o_proj.weight": to_stream,
        "layers.0.mlp.gate_proj.weight": 0.02,
        "layers.0.mlp.down_proj.weight": to_stream,
        "layers.7.moe.router.weight": 0.02,
        "layers.7.moe.experts.w1": 0.02,
        "layers.7.moe.experts.w3": 0.02,
        "layers.7.moe.experts.w2": to_stream,
        "layers.7.moe.shared_experts.up_proj.weight": 0.02,
        "layers.7.moe.shared_experts.down_proj.weight": to_stream,
    }
    for name, std in stds.items():
        value = model.get_parameter(name)
        assert value.numel() >= 10_000, name
        assert abs(float(value.detach().std()) / std - 1) < 0.05, name
        assert abs(float(value.detach().mean())) < 5 * std / value.numel() ** 0.5, name
    norms = [value for name, value in model.named_parameters() if "norm" in name]
    assert len(norms) == 8 * 4 + 1
    assert all((value == 1).all() for value in norms)
    bias = model.moe_layers()[0].router.expert_bias
    assert bias is not None
    assert bias.dtype == torch.float32
    assert not bias.any()


def test_nothing_is_left_on_meta_and_marks_stay() -> None:
    with torch.device("meta"):
        model = Transformer(tiny_model(), tiny_moe(router=RouterKind.sigmoid))
    model.moe_layers()[0].experts.w1.mark = "shared with the expert-data group"  # type: ignore[attr-defined]
    initialise(model, seed=0, device="cpu", dtype=torch.bfloat16)
    assert all(not tensor.is_meta for tensor in model.state_dict().values())
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in model.parameters())
    assert model.moe_layers()[0].experts.w1.mark == "shared with the expert-data group"  # type: ignore[attr-defined]


def test_experts_that_do_not_fit_their_dispatcher_are_refused() -> None:
    with torch.device("meta"):
        model = Transformer(tiny_model(), tiny_moe())
    model.moe_layers()[0].dispatcher = ExpertsOfOneRank(5, (0, 1))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"layers\.1\.moe\.experts\.w1 has 5 experts but its dispatcher names 2"):
        initialise(model, seed=0, device="cpu")


def test_initialising_does_not_touch_the_default_generator() -> None:
    before = torch.get_rng_state()
    build()
    assert torch.equal(torch.get_rng_state(), before)
