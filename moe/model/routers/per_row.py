"""Rules that balance inside each row: a token's experts depend on the others of its row. On the token path.

Neither is causal: a later token of the row can take an expert from an earlier one, so what is learned at training can
lean on the future, and generation (where there is no future yet) routes otherwise. Rows never look at each other, so
the layout cannot matter. Packed documents of one row are not isolated from each other.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts.
"""

import torch
from torch import Tensor

from backends.ops.router_topk.select import take_best
from backends.ops.router_topk.spec import Picks
from dispatch.interface import NOT_DISPATCHED
from moe.model.config import MoEConfig
from moe.model.routers.rule import RouterInput, RouterRule

SINKHORN_ITERATIONS = 20
"""A fixed number, so that no iteration waits for the device to say whether it has converged."""


def select_sinkhorn(given: RouterInput, moe: MoEConfig) -> Picks:
    """The K largest entries of a row's logits after Sinkhorn's iteration, which evens out the experts' totals.

    exp(logit_te + u_t + v_e) with u, v such that each valid token sums to 1 and each expert to (valid tokens) / E, all in
    logarithms. A token's own u_t does not change its order of experts, so the scores are logit + v.

    Source: Clark et al. 2022, "Unified Scaling Laws for Routed Language Models", section 3 (S-BASE).
    """
    num_rows, num_tokens = given.valid_BS.shape
    num_experts = given.logits_TE.shape[-1]
    logits_BSE = given.logits_TE.view(num_rows, num_tokens, num_experts)
    padding_BS1 = ~given.valid_BS[..., None]
    valid_B1 = given.valid_BS.sum(1, keepdim=True)
    log_share_B1 = (valid_B1.to(logits_BSE.dtype) / num_experts).clamp(min=1e-30).log()
    v_BE = logits_BSE.new_zeros(num_rows, num_experts)
    for _ in range(SINKHORN_ITERATIONS if num_tokens else 0):
        scaled_BSE = logits_BSE - (logits_BSE + v_BE[:, None]).logsumexp(-1, keepdim=True)
        totals_BE = scaled_BSE.masked_fill(padding_BS1, float("-inf")).logsumexp(1)
        # A row of padding alone has no totals: its v stays 0, since −inf would make NaN of it.
        v_BE = torch.where(valid_B1 > 0, log_share_B1 - totals_BE, 0.0)
    return take_best((logits_BSE + v_BE[:, None]).flatten(0, 1), moe.top_k)


def picks_per_expert(num_valid: Tensor, moe: MoEConfig) -> Tensor:
    """How many tokens of a row with num_valid valid tokens each expert takes: floor(num_valid · K / E). int64."""
    return torch.div(num_valid * moe.top_k, moe.num_experts, rounding_mode="floor")


def select_expert_choice(given: RouterInput, moe: MoEConfig) -> Picks:
    """Each expert takes the `picks_per_expert` valid tokens of a row that give it the largest probability.

    Perfectly even, K experts a token on average, but a token may get any number, none too. So a token has E places:
    place e holds e or NOT_DISPATCHED. Of tokens with equal probability the earlier comes first.

    Source: Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing", section 3.2 (there over a whole batch).
    """
    num_rows, num_tokens = given.valid_BS.shape
    num_experts = given.logits_TE.shape[-1]
    log_probs_TE = given.logits_TE.log_softmax(-1)
    log_probs_BSE = log_probs_TE.view(num_rows, num_tokens, num_experts)
    log_probs_BSE = log_probs_BSE.masked_fill(~given.valid_BS[..., None], float("-inf"))
    order_BSE = log_probs_BSE.argsort(dim=1, descending=True, stable=True)
    rank_1S1 = torch.arange(num_tokens, device=order_BSE.device).view(1, -1, 1)
    rank_BSE = torch.empty_like(order_BSE).scatter_(1, order_BSE, rank_1S1.expand_as(order_BSE))
    taken_BSE = rank_BSE < picks_per_expert(given.valid_BS.sum(1), moe).view(-1, 1, 1)
    experts_E = torch.arange(num_experts, device=order_BSE.device)
    ids_TE = torch.where(taken_BSE, experts_E, NOT_DISPATCHED).flatten(0, 1)
    return Picks(ids_TE, log_probs_TE.new_zeros(ids_TE.shape[0]))


SINKHORN = RouterRule(select=select_sinkhorn, score="softmax", needs_rows=True)
EXPERT_CHOICE = RouterRule(select=select_expert_choice, score="softmax", needs_rows=True)
