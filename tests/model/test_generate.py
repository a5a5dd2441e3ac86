"""Sampling: repeatable, greedy at temperature 0, stopping at the end token, refusing what cannot be read."""

import pytest
import torch
from torch import Tensor

from moe.model.batch import TokenBatch
from moe.model.generate import generate, one_document
from moe.model.outputs import RouterStats
from moe.model.transformer import Transformer
from tests.model.cases import build


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build()


def test_greedy_takes_the_best_token_of_a_full_forward(model: Transformer) -> None:
    text = [3, 5]
    found = generate(model, text, 6, temperature=0.0, seed=0, end_id=None)
    for token in found:
        assert token == int(model.logits(one_document(text, "cpu"))[0, -1].argmax())
        text = [*text, token]
    assert len(found) == 6


def test_the_seed_decides_and_nothing_else(model: Transformer) -> None:
    random_state = torch.get_rng_state()
    texts = {seed: generate(model, [3], 12, temperature=1.0, seed=seed, end_id=None) for seed in range(4)}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len({tuple(text) for text in texts.values()}) > 1
    torch.manual_seed(99)
    for seed, text in texts.items():
        assert generate(model, [3], 12, temperature=1.0, seed=seed, end_id=None) == text
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_stops_before_the_end_token(model: Transformer) -> None:
    text = generate(model, [3], 12, temperature=1.0, seed=0, end_id=None)
    end_id = text[4]
    assert generate(model, [3], 12, temperature=1.0, seed=0, end_id=end_id) == text[: text.index(end_id)]


def test_ranks_that_share_experts_run_every_forward(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that saw the end earlier must not leave others waiting: same number of forwards, same text."""
    text = generate(model, [3], 12, temperature=1.0, seed=0, end_id=None)
    forwards: list[TokenBatch] = []
    hidden = Transformer.hidden

    def counted(self: Transformer, batch: TokenBatch) -> tuple[Tensor, RouterStats | None]:
        forwards.append(batch)
        return hidden(self, batch)

    monkeypatch.setattr(Transformer, "hidden", counted)
    expected = generate(model, [3], 12, temperature=1.0, seed=0, end_id=text[4])
    assert len(forwards) == text.index(text[4]) + 1
    forwards.clear()
    for layer in model.moe_layers():
        monkeypatch.setattr(layer, "num_experts", 2 * layer.num_experts)
    assert generate(model, [3], 12, temperature=1.0, seed=0, end_id=text[4]) == expected
    assert len(forwards) == 12


def test_unreadable_prompts_are_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"prompt_ids \(\[\]\) must hold at least one token"):
        generate(model, [], 3, temperature=1.0, seed=0, end_id=None)
    with pytest.raises(ValueError, match=r"prompt_ids \(\[19\]\) must lie in \[0, 19\)"):
        generate(model, [19], 3, temperature=1.0, seed=0, end_id=None)
    with pytest.raises(ValueError, match=r"temperature \(-1\) must not be negative"):
        generate(model, [1], 3, temperature=-1, seed=0, end_id=None)
