"""Token choice: each token takes the experts of its K best scores. Nothing here carries a gradient.

Legend: T tokens, E experts, G groups, e experts of a group, M best ones.
"""

import torch
from torch import Tensor

from backends.ops.router_topk.scores import SCORES
from backends.ops.router_topk.spec import Choice, Picks


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


def exclude_other_groups(scores_TE: Tensor, group_scores_TE: Tensor, choice: Choice) -> Tensor:
    """scores_TE with −inf outside each token's best `topk_groups` groups of neighbouring experts.

    A group's score is the sum of its two best group_scores_TE; of equal groups the lower one comes first. −inf and not
    0, since 0 would beat a negative biased score. With one group per node this is node-limited routing: contiguous
    experts lie on the same rank, and contiguous ranks on the same node.

    Source: DeepSeek-V3 technical report, section 2.1.2 (node-limited routing) and its reference inference code.
    """
    grouped_TGe = group_scores_TE.unflatten(-1, (choice.num_groups, -1))
    best_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(-1)
    allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter(-1, stable_topk(best_TG, choice.topk_groups), True)
    excluded_TE = ~allowed_TG.repeat_interleave(grouped_TGe.shape[-1], dim=-1)
    return scores_TE.masked_fill(excluded_TE, float("-inf"))


def choose_experts(logits_TE: Tensor, expert_bias_E: Tensor | None, choice: Choice) -> Picks:
    """The K best scores of each token, a bias added, inside its best groups."""
    scores_TE = SCORES[choice.score].ranked(logits_TE)
    if expert_bias_E is not None:
        scores_TE = scores_TE + expert_bias_E
    if choice.num_groups > 1:
        # Logits may be negative, and a sum of two of them says nothing of a group; of probabilities it does.
        group_scores_TE = scores_TE.softmax(-1) if choice.score == "softmax" else scores_TE
        scores_TE = exclude_other_groups(scores_TE, group_scores_TE, choice)
    return take_best(scores_TE, choice.top_k)
