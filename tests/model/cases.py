"""Small models and batches that the tests of this folder share."""

import torch
from torch import Tensor

from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import ModelConfig, MoEConfig
from moe.model.init import initialise
from moe.model.router import Router, Routing
from moe.model.routers.rule import TokenContext
from moe.model.transformer import Transformer

F1_LOGITS = ((2.0, 1.0, 0.0, -1.0), (2.0, 0.0, 1.0, -1.0), (1.0, 2.0, -1.0, 0.0), (2.0, 1.0, -1.0, 0.0))
"""Router logits of 4 tokens over 4 experts, k = 2; picks per expert 4, 3, 1, 0."""


def tiny_model(**changes: object) -> ModelConfig:
    """A decoder of a few thousand weights, odd where it may be: one dense block, two sparse ones."""
    settings: dict[str, object] = {
        "vocab_size": 19, "hidden_size": 12, "num_layers": 3, "num_dense_layers": 1, "intermediate_size": 10,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "init_std": 0.3,
    }  # fmt: skip
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def tiny_moe(**changes: object) -> MoEConfig:
    """5 experts (not a power of two), 2 a token."""
    settings: dict[str, object] = {"num_experts": 5, "top_k": 2, "moe_intermediate_size": 7}
    return MoEConfig(**(settings | changes))  # type: ignore[arg-type]


def build(
    model: ModelConfig | None = None, moe: MoEConfig | None = None, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Transformer:
    """Built on meta and initialised on the CPU."""
    with torch.device("meta"):
        transformer = Transformer(model or tiny_model(), moe or tiny_moe())
    initialise(transformer, seed=seed, device="cpu", dtype=dtype)
    return transformer


def packed(documents: list[list[int]], *, row_tokens: int, vocab_size: int = 19, seed: int = 0) -> TokenBatch:
    """Rows of documents with the given lengths and random ids, padded on the right to row_tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(documents), row_tokens)
    ids_BS = torch.randint(vocab_size, shape, generator=generator)
    labels_BS = torch.full(shape, IGNORE_LABEL)
    positions_BS = torch.zeros(shape, dtype=torch.int64)
    document_ids_BS = torch.full(shape, PADDING_DOCUMENT)
    for row, lengths in enumerate(documents):
        start = 0
        for document, length in enumerate(lengths):
            end = start + length
            document_ids_BS[row, start:end] = document
            positions_BS[row, start:end] = torch.arange(length)
            labels_BS[row, start : end - 1] = ids_BS[row, start + 1 : end]
            start = end
    return TokenBatch(ids_BS, labels_BS, positions_BS, document_ids_BS)


def logits_router(moe: MoEConfig, *, layer_index: int = 3) -> Router:
    """A router whose weight is the identity: hidden states are its logits."""
    router = Router(moe.num_experts, moe, layer_index=layer_index)
    with torch.no_grad():
        router.weight.copy_(torch.eye(moe.num_experts))
    return router


def f1(num_rows: int = 1) -> Tensor:
    """F1 as [num_rows, 4 / num_rows, 4], wanting a gradient."""
    return torch.tensor(F1_LOGITS).view(num_rows, -1, 4).requires_grad_()


def context(valid_BS: Tensor, seed: int = 7) -> TokenContext:
    """Some token ids and keys."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(19, valid_BS.shape, generator=generator)
    keys_BS = torch.randint(-(2**62), 2**62, valid_BS.shape, generator=generator)
    return TokenContext(ids_BS, keys_BS)


def route(
    moe: MoEConfig, logits_BSE: Tensor, valid_BS: Tensor | None = None, tokens: TokenContext | None = None
) -> Routing:
    """Route tokens whose logits are given; all valid and with some context, unless that is given too."""
    valid_BS = torch.ones(logits_BSE.shape[:2], dtype=torch.bool) if valid_BS is None else valid_BS
    return logits_router(moe)(logits_BSE, valid_BS, context(valid_BS) if tokens is None else tokens)
