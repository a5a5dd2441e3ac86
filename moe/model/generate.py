"""Sample text from a model: beside the token path, after training."""

import torch

from moe.model.batch import IGNORE_LABEL, TokenBatch
from moe.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: list[int],
    max_tokens: int,
    *,
    temperature: float,
    seed: int,
    end_id: int | None,
) -> list[int]:
    """Continue a prompt by at most max_tokens ids; returns the new ids only, without end_id.

    temperature: 0 takes the most probable token, above that samples. end_id: where to stop, if it comes; or None.
    The whole text is computed again for every token: simple, and meant for short samples.

    Collective under expert parallelism: every rank of the expert group calls with the same arguments. Each draws from a
    CPU generator of its own with the same seed, so all get the same text. All run max_tokens forwards even when the
    text ends before: ranks whose logits differ in the last bit may disagree about the end, and must not hang on it.

    Raises ValueError for an empty prompt, ids outside the vocabulary or a negative temperature.
    """
    vocab_size = model.model_config.vocab_size
    if not prompt_ids:
        raise ValueError("prompt_ids ([]) must hold at least one token; begin with the tokenizer's start token")
    if not all(0 <= token < vocab_size for token in prompt_ids):
        raise ValueError(f"prompt_ids ({prompt_ids}) must lie in [0, {vocab_size}); encode with the run's tokenizer")
    if not temperature >= 0:
        raise ValueError(f"temperature ({temperature}) must not be negative; 0 takes the most probable token")
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(seed)
    shares_experts = any(len(layer.dispatcher.local_expert_ids) < layer.num_experts for layer in model.moe_layers())
    text = list(prompt_ids)
    ended_at: int | None = None
    for _ in range(max_tokens):
        with model.whole_rows():  # a text of one token cannot be cut, and every rank has all of it
            x_BSD, _ = model.hidden(one_document(text, device))
        logits_V = model.project(x_BSD[0, -1]).cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            probs_V = (logits_V.double() / temperature).softmax(-1)
            token = int(torch.multinomial(probs_V, 1, generator=generator))
        if token == end_id and ended_at is None:
            ended_at = len(text)
            if not shares_experts:
                break
        text.append(token)
    return text[len(prompt_ids) : ended_at]


def one_document(ids: list[int], device: torch.device | str) -> TokenBatch:
    """A batch of one row that is one document without labels."""
    input_ids_BS = torch.tensor([ids], dtype=torch.int64, device=device)
    return TokenBatch(
        input_ids_BS=input_ids_BS,
        labels_BS=torch.full_like(input_ids_BS, IGNORE_LABEL),
        positions_BS=torch.arange(len(ids), device=device)[None],
        document_ids_BS=torch.zeros_like(input_ids_BS),
    )
