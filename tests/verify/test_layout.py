"""The comparison that guards every layout must itself see a fault, and name it."""

import math
from dataclasses import replace

import torch

from moe.verify.layout import StepTrace, Trace, compare_traces, synthetic_batch


def trace() -> Trace:
    """Two steps of a model with two parameters and one MoE layer."""
    step = StepTrace(
        lm_loss=2.0,
        balance_loss=1.1,
        z_loss=0.5,
        grad_norm=3.0,
        tokens_per_expert_LE=torch.tensor([[3, 5]]),
        dropped_per_expert_LE=torch.tensor([[0, 0]]),
        expert_bias_LE=torch.tensor([[0.001, -0.001]]),
        gradients={"embed.weight": torch.tensor([1.0, -2.0]), "layers.0.moe.experts.w1": torch.ones(2, 3, 4)},
    )
    return Trace(layout="a layout", steps=[step, step], weights={"embed.weight": torch.tensor([0.5, 4.0])})


def changed(number: int, **fields: object) -> Trace:
    """The same trace with fields of one step replaced."""
    whole = trace()
    steps = list(whole.steps)
    steps[number] = replace(steps[number], **fields)  # type: ignore[arg-type]
    return replace(whole, steps=steps)


def test_equal_traces_are_equal() -> None:
    comparison = compare_traces(trace(), trace())
    assert comparison.first is None
    assert "equal" in comparison.report()


def test_the_first_departure_is_named_with_its_place_and_values() -> None:
    """A24: an expert gradient too large by a factor is found before the weights that inherit it."""
    gradients = dict(trace().steps[1].gradients)
    gradients["layers.0.moe.experts.w1"] = gradients["layers.0.moe.experts.w1"].clone()
    gradients["layers.0.moe.experts.w1"][1, 2, 3] = 2.0
    candidate = replace(changed(1, gradients=gradients), weights={"embed.weight": torch.tensor([0.5, 5.0])})
    comparison = compare_traces(trace(), candidate)
    assert comparison.first is not None
    assert comparison.first.what == "step 2: gradient of layers.0.moe.experts.w1"
    assert comparison.first.error == 1.0
    assert "at [1, 2, 3]: 2, expected 1" in str(comparison.first)
    assert "2 of" in comparison.report()


def test_counts_drops_and_bias_must_be_equal_to_the_last_bit() -> None:
    for field, value in (
        ("tokens_per_expert_LE", torch.tensor([[4, 4]])),
        ("dropped_per_expert_LE", torch.tensor([[1, 0]])),
        ("expert_bias_LE", torch.tensor([[0.001, -0.001]]).nextafter(torch.tensor(1.0))),
    ):
        comparison = compare_traces(trace(), changed(0, **{field: value}), tolerance=1.0)
        assert comparison.first is not None, field
        assert comparison.first.what == f"step 1: {field}"


def test_nan_missing_and_misshapen_tensors_depart() -> None:
    """A NaN never compares as small; a parameter that one side lacks is a departure, not a skip."""
    nan = compare_traces(
        trace(), changed(0, gradients={**trace().steps[0].gradients, "embed.weight": torch.tensor([math.nan, -2.0])})
    )
    assert nan.first is not None
    assert math.isinf(nan.first.error)
    missing = compare_traces(trace(), changed(0, gradients={"embed.weight": torch.tensor([1.0, -2.0])}))
    assert missing.first is not None
    assert missing.first.where == "the candidate has none"
    misshapen = compare_traces(trace(), replace(trace(), weights={"embed.weight": torch.zeros(3)}))
    assert misshapen.first is not None
    assert "shape [3], expected [2]" in misshapen.first.where
    loss = compare_traces(trace(), changed(0, lm_loss=math.nan))
    assert loss.first is not None
    assert loss.first.what == "step 1: lm_loss"


def test_synthetic_rows_do_not_depend_on_how_they_are_asked_for() -> None:
    """A row is a function of its index: a batch is its parts; rows differ in labels, and some have padding."""
    settings = {"seq_len": 24, "vocab_size": 100, "seed": 3}
    whole = synthetic_batch(0, 6, **settings)
    for start, count in ((0, 2), (2, 3), (5, 1)):
        part = synthetic_batch(start, count, **settings)
        for one, all_rows in zip(part, whole, strict=True):
            assert torch.equal(one, all_rows[start : start + count])
    assert len({int(n) for n in (whole.labels_BS >= 0).sum(1)}) > 1
    assert (whole.document_ids_BS < 0).any()
    assert ((whole.document_ids_BS >= 0) | (whole.labels_BS < 0)).all(), "padding has no label"
