"""Routers: on the token path, from hidden states to chosen experts, their weights and what balancing needs.

Legend: B rows, S tokens of a row, T = B·S tokens, D hidden, E experts, K picks per token.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch.interface import NOT_DISPATCHED
from moe.errors import NumericError
from moe.model.balance import z_sum
from moe.model.config import MoEConfig, RouterKind
from moe.model.outputs import RouterStats


class Choice(NamedTuple):
    """What a routing rule decides, for all tokens alike (padding is taken out afterwards)."""

    topk_expert_ids_TK: Tensor
    """int64, K different experts a token, best first."""
    topk_weights_TK: Tensor
    """fp32, differentiable, before the routed scale."""
    log_probs_TE: Tensor
    """fp32, differentiable: logarithm of the probabilities that the load-balancing loss uses; each token's sum to 1."""


class Routing(NamedTuple):
    """What the router returns."""

    topk_expert_ids_TK: Tensor
    """int64; NOT_DISPATCHED for padding."""
    topk_weights_TK: Tensor
    """fp32, differentiable; 0 for padding."""
    stats: RouterStats


def stable_topk(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores, best first; of equal scores the lower id comes first. [T, K] int64.

    scores_TE: fp32, finite. `torch.topk` promises no order among equals, so two backends (or a recomputation) could
    choose differently; a stable sort does, but took 41 ms for T=4096, E=256, K=8 on one CPU core where topk of floats
    took 9.7 ms. So every score becomes a different integer that orders like the score and then by id: 9.8 ms in all.
    """
    last_id = scores_TE.shape[-1] - 1
    # A float's bits order like an integer once negative ones are turned over; + 0.0 makes −0.0 the same as 0.0.
    bits_TE = (scores_TE + 0.0).view(torch.int32)
    ordered_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    keys_TE = (ordered_TE.long() << 16) | torch.arange(last_id, -1, -1, device=scores_TE.device)
    return last_id - (keys_TE.topk(top_k, dim=-1).values & 0xFFFF)


def choose_softmax(logits_TE: Tensor, expert_bias_E: Tensor | None, moe: MoEConfig) -> Choice:
    """p = softmax(logits) over all experts; the K most probable; weights p, divided by their sum if `normalize_topk`.

    Unnormalised weights are the probabilities from before the selection, so that a single pick (K = 1) still learns
    from the task. Normalised ones are computed as the softmax of the chosen logits, which is the same number.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers".
    """
    log_probs_TE = F.log_softmax(logits_TE, dim=-1)
    topk_expert_ids_TK = stable_topk(logits_TE.detach(), moe.top_k)
    if moe.normalize_topk:
        topk_weights_TK = logits_TE.gather(-1, topk_expert_ids_TK).softmax(-1)
    else:
        topk_weights_TK = log_probs_TE.gather(-1, topk_expert_ids_TK).exp()
    return Choice(topk_expert_ids_TK, topk_weights_TK, log_probs_TE)


def choose_sigmoid(logits_TE: Tensor, expert_bias_E: Tensor | None, moe: MoEConfig) -> Choice:
    """s = sigmoid(logits); the K largest s + bias; weights s (without bias), divided by their sum if `normalize_topk`.

    Sums of scores are never formed: s / Σs is computed as softmax(log s), both for the weights and for the balance
    probabilities, so no epsilon is needed and uniformly tiny scores look exactly as balanced as large ones.

    Source: DeepSeek-V3 technical report, equations 12 to 16; Wang et al. 2024 for the bias.
    """
    scores_TE = logits_TE.detach().sigmoid()
    topk_expert_ids_TK = stable_topk(scores_TE if expert_bias_E is None else scores_TE + expert_bias_E, moe.top_k)
    log_scores_TE = F.logsigmoid(logits_TE)
    log_topk_scores_TK = log_scores_TE.gather(-1, topk_expert_ids_TK)
    topk_weights_TK = log_topk_scores_TK.softmax(-1) if moe.normalize_topk else log_topk_scores_TK.exp()
    return Choice(topk_expert_ids_TK, topk_weights_TK, F.log_softmax(log_scores_TE, dim=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """One way of routing."""

    choose: Callable[[Tensor, Tensor | None, MoEConfig], Choice]
    """(logits [T, E] fp32, expert bias [E] fp32 or None, config) -> Choice."""
    uses_expert_bias: bool
    """Whether the router carries the selection bias (a buffer, moved by `balance.expert_bias_update`)."""


ROUTERS: dict[RouterKind, RouterRule] = {
    RouterKind.softmax: RouterRule(choose=choose_softmax, uses_expert_bias=False),
    RouterKind.sigmoid: RouterRule(choose=choose_sigmoid, uses_expert_bias=True),
}
"""Every router there is."""


def stop_if_not_finite(logits_TE: Tensor, layer_index: int) -> None:
    """Raise NumericError naming layer and rank when a logit is NaN or infinite, before any token is sent anywhere.

    The one place of this check. It reads one number on the host; on a device that waits for the queue.
    """
    if logits_TE.numel() and not bool(logits_TE.detach().abs().amax().isfinite()):
        num_bad = int((~logits_TE.isfinite()).any(-1).sum())
        raise NumericError(
            f"layers.{layer_index}.moe.router: logits of {num_bad} of {logits_TE.shape[0]} tokens are not finite "
            f"(rank {os.environ.get('RANK', '0')}); the hidden states or the router's weight have overflowed: "
            f"lower optim.lr or resume from an earlier checkpoint"
        )


class Router(nn.Module):
    """Linear scores in fp32, then the rule of `moe.router`.

    Nothing in here changes in forward: counts go out with the result, so that evaluation leaves no trace and a
    recomputed forward counts once. `expert_bias` (fp32, saved with the model) is moved from outside.
    """

    expert_bias: Tensor | None

    def __init__(self, hidden_size: int, moe: MoEConfig, *, layer_index: int) -> None:
        super().__init__()
        if moe.normalize_topk and moe.top_k == 1:
            raise ValueError(
                "moe.normalize_topk (true) with moe.top_k (1) makes every weight exactly 1, so the router gets no "
                "gradient from the task; choose moe.normalize_topk=false or a larger moe.top_k"
            )
        self.moe = moe
        self.rule = ROUTERS[moe.router]
        self.layer_index = layer_index
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        bias_E = torch.zeros(moe.num_experts, dtype=torch.float32) if self.rule.uses_expert_bias else None
        self.register_buffer("expert_bias", bias_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep the bias fp32 through `.to(bf16)`, `.half()` and engines that cast whole modules.

        In bf16 a bias of 0.5 cannot take a step of 0.001. A cast that stays on the device also keeps the storage.
        """
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def forward(self, x_BSD: Tensor, valid_BS: Tensor) -> Routing:
        """x_BSD: any floating dtype. valid_BS: bool, False for padding, which is sent nowhere and counts nowhere.

        Raises NumericError when a logit is not finite.
        """
        valid_T = valid_BS.reshape(-1)
        logits_TE = F.linear(x_BSD.flatten(0, 1).float(), self.weight.float())
        stop_if_not_finite(logits_TE, self.layer_index)
        choice = self.rule.choose(logits_TE, self.expert_bias, self.moe)
        topk_expert_ids_TK = choice.topk_expert_ids_TK.masked_fill(~valid_T[:, None], NOT_DISPATCHED)
        topk_weights_TK = (choice.topk_weights_TK * self.moe.routed_scale).masked_fill(~valid_T[:, None], 0.0)
        stats = router_stats(logits_TE, choice.log_probs_TE, topk_expert_ids_TK, valid_BS)
        return Routing(topk_expert_ids_TK, topk_weights_TK, stats)


def router_stats(logits_TE: Tensor, log_probs_TE: Tensor, topk_expert_ids_TK: Tensor, valid_BS: Tensor) -> RouterStats:
    """Sums over the valid tokens of one layer; see RouterStats for each."""
    num_experts = logits_TE.shape[-1]
    probs_TE = log_probs_TE.exp().masked_fill(~valid_BS.reshape(-1, 1), 0.0)
    with torch.no_grad():
        entropy_sum = -(probs_TE * log_probs_TE).sum()
        sizes_TE = logits_TE.abs().masked_fill(~valid_BS.reshape(-1, 1), 0.0)
        max_logit = sizes_TE.amax() if sizes_TE.numel() else sizes_TE.new_zeros(())
    return RouterStats(
        tokens_per_expert_BE=count_picks(topk_expert_ids_TK, valid_BS.shape[0], num_experts),
        router_probs_sum_BE=probs_TE.view(*valid_BS.shape, num_experts).sum(1),
        z_sum=z_sum(logits_TE, valid_BS.reshape(-1)),
        entropy_sum=entropy_sum,
        max_logit=max_logit,
        dropped_per_expert_E=torch.zeros(num_experts, dtype=torch.int64, device=logits_TE.device),
    )


def count_picks(topk_expert_ids_TK: Tensor, num_rows: int, num_experts: int) -> Tensor:
    """Picks of each expert in each row, [B, E] int64; NOT_DISPATCHED is not counted.

    Integers added at integer places: exact for any number of tokens, in any order, and without `bincount`'s wait for
    the device to learn the output's size.
    """
    # One place more than there are experts takes what goes nowhere.
    places_TK = topk_expert_ids_TK.where(topk_expert_ids_TK != NOT_DISPATCHED, num_experts)
    places_BN = places_TK.view(num_rows, places_TK.numel() // max(num_rows, 1))
    counts = torch.zeros(num_rows, num_experts + 1, dtype=torch.int64, device=places_BN.device)
    return counts.scatter_add_(1, places_BN, torch.ones_like(places_BN))[:, :num_experts]
