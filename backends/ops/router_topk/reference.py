"""router_topk in plain steps over the whole micro-batch, with autograd's own backward.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, P picks per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.ops.router_topk.scores import SCORES, Score
from backends.ops.router_topk.select import choose_experts
from backends.ops.router_topk.spec import NO_EXPERT, Choice, Picks, Routed


def router_topk(
    logits_TE: Tensor, valid_BS: Tensor, expert_bias_E: Tensor | None, choice: Choice, picks: Picks | None
) -> Routed:
    """See `backends.ops.router_topk.router_topk`."""
    score = SCORES[choice.score]
    num_experts = logits_TE.shape[-1]
    valid_T = valid_BS.reshape(-1)
    log_scores_TE = score.log_scores(logits_TE)
    log_probs_TE = F.log_softmax(log_scores_TE, dim=-1)
    with torch.no_grad():
        if picks is None:
            picks = choose_experts(logits_TE.detach(), expert_bias_E, choice)
        ids_TP = picks.ids_TP.masked_fill(~valid_T[:, None], NO_EXPERT)
    weights_TP = weigh(log_scores_TE, log_probs_TE, ids_TP, score, normalize=choice.normalize)
    probs_TE = log_probs_TE.exp().masked_fill(~valid_T[:, None], 0.0)
    with torch.no_grad():
        entropy_sum = -(probs_TE * log_probs_TE).sum()
        sizes_TE = logits_TE.abs().masked_fill(~valid_T[:, None], 0.0)
        max_logit = sizes_TE.amax() if sizes_TE.numel() else sizes_TE.new_zeros(())
        margin_sum = picks.margin_T.masked_fill(~valid_T, 0.0).sum()
    return Routed(
        ids_TP=ids_TP,
        weights_TP=weights_TP,
        tokens_per_expert_BE=count_picks(ids_TP, valid_BS.shape[0], num_experts),
        probs_sum_BE=probs_TE.view(*valid_BS.shape, num_experts).sum(1).float(),
        z_sum=z_sum(logits_TE, valid_T).float(),
        entropy_sum=entropy_sum.float(),
        max_logit=max_logit.float(),
        margin_sum=margin_sum.float(),
    )


def weigh(log_scores_TE: Tensor, log_probs_TE: Tensor, ids_TP: Tensor, score: Score, *, normalize: bool) -> Tensor:
    """Combine weights [T, P] of the chosen experts, differentiable; 0 for NO_EXPERT.

    Normalised ones are the softmax of the chosen log scores: the same number as score / Σ chosen scores, and no epsilon
    is needed however small the scores are. For softmax scores that is "softmax after selection"; unnormalised ones are
    then "softmax before selection", which a single pick learns from.
    """
    absent_TP = ids_TP == NO_EXPERT
    chosen = log_scores_TE if normalize or not score.is_distribution else log_probs_TE
    log_TP = chosen.gather(-1, ids_TP.clamp(min=0))
    weights_TP = log_TP.masked_fill(absent_TP, float("-inf")).softmax(-1) if normalize else log_TP.exp()
    return weights_TP.masked_fill(absent_TP, 0.0)


def z_sum(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Σ over valid tokens of logsumexp(logits)², fp32 scalar: keeps router logits small.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return (logits_TE.logsumexp(-1).square() * valid_T).sum()


def count_picks(ids_TP: Tensor, num_rows: int, num_experts: int) -> Tensor:
    """Picks of each expert in each row, [B, E] int64; NO_EXPERT is not counted.

    Integers added at integer places: exact for any number of tokens, in any order, and without `bincount`'s wait for
    the device to learn the output's size.
    """
    # One place more than there are experts takes what goes nowhere.
    places_TP = ids_TP.where(ids_TP != NO_EXPERT, num_experts)
    places_BN = places_TP.view(num_rows, places_TP.numel() // max(num_rows, 1))
    counts = torch.zeros(num_rows, num_experts + 1, dtype=torch.int64, device=places_BN.device)
    return counts.scatter_add_(1, places_BN, torch.ones_like(places_BN))[:, :num_experts]
