"""Balance of load between experts, as pure functions: beside the token path, on what the router returned.

Legend: ... any leading dims (layers), B rows, E experts, T tokens.

All losses are *sums*: divide by the valid tokens of the whole step for the mean. Unit convention: the mean is 1.0 when
load and probabilities are even, at most E when all goes to one expert. (Others scale by K: Hugging Face's value is ours
times K.) One value per layer, never logits of several layers pooled: pooled layers cancel out.
"""

import torch
from torch import Tensor

from moe.model.config import BiasRule, MoEConfig


def balance_sum_batch(probs_sum_E: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Load-balancing loss with fractions over any pool of tokens: E · Σ_i f_i · (Σ_local tokens p_ti), [...] fp32.

    probs_sum_E: [..., E] fp32, Σ of probabilities over *this rank's* valid tokens; the gradient flows through it alone.
    tokens_per_expert_E: [..., E] int64, picks over the *whole pool* (all ranks of a micro-step, or of a step), none
    dropped; f_i is expert i's share of them. The results of all ranks and micro-batches add up to the loss of the joint
    batch, so their gradients do too. 0 without tokens.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with K picks a token; Qiu et al. 2025, "Demons in
    the Detail", for pools larger than a micro-batch.
    """
    fraction_E = tokens_per_expert_E / tokens_per_expert_E.sum(-1, keepdim=True).clamp(min=1)
    return tokens_per_expert_E.shape[-1] * (fraction_E * probs_sum_E).sum(-1)


def balance_sum_sequence(probs_sum_BE: Tensor, tokens_per_expert_BE: Tensor) -> Tensor:
    """Load-balancing loss with fractions per row: Σ_rows tokens_row · (E · Σ_i f_i^row · P_i^row), [...] fp32.

    probs_sum_BE: [..., B, E] fp32. tokens_per_expert_BE: [..., B, E] int64. Rows without valid tokens give 0.

    Source: DeepSeek-V3 technical report, equations 17 to 20 (there per sequence, without the token weight).
    """
    # tokens_row · P_row is the row's Σ p, so a row's share is the batch formula on that row alone.
    return balance_sum_batch(probs_sum_BE, tokens_per_expert_BE).sum(-1)


@torch.no_grad()
def expert_bias_update(
    expert_bias_E: Tensor,
    tokens_per_expert_E: Tensor,
    rate: float,
    *,
    rule: BiasRule = BiasRule.sign,
    clamp: float = 0.0,
) -> None:
    """Move the selection bias of every expert towards even load, in place.

    sign: bias += rate · sign(mean − load). proportional: bias += rate · (mean − load) / mean. Then into [−clamp, clamp],
    if clamp is not 0. Without any picks nothing moves.

    expert_bias_E: fp32; the same storage afterwards, since a checkpoint may hold it. tokens_per_expert_E: exact int64
    picks of the whole optimizer step, summed over all ranks and micro-batches. Call once per applied optimizer step.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1 and the
    variants of its section 4.3.
    """
    # E · (mean − load) without a division, so that no rounding can turn an even load into a move.
    total = tokens_per_expert_E.sum()
    difference_E = total - tokens_per_expert_E * tokens_per_expert_E.shape[-1]
    if rule is BiasRule.sign:
        expert_bias_E.add_(difference_E.sign(), alpha=rate)
    else:
        share_E = difference_E.double() / total.double().clamp(min=1.0)
        expert_bias_E.add_(share_E.float(), alpha=rate)
    if clamp:
        expert_bias_E.clamp_(-clamp, clamp)


def expert_bias_rate(moe: MoEConfig, step: int, max_steps: int) -> float:
    """The rate of optimizer step `step` (from 1) of max_steps: moe.expert_bias_rate, and 0 in the frozen last part.

    Frozen are the steps that begin when the share moe.expert_bias_freeze_after of all steps is done.

    Source: DeepSeek-V3 technical report, section 4.2 (the bias stands still for the last 500 B of 14.8 T tokens).
    """
    frozen = step - 1 >= moe.expert_bias_freeze_after * max_steps
    return 0.0 if frozen else moe.expert_bias_rate
