"""Token choice: each token takes the experts of its K best scores. On the token path, inside the router.

Legend: T tokens, E experts, G groups, K picks per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.model.config import MoEConfig
from moe.model.routers.rule import Picks, RouterInput, RouterRule, Score


def stable_topk(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores, best first; of equal scores the lower id comes first. [T, K] int64.

    scores_TE: fp32 (or fp64), not NaN. `torch.topk` promises no order among equals, so two backends (or a
    recomputation) could choose differently; a stable sort does, but took 41 ms for T=4096, E=256, K=8 on one CPU core
    where topk of floats took 9.7 ms. So every fp32 score becomes a different integer that orders like the score and
    then by id: 9.8 ms in all. fp64 scores leave no room for an id, and are sorted.
    """
    if scores_TE.dtype == torch.float64:
        return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[..., :top_k]
    last_id = scores_TE.shape[-1] - 1
    # A float's bits order like an integer once negative ones are turned over; + 0.0 makes −0.0 the same as 0.0.
    bits_TE = (scores_TE + 0.0).view(torch.int32)
    ordered_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    keys_TE = (ordered_TE.long() << 16) | torch.arange(last_id, -1, -1, device=scores_TE.device)
    return last_id - (keys_TE.topk(top_k, dim=-1).values & 0xFFFF)


def take_best(scores_TE: Tensor, top_k: int) -> Picks:
    """The K best by `stable_topk`, and their margin over the next (0 when nothing is left, or only excluded experts).

    −inf excludes an expert; at least K must not be excluded.
    """
    num_experts = scores_TE.shape[-1]
    ids_TM = stable_topk(scores_TE, min(top_k + 1, num_experts))
    if top_k == num_experts:
        return Picks(ids_TM, scores_TE.new_zeros(scores_TE.shape[:-1]))
    last_T, next_T = scores_TE.gather(-1, ids_TM[..., top_k - 1 : top_k + 1]).unbind(-1)
    return Picks(ids_TM[..., :top_k], torch.where(next_T.isneginf(), 0.0, last_T - next_T))


def exclude_other_groups(scores_TE: Tensor, group_scores_TE: Tensor, moe: MoEConfig) -> Tensor:
    """scores_TE with −inf outside each token's best `topk_groups` groups of neighbouring experts.

    A group's score is the sum of its two best group_scores_TE; of equal groups the lower one comes first. −inf and not
    0, since 0 would beat a negative biased score. With one group per node this is node-limited routing: contiguous
    experts lie on the same rank, and contiguous ranks on the same node.

    Source: DeepSeek-V3 technical report, section 2.1.2 (node-limited routing) and its reference inference code.
    """
    grouped_TGe = group_scores_TE.unflatten(-1, (moe.num_groups, -1))
    best_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(-1)
    allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter(-1, stable_topk(best_TG, moe.topk_groups), True)
    excluded_TE = ~allowed_TG.repeat_interleave(grouped_TGe.shape[-1], dim=-1)
    return scores_TE.masked_fill(excluded_TE, float("-inf"))


def select_softmax(given: RouterInput, moe: MoEConfig) -> Picks:
    """The K largest logits, which are the K largest probabilities, but without ties made by rounding to 0 or 1."""
    scores_TE = given.logits_TE
    if moe.num_groups > 1:
        scores_TE = exclude_other_groups(scores_TE, scores_TE.softmax(-1), moe)
    return take_best(scores_TE, moe.top_k)


def _select_biased(scores_TE: Tensor, given: RouterInput, moe: MoEConfig) -> Picks:
    if given.expert_bias_E is not None:
        scores_TE = scores_TE + given.expert_bias_E
    if moe.num_groups > 1:
        scores_TE = exclude_other_groups(scores_TE, scores_TE, moe)
    return take_best(scores_TE, moe.top_k)


def select_sigmoid(given: RouterInput, moe: MoEConfig) -> Picks:
    """The K largest sigmoid(logit) + bias."""
    return _select_biased(given.logits_TE.sigmoid(), given, moe)


def select_sqrt_softplus(given: RouterInput, moe: MoEConfig) -> Picks:
    """The K largest sqrt(softplus(logit)) + bias."""
    return _select_biased(F.softplus(given.logits_TE).sqrt(), given, moe)


def _identity(logits_TE: Tensor) -> Tensor:
    return logits_TE


_LINEAR_BELOW = -15.0
"""log(softplus(x)) is x − e^x / 2 for small e^x; below this the difference to x is under 2e-7."""


def log_sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """log(sqrt(log(1 + e^x))), finite for every finite x: softplus itself is 0 in fp32 below −104."""
    if logits_TE.dtype == torch.float64:
        # The exponential of −36 is lost beside 1 in fp64.
        inner_TE, below = logits_TE, -36.0
    else:
        inner_TE, below = logits_TE, _LINEAR_BELOW
    exact_TE = (-F.logsigmoid(-inner_TE.clamp(min=below))).log()
    return 0.5 * torch.where(inner_TE < below, inner_TE, exact_TE)


SOFTMAX = Score(log_scores=_identity, is_distribution=True)
"""p = e^logit / Σ e^logit."""
SIGMOID = Score(log_scores=F.logsigmoid, is_distribution=False)
"""s = 1 / (1 + e^−logit)."""
SQRT_SOFTPLUS = Score(log_scores=log_sqrt_softplus, is_distribution=False)
"""s = sqrt(log(1 + e^logit))."""

SOFTMAX_TOPK = RouterRule(select=select_softmax, score=SOFTMAX)
"""Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers"."""
SIGMOID_TOPK = RouterRule(select=select_sigmoid, score=SIGMOID)
"""Source: DeepSeek-V3 technical report, equations 12 to 16; Wang et al. 2024 for the bias."""
SQRT_SOFTPLUS_TOPK = RouterRule(select=select_sqrt_softplus, score=SQRT_SOFTPLUS)
"""Source: DeepSeek-V4's published configuration (scoring_func sqrtsoftplus, with the bias of V3)."""
