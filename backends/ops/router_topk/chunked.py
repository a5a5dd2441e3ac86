"""router_topk a few tokens at a time, so that what lies between logits and picks stays in the cache.

Whole [T, E] tensors are read from memory and, on a CPU, given back to the system again for every step of the plain
formula; here a block of tokens goes through all of them at once, backward too, which works from the logits alone.

Legend: B rows, S tokens of a row, T = B·S tokens, C tokens of a block (in b rows), E experts, P picks per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backends.ops.router_topk import reference
from backends.ops.router_topk.reference import count_picks, weigh
from backends.ops.router_topk.scores import SCORES
from backends.ops.router_topk.select import choose_experts
from backends.ops.router_topk.spec import NO_EXPERT, Choice, Picks, Routed

_BLOCK = 1 << 17
"""Numbers of a block: half a MiB of fp32, a quarter of it for each tensor in flight of a 2 MiB second-level cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens: whole rows, or a part of one."""

    tokens: slice
    rows: slice


def blocks(num_rows: int, row_length: int, num_experts: int) -> Iterator[Block]:
    """Cut B rows of S tokens; every token is in one block."""
    row_size = row_length * num_experts
    if row_size == 0:
        return
    if row_size <= _BLOCK:
        step = _BLOCK // row_size
        for row in range(0, num_rows, step):
            stop = min(row + step, num_rows)
            yield Block(slice(row * row_length, stop * row_length), slice(row, stop))
        return
    step = max(_BLOCK // num_experts, 1)
    for row in range(num_rows):
        for first in range(0, row_length, step):
            last = min(first + step, row_length)
            yield Block(slice(row * row_length + first, row * row_length + last), slice(row, row + 1))


def router_topk(
    logits_TE: Tensor, valid_BS: Tensor, expert_bias_E: Tensor | None, choice: Choice, picks: Picks | None
) -> Routed:
    """See `backends.ops.router_topk.router_topk`."""
    if logits_TE.numel() <= _BLOCK:
        # In a single block nothing is gained, and computing probabilities twice costs.
        return reference.router_topk(logits_TE, valid_BS, expert_bias_E, choice, picks)
    given = (None, None) if picks is None else picks
    return Routed(*_Route.apply(logits_TE, valid_BS, expert_bias_E, choice, *given))


class _Route(torch.autograd.Function):
    """Forward keeps the logits, and [T] or [T, P] of what it found; backward computes probabilities again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        valid_BS: Tensor,
        expert_bias_E: Tensor | None,
        choice: Choice,
        ids_TP: Tensor | None,
        margin_T: Tensor | None,
    ) -> tuple[Tensor, ...]:
        score = SCORES[choice.score]
        num_rows, num_experts = valid_BS.shape[0], logits_TE.shape[1]
        padding_T = ~valid_BS.reshape(-1)
        has_padding = bool(padding_T.any())
        ids, weights, lses = [], [], []
        probs_sum_BE = logits_TE.new_zeros(num_rows, num_experts)
        z_sum, entropy_sum, max_logit, margin_sum = logits_TE.new_zeros(4).unbind()
        for block in blocks(valid_BS.shape[0], valid_BS.shape[1], num_experts):
            logits_CE = logits_TE[block.tokens]
            log_scores_CE = score.log_scores(logits_CE)
            log_probs_CE = F.log_softmax(log_scores_CE, dim=-1)
            if ids_TP is None or margin_T is None:
                ids_CP, margin_C = choose_experts(logits_CE, expert_bias_E, choice)
            else:
                ids_CP, margin_C = ids_TP[block.tokens], margin_T[block.tokens]
            probs_CE = log_probs_CE.exp()
            # Not aminmax, which takes ten times as long along a dimension.
            low_C, high_C = logits_CE.amin(-1), logits_CE.amax(-1)
            # Of a distribution of the logits themselves it is known: both maxima belong to the same expert.
            lse_C = high_C - log_probs_CE.amax(-1) if score.slope is None else logits_CE.logsumexp(-1)
            size_C = torch.maximum(high_C, -low_C)
            if has_padding:
                padding_C = padding_T[block.tokens]
                ids_CP = ids_CP.masked_fill(padding_C[:, None], NO_EXPERT)
                probs_CE.masked_fill_(padding_C[:, None], 0.0)
                size_C.masked_fill_(padding_C, 0.0)
                lse_C.masked_fill_(padding_C, 0.0)
                margin_C = margin_C.masked_fill(padding_C, 0.0)
            ids.append(ids_CP)
            lses.append(lse_C)
            weights.append(weigh(log_scores_CE, log_probs_CE, ids_CP, score, normalize=choice.normalize))
            num_block_rows = block.rows.stop - block.rows.start
            probs_sum_BE[block.rows] += probs_CE.view(num_block_rows, -1, num_experts).sum(1)
            z_sum += lse_C.square().sum()
            entropy_sum -= torch.dot(log_probs_CE.flatten(), probs_CE.flatten())
            torch.maximum(max_logit, size_C.amax(), out=max_logit)
            margin_sum += margin_C.sum()
        num_picks = choice.top_k if ids_TP is None else ids_TP.shape[1]
        out_ids_TP = torch.cat(ids) if ids else padding_T.new_empty(0, num_picks, dtype=torch.int64)
        weights_TP = torch.cat(weights) if weights else logits_TE.new_empty(0, num_picks)
        counts_BE = count_picks(out_ids_TP, num_rows, num_experts)
        sums = [value.float() for value in (entropy_sum, max_logit, margin_sum)]
        lse_T = torch.cat(lses) if lses else logits_TE.new_empty(0)
        ctx.save_for_backward(logits_TE, valid_BS, out_ids_TP, weights_TP, lse_T)
        ctx.choice = choice
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out_ids_TP, counts_BE, *sums)
        return out_ids_TP, weights_TP, counts_BE, probs_sum_BE.float(), z_sum.float(), *sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TE, valid_BS, ids_TP, weights_TP, lse_T = ctx.saved_tensors
        choice, (_, grad_weights_TP, _, grad_probs_BE, grad_z, *_) = ctx.choice, grads
        if grad_weights_TP is None and grad_probs_BE is None and grad_z is None:
            return (None,) * 6
        num_experts, dtype = logits_TE.shape[1], logits_TE.dtype
        valid_T = valid_BS.reshape(-1)
        all_valid = bool(valid_T.all())
        grad_picks_TP, minus_T = _of_picks(ids_TP, weights_TP, grad_weights_TP, choice)
        places_TP = None if grad_picks_TP is None else ids_TP.clamp(min=0)
        if grad_probs_BE is not None:
            grad_probs_BE = grad_probs_BE.to(dtype)
        # Of z: 2·logsumexp·softmax(logits).
        z_T = None if grad_z is None else 2 * grad_z.to(dtype) * lse_T
        grad_TE = torch.empty_like(logits_TE)
        for block in blocks(valid_BS.shape[0], valid_BS.shape[1], num_experts):
            logits_CE, valid_C1 = logits_TE[block.tokens], None if all_valid else valid_T[block.tokens, None]
            grad_TE[block.tokens] = _of_block(
                logits_CE,
                valid_C1,
                choice,
                None if grad_probs_BE is None else grad_probs_BE[block.rows],
                None if minus_T is None else minus_T[block.tokens],
                None if z_T is None else z_T[block.tokens],
                None if grad_picks_TP is None else grad_picks_TP[block.tokens],
                None if places_TP is None else places_TP[block.tokens],
            )
        return grad_TE, None, None, None, None, None


def _of_picks(
    ids_TP: Tensor, weights_TP: Tensor, grad_weights_TP: Tensor | None, choice: Choice
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of the weights for the log scores of the picks, and what every expert's gradient loses times its p."""
    if grad_weights_TP is None:
        return None, None
    own_TP = (grad_weights_TP * weights_TP).masked_fill(ids_TP == NO_EXPERT, 0.0)
    if choice.normalize:
        return own_TP - weights_TP * own_TP.sum(-1, keepdim=True), None
    return own_TP, own_TP.sum(-1) if SCORES[choice.score].is_distribution else None


def _of_block(
    logits_CE: Tensor,
    valid_C1: Tensor | None,
    choice: Choice,
    grad_probs_bE: Tensor | None,
    minus_C: Tensor | None,
    z_C: Tensor | None,
    grad_picks_CP: Tensor | None,
    places_CP: Tensor | None,
) -> Tensor:
    """Gradient for the logits of a block. With q = softmax(log scores) and per expert a factor f, dq pulls q·(f − Σ q·f)."""
    score = SCORES[choice.score]
    is_softmax = score.slope is None
    factor_C = None if minus_C is None else -minus_C
    # For softmax scores z's share is a multiple of q too.
    if is_softmax and z_C is not None:
        factor_C = z_C if factor_C is None else factor_C + z_C
    if grad_probs_bE is None and factor_C is None:
        grad_CE = torch.zeros_like(logits_CE)
    else:
        grad_CE = F.softmax(score.log_scores(logits_CE), dim=-1)
        if grad_probs_bE is not None:
            grad_bsE = grad_CE.view(grad_probs_bE.shape[0], -1, logits_CE.shape[1])
            mean_C = torch.bmm(grad_bsE, grad_probs_bE.unsqueeze(2)).flatten()
            factor_C = -mean_C if factor_C is None else factor_C - mean_C
            grad_bsE *= grad_probs_bE.unsqueeze(1) + factor_C.view(grad_bsE.shape[:2]).unsqueeze(2)
        else:
            assert factor_C is not None
            grad_CE *= factor_C.unsqueeze(1)
        if valid_C1 is not None:
            grad_CE *= valid_C1
    if grad_picks_CP is not None and places_CP is not None:
        grad_CE.scatter_add_(1, places_CP, grad_picks_CP)
    if score.slope is not None:
        grad_CE *= score.slope(logits_CE)
        if z_C is not None:
            of_z_CE = F.softmax(logits_CE, dim=-1).mul_(z_C.unsqueeze(1))
            grad_CE += of_z_CE if valid_C1 is None else of_z_CE.mul_(valid_C1)
    return grad_CE
