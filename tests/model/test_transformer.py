"""The whole decoder: against the float64 reference, and the laws that hold for any of its configurations."""

import gc

import pytest
import torch
from torch import Tensor

from moe.model.balance import balance_sum_batch, balance_sum_sequence
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import ROUTER_TRAITS, BalanceScope, ModelConfig, MoEConfig, RouterKind
from moe.model.generate import one_document
from moe.model.outputs import ModelOutput
from moe.model.transformer import Transformer
from tests.model import reference
from tests.model.cases import build, packed, tiny_model, tiny_moe

FP32_REORDERED = 1e-5
"""Relative, of a tensor's largest entry: sums are taken in another order than in the reference."""

CONFIGURATIONS = {
    "softmax": (tiny_model(), tiny_moe()),
    "softmax unnormalised, no qk norm, untied": (
        tiny_model(qk_norm=False, tie_embeddings=False),
        tiny_moe(normalize_topk=False, routed_scale=2.5),
    ),
    "sigmoid, sequence scope, shared experts": (
        tiny_model(num_dense_layers=0, num_layers=2, num_kv_heads=1),
        tiny_moe(
            router=RouterKind.sigmoid, balance_scope=BalanceScope.sequence, num_shared_experts=2, routed_scale=1.5
        ),
    ),
    "top-1": (tiny_model(num_layers=2), tiny_moe(top_k=1, normalize_topk=False)),
    "every expert": (tiny_model(num_layers=2, num_heads=2, head_dim=None), tiny_moe(top_k=5)),
}


def objective(output: ModelOutput, moe: MoEConfig) -> Tensor:
    """Language loss with large router terms, so that every gradient path weighs in."""
    assert output.router is not None
    probs_LBE, counts_LBE = output.router.router_probs_sum_BE, output.router.tokens_per_expert_BE
    if moe.balance_scope is BalanceScope.sequence:
        balance_L = balance_sum_sequence(probs_LBE, counts_LBE)
    else:
        balance_L = balance_sum_batch(probs_LBE.sum(1), counts_LBE.sum(1))
    return output.lm_loss_sum + 0.5 * balance_L.sum() + 0.1 * output.router.z_sum.sum()


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float = FP32_REORDERED) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp(min=1e-3), f"{name}: {error} of {expected.abs().max()}"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_outputs_and_gradients_equal_the_float64_reference(name: str) -> None:
    """Two rows with two documents each, one of them padded: logits, loss, sums, every gradient."""
    model_config, moe = CONFIGURATIONS[name]
    model = build(model_config, moe)
    batch = packed([[4, 3], [2, 3]], row_tokens=7)
    biases = {}
    if moe.router is RouterKind.sigmoid:
        for layer in model.moe_layers():
            assert layer.router.expert_bias is not None
            layer.router.expert_bias.copy_(torch.linspace(0.4, -0.4, moe.num_experts))
            biases[layer.layer_index] = layer.router.expert_bias.double()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = reference.transformer(
        weights, biases, model_config, moe,
        *(tensor.tolist() for tensor in batch),
    )  # fmt: skip
    (expected.lm_loss_sum + 0.5 * sum(expected.balance_sum) + 0.1 * sum(expected.z_sum)).backward()

    output = model(batch)
    objective(output, moe).backward()

    assert_close("logits", model.logits(batch), expected.logits_BSV)
    assert_close("loss", output.lm_loss_sum, expected.lm_loss_sum)
    assert output.router is not None
    assert output.router.tokens_per_expert_BE.tolist() == expected.tokens_per_expert
    assert_close("z", output.router.z_sum, torch.stack(expected.z_sum))
    assert_close("entropy", output.router.entropy_sum, torch.stack(expected.entropy_sum))
    for parameter_name, gradient in gradients(model).items():
        expected_gradient = weights[parameter_name].grad
        assert expected_gradient is not None
        assert_close(parameter_name, gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", list(RouterKind))
def test_checkpointing_gives_the_same_bits(dtype: torch.dtype, router: RouterKind) -> None:
    """A13: counts with recomputation are those without (an odd number of tokens), and so is every gradient."""
    moe = tiny_moe(router=router)
    batch = packed([[4, 3], [2, 4]], row_tokens=7)
    outputs, grads = [], []
    for checkpoint_blocks in (False, True):
        model = build(moe=moe, dtype=dtype)
        model.checkpoint_blocks = checkpoint_blocks
        output = model(batch)
        objective(output, moe).backward()
        outputs.append(output)
        grads.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].router, outputs[1].router, strict=True))
    assert torch.equal(outputs[0].lm_loss_sum, outputs[1].lm_loss_sum)
    # Rows of 7 and 6 tokens: expert choice takes floor(7 · 2 / 5) = floor(6 · 2 / 5) = 2 for each expert.
    expected = 13 * moe.top_k if ROUTER_TRAITS[router].exact_top_k else 2 * 2 * 5
    assert outputs[1].router.tokens_per_expert_BE.sum((1, 2)).tolist() == [expected] * 2
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name


def with_constant_counts(model: Transformer) -> Transformer:
    """Send every token to experts 0 and 2, so that a change of tokens changes no number of rows.

    A matrix product may round a row differently when the number of rows beside it changes; only then do bits compare.
    """
    for layer in model.moe_layers():
        assert layer.router.expert_bias is not None
        layer.router.expert_bias.copy_(torch.tensor([9.0, 0.0, 9.0, 0.0, 0.0]))
    return model


def with_other_ids(batch: TokenBatch, tokens: slice) -> TokenBatch:
    changed_ids_BS = batch.input_ids_BS.clone()
    changed_ids_BS[0, tokens] = (changed_ids_BS[0, tokens] + 1) % 19
    return batch._replace(input_ids_BS=changed_ids_BS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_dense_layers", [1, 3])
def test_packed_documents_do_not_see_each_other(num_dense_layers: int, dtype: torch.dtype) -> None:
    """A39: other tokens in the first document change nothing, to the last bit, in the second; alone it is the same."""
    model_config, moe = tiny_model(num_dense_layers=num_dense_layers), tiny_moe(router=RouterKind.sigmoid)
    model = with_constant_counts(build(model_config, moe, dtype=dtype))
    batch = packed([[5, 6]], row_tokens=11)
    before, after = model.logits(batch), model.logits(with_other_ids(batch, slice(0, 5)))
    assert not torch.equal(before[0, :5], after[0, :5])
    assert torch.equal(before[0, 5:], after[0, 5:])
    alone = model.logits(one_document(batch.input_ids_BS[0, 5:].tolist(), "cpu"))
    tolerance = FP32_REORDERED if dtype is torch.float32 else 2e-2
    assert_close("alone", before[0, 5:], alone[0].double(), tolerance)


def test_no_gradient_crosses_a_document_border() -> None:
    """A39: with free routing, the second document's logits depend on no embedding of the first: exactly 0."""
    model = build(tiny_model(tie_embeddings=False))
    batch = packed([[5, 6]], row_tokens=11)._replace(input_ids_BS=torch.arange(11)[None])
    model.logits(batch)[0, 5:].square().sum().backward()
    gradient_VD = model.embed.weight.grad
    assert gradient_VD is not None
    assert not gradient_VD[:5].any()
    assert gradient_VD[5:11].any(dim=-1).all()


def test_later_tokens_do_not_change_earlier_ones() -> None:
    model = with_constant_counts(build(moe=tiny_moe(router=RouterKind.sigmoid)))
    batch = packed([[8]], row_tokens=8)
    before, after = model.logits(batch), model.logits(with_other_ids(batch, slice(5, 8)))
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def sums(output: ModelOutput, moe: MoEConfig) -> dict[str, Tensor]:
    assert output.router is not None
    found = {name: value for name, value in output.router._asdict().items() if not name.endswith("_BE")}
    probs_LBE, counts_LBE = output.router.router_probs_sum_BE, output.router.tokens_per_expert_BE
    return found | {
        "loss": output.lm_loss_sum,
        "counts": counts_LBE.sum(1),
        "probs": probs_LBE.sum(1),
        "balance, batch": balance_sum_batch(probs_LBE.sum(1), counts_LBE.sum(1)),
        "balance, sequence": balance_sum_sequence(probs_LBE, counts_LBE),
    }


def without_padding() -> tuple[TokenBatch, TokenBatch, TokenBatch]:
    """The same two documents of five tokens bare, padded on the right, and padded on the left."""
    bare = packed([[5], [5]], row_tokens=5)
    right = packed([[5], [5]], row_tokens=8)
    for tensor, source in zip(right, bare, strict=True):
        tensor[:, :5] = source
    return bare, right, TokenBatch(*(tensor.roll(3, dims=1) for tensor in right))


@pytest.mark.parametrize("router", list(RouterKind))
def test_padding_changes_no_sum_and_no_gradient(router: RouterKind) -> None:
    """A02: padded rows give what the bare rows give, wherever the padding stands, for every sum and every weight."""
    moe = tiny_moe(router=router)
    expected_sums: dict[str, Tensor] = {}
    expected_gradients: dict[str, Tensor] = {}
    for batch in without_padding():
        model = build(moe=moe)
        output = model(batch)
        objective(output, moe).backward()
        if not expected_sums:
            expected_sums, expected_gradients = sums(output, moe), gradients(model)
            assert (
                int(expected_sums["counts"].sum()) == 2 * 10 * moe.top_k
            )  # 5 tokens: 2 for each expert by choice, too
        for name, value in sums(output, moe).items():
            if value.dtype == torch.int64:
                assert torch.equal(value, expected_sums[name]), name
            else:
                assert_close(name, value, expected_sums[name].double())
        for name, value in gradients(model).items():
            assert_close(name, value, expected_gradients[name].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", list(RouterKind))
def test_a_batch_of_padding_alone_gives_zeros(router: RouterKind, dtype: torch.dtype) -> None:
    """A02, A46: 0 and not NaN, with a graph, and every weight gets a gradient of zeros."""
    moe = tiny_moe(router=router)
    model = build(moe=moe, dtype=dtype)
    output = model(packed([[], []], row_tokens=4))
    for name, value in sums(output, moe).items():
        assert not value.any(), name
    objective(output, moe).backward()
    for name, gradient in gradients(model).items():
        assert not gradient.any(), name


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1)])
def test_no_token_and_one_token_pass(shape: tuple[int, int]) -> None:
    """No rows, rows of no tokens, and a single token: right shapes, counts, and a backward that ends."""
    moe = tiny_moe()
    model = build(moe=moe)
    output = model(TokenBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4))))
    assert output.router.tokens_per_expert_BE.shape == (2, shape[0], 5)
    assert int(output.router.tokens_per_expert_BE.sum()) == 2 * moe.top_k * shape[0] * shape[1]
    objective(output, moe).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_a_batch_without_labels_has_loss_zero_and_finite_gradients() -> None:
    """A46: a shard whose labels are all ignored adds exactly 0, not 0/0."""
    model = build()
    batch = packed([[6]], row_tokens=6)
    output = model(batch._replace(labels_BS=torch.full_like(batch.labels_BS, IGNORE_LABEL)))
    assert output.lm_loss_sum.item() == 0.0
    output.lm_loss_sum.backward()
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_losses_of_parts_add_up_to_the_loss_of_the_whole() -> None:
    """A28: one row with 1 label and one with 3 weigh by token, not by row; gradients add up as well."""
    batch = packed([[2], [4]], row_tokens=4)
    whole = build()
    expected = whole(batch).lm_loss_sum
    expected.backward()
    parts = build()
    found = torch.zeros(())
    for row in range(2):
        loss = parts(TokenBatch(*(tensor[row : row + 1] for tensor in batch))).lm_loss_sum
        loss.backward()
        found = found + loss.detach()
    assert_close("loss", found, expected.detach().double(), 1e-6)
    for name, gradient in gradients(parts).items():
        assert_close(name, gradient, gradients(whole)[name].double())


def test_evaluation_leaves_no_trace() -> None:
    """A17: forwards without gradients, padded ones too, change no weight, buffer or random state, to the last bit."""
    moe = tiny_moe(router=RouterKind.sigmoid)
    model = build(moe=moe)
    batch = packed([[4, 3]], row_tokens=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    expected = model(batch)
    model.eval()
    with torch.no_grad():
        for seed in range(3):
            model(packed([[2, 2], []], row_tokens=9, seed=seed))
    model.train()
    assert torch.equal(torch.get_rng_state(), random_state)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    output = model(batch)
    assert torch.equal(output.lm_loss_sum, expected.lm_loss_sum)
    assert all(torch.equal(a, b) for a, b in zip(output.router, expected.router, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_fifty_forwards_keep_no_tensor(training: bool) -> None:
    """A44: as many tensors live after the third forward as after the last, with the router's sums never read."""
    model = build()
    batch = packed([[4, 3]], row_tokens=7)
    counts = {}
    for number in range(1, 51):
        with torch.set_grad_enabled(training):
            output = model(batch)
        if training:
            output.lm_loss_sum.backward()
            model.zero_grad()
        del output
        if number in (3, 50):
            gc.collect()
            counts[number] = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    assert len(set(counts.values())) == 1, counts


def test_empty_experts_get_gradients_of_zeros_in_dirty_memory() -> None:
    """A22: with freed memory full of NaN, experts without a token get gradients of exactly zero, three times."""
    model = build(tiny_model(num_layers=1, num_dense_layers=0), tiny_moe(router=RouterKind.sigmoid))
    layer = with_constant_counts(model).moe_layers()[0]
    for _ in range(3):
        dirty = [torch.full((5, 7, 12), float("nan")) for _ in range(50)]
        del dirty
        model.zero_grad()
        output = model(packed([[6]], row_tokens=6))
        output.lm_loss_sum.backward()
        assert output.router is not None
        assert output.router.tokens_per_expert_BE.tolist() == [[[6, 0, 6, 0, 0]]]
        for name in ("w1", "w2", "w3"):
            gradient = layer.experts.get_parameter(name).grad
            assert gradient is not None
            assert not gradient[[1, 3, 4]].any()
            assert gradient[[0, 2]].isfinite().all()
            assert gradient[0].any()


def test_task_gradient_reaches_a_top_1_router() -> None:
    """A10: with k = 1 and no router loss, the language loss alone moves the router's weight."""
    model = build(tiny_model(num_layers=2), tiny_moe(top_k=1, normalize_topk=False))
    model(packed([[7]], row_tokens=7)).lm_loss_sum.backward()
    gradient = model.moe_layers()[0].router.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-4


def test_a_tied_head_is_one_parameter() -> None:
    tied = [name for name, _ in build(tiny_model()).named_parameters(remove_duplicate=False) if "layers" not in name]
    untied = [name for name, _ in build(tiny_model(tie_embeddings=False)).named_parameters() if "layers" not in name]
    assert tied == ["embed.weight", "norm.weight"]
    assert untied == ["embed.weight", "norm.weight", "head.weight"]


def test_a_model_without_sparse_layers_has_no_router_output() -> None:
    output = build(tiny_model(num_dense_layers=3))(packed([[5]], row_tokens=5))
    assert output.router is None
    assert output.lm_loss_sum.requires_grad


def test_names_are_global_and_stable() -> None:
    """Checkpoints, engines and conversion rely on these names."""
    model = build(tiny_model(num_layers=2), tiny_moe(router=RouterKind.sigmoid, num_shared_experts=1))
    assert sorted(name for name in model.state_dict() if name.startswith("layers.1.")) == [
        "layers.1.attention.k_norm.weight",
        "layers.1.attention.k_proj.weight",
        "layers.1.attention.o_proj.weight",
        "layers.1.attention.q_norm.weight",
        "layers.1.attention.q_proj.weight",
        "layers.1.attention.v_proj.weight",
        "layers.1.attention_norm.weight",
        "layers.1.ffn_norm.weight",
        "layers.1.moe.experts.w1",
        "layers.1.moe.experts.w2",
        "layers.1.moe.experts.w3",
        "layers.1.moe.router.expert_bias",
        "layers.1.moe.router.weight",
        "layers.1.moe.shared_experts.down_proj.weight",
        "layers.1.moe.shared_experts.gate_proj.weight",
        "layers.1.moe.shared_experts.up_proj.weight",
    ]
    assert all(f"layers.0.mlp.{name}_proj.weight" in model.state_dict() for name in ("gate", "up", "down"))


def test_bf16_model_follows_the_fp32_one() -> None:
    """Same weights (rounded): losses agree to bf16's precision, and stay fp32 where they are summed."""
    batch = packed([[20, 12]], row_tokens=32)
    wide = ModelConfig(vocab_size=19, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48)
    moe = MoEConfig(num_experts=4, moe_intermediate_size=16)
    exact, rounded = build(wide, moe)(batch), build(wide, moe, dtype=torch.bfloat16)(batch)
    assert rounded.lm_loss_sum.dtype == rounded.router.router_probs_sum_BE.dtype == torch.float32
    assert abs(float((rounded.lm_loss_sum / exact.lm_loss_sum).detach()) - 1) < 5e-3


def test_padding_document_is_what_the_batch_says() -> None:
    batch = packed([[3]], row_tokens=5)
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, PADDING_DOCUMENT, PADDING_DOCUMENT]]
    context = build().block_context(batch)
    assert context.valid_BS.tolist() == [[True, True, True, False, False]]
    assert context.attention_mask_B1CC[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
