"""The decoder: the whole token path, from ids to loss.

Legend: B rows, C tokens of a row, S of them on this rank (all, without sequence parallelism), D hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch.sequence import SequenceShards
from moe.model.attention import Attention, document_mask
from moe.model.batch import PADDING_DOCUMENT, TokenBatch
from moe.model.config import ModelConfig, MoEConfig, resolve_head_dim
from moe.model.experts import SwiGLU
from moe.model.layer import MoELayer
from moe.model.loss import lm_loss_sum
from moe.model.norm import RMSNorm
from moe.model.outputs import ModelOutput, RouterStats
from moe.model.rope import RotaryAngles, rotary_angles
from moe.model.router import Router
from moe.model.routers.randomness import token_keys
from moe.model.routers.rule import TokenContext


class BlockContext(NamedTuple):
    """What every block needs beside the residual stream: made from the batch alone, so any part of the model can."""

    attention_mask_B1CC: Tensor
    """Of whole rows; all else is of this rank's positions."""
    angles: RotaryAngles
    valid_BS: Tensor
    """bool, False for padding."""
    tokens: TokenContext
    """Token ids and their names in random numbers, for the routers that use them."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); the feed-forward is either `mlp` (dense) or `moe`."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, *, layer_index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.mlp: SwiGLU | None = None
        self.moe: MoELayer | None = None
        if layer_index < model.num_dense_layers:
            self.mlp = SwiGLU(model.hidden_size, model.intermediate_size)
        else:
            self.moe = MoELayer(model.hidden_size, moe, layer_index=layer_index)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> tuple[Tensor, RouterStats | None]:
        """Residual stream in, residual stream and this layer's router stats out (None for a dense block)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context.attention_mask_B1CC, context.angles)
        inner_BSD = self.ffn_norm(x_BSD)
        if self.moe is None:
            assert self.mlp is not None
            return x_BSD + self.mlp(inner_BSD), None
        y_BSD, stats = self.moe(inner_BSD, context.valid_BS, context.tokens)
        return x_BSD + y_BSD, stats


class TokenEmbedding(nn.Embedding):
    """A row of the vocabulary for each id; with tied weights the head as well.

    Both go through the call of the module that owns the weight: ZeRO-3 has a weight whole only while its module runs.
    """

    def forward(self, ids_or_hidden: Tensor) -> Tensor:
        """[...] int64 -> [..., D]; [..., D] floating -> [..., V], the product with every row."""
        if ids_or_hidden.is_floating_point():
            return F.linear(ids_or_hidden, self.weight)
        return super().forward(ids_or_hidden)


class Transformer(nn.Module):
    """A decoder of dense blocks followed by sparse ones. Build it under `torch.device("meta")`, then `init.initialise`.

    The residual stream has the dtype of the weights; norms, router, rotary angles and loss are fp32 inside. With
    `model.tie_embeddings` the head is the embedding's weight, one parameter under one name.
    """

    def __init__(self, model: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.model_config = model
        self.moe_config = moe
        self.checkpoint_blocks = False
        """Whether backward computes each block's inside again instead of keeping it."""
        self.routing_step = 0
        """Optimizer step that jitter, noise and forced routers draw for; whoever runs steps sets it."""
        self.sequence: SequenceShards | None = None
        """How rows are cut over ranks (`cut_rows`); None: every rank works on whole rows."""
        self.embed = TokenEmbedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Block(model, moe, layer_index=index) for index in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.head = None if model.tie_embeddings else nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def moe_layers(self) -> list[MoELayer]:
        """The sparse layers in order: entry i belongs to row i of the stacked RouterStats."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def cut_rows(self, sequence: SequenceShards | None) -> None:
        """From now on work on this rank's positions of every row, or (None) on whole rows, whatever the batch."""
        self.sequence = sequence
        for module in self.modules():
            if isinstance(module, Attention | Router):
                module.sequence = sequence

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Rows are not cut inside the block."""
        sequence = self.sequence
        self.cut_rows(None)
        try:
            yield
        finally:
            self.cut_rows(sequence)

    def block_context(self, batch: TokenBatch) -> BlockContext:
        """Mask, rotary angles and padding of a batch of whole rows, made once and shared by all blocks."""
        valid_BC = batch.document_ids_BS != PADDING_DOCUMENT
        # Keys are made of the text before a token, which may be on another rank.
        keys_BC = token_keys(batch, self.routing_step)
        own, tokens = batch, TokenContext(batch.input_ids_BS, keys_BC)
        if self.sequence is not None:
            own = self._own(batch)
            places_BS = self.sequence.places(batch.input_ids_BS)
            tokens = TokenContext(own.input_ids_BS, self.sequence.own(keys_BC), valid_BC, places_BS)
        return BlockContext(
            attention_mask_B1CC=document_mask(batch.document_ids_BS),
            angles=rotary_angles(
                own.positions_BS, head_dim=resolve_head_dim(self.model_config), theta=self.model_config.rope_theta
            ),
            valid_BS=own.document_ids_BS != PADDING_DOCUMENT,
            tokens=tokens,
        )

    def _own(self, batch: TokenBatch) -> TokenBatch:
        """This rank's positions of whole rows. Labels are part of the batch, so none is lost at a cut."""
        return batch if self.sequence is None else TokenBatch(*(self.sequence.own(whole_BC) for whole_BC in batch))

    def hidden(self, batch: TokenBatch) -> tuple[Tensor, RouterStats | None]:
        """The residual stream after the last block, [B, S, D], and the stats of all sparse layers, stacked.

        batch: whole rows; S are this rank's positions of them.
        """
        context = self.block_context(batch)
        x_BSD = self.embed(self._own(batch).input_ids_BS)
        stats: list[RouterStats] = []
        for block in self.layers:
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x_BSD, block_stats = checkpoint(block, x_BSD, context, use_reentrant=False)
            else:
                x_BSD, block_stats = block(x_BSD, context)
            if block_stats is not None:
                stats.append(block_stats)
        return x_BSD, RouterStats(*map(torch.stack, zip(*stats, strict=True))) if stats else None

    def project(self, x_D: Tensor) -> Tensor:
        """Final norm and head: [..., D] -> [..., V] fp32. The product itself runs in the weights' dtype."""
        head = self.embed if self.head is None else self.head
        scores_V: Tensor = head(self.norm(x_D))
        return scores_V.float()

    def logits(self, batch: TokenBatch) -> Tensor:
        """Scores of every next token, [B, S, V] fp32."""
        return self.project(self.hidden(batch)[0])

    def forward(self, batch: TokenBatch) -> ModelOutput:
        """Loss and router sums of this rank's part of a micro-batch. Collective under expert and sequence parallelism.

        Raises NumericError when a router's logits are not finite.
        """
        x_BSD, stats = self.hidden(batch)
        return ModelOutput(lm_loss_sum=lm_loss_sum(self.project(x_BSD), self._own(batch).labels_BS), router=stats)
