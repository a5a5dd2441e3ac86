"""What a routing rule is: on the token path, between logits and chosen experts.

A rule is a way of choosing and a way of scoring. Choosing gives ids and has no gradient; scoring gives each expert a
number whose logarithm is a smooth function of the logits, and from it come the combine weights of whatever was chosen
and the probabilities of the load-balancing loss. So replayed, forced and hashed choices learn as chosen ones do.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, P picks per token (top_k, or E where a rule's number varies).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dispatch.interface import NOT_DISPATCHED
from moe.model.config import MoEConfig


class TokenContext(NamedTuple):
    """What some rules need to know of a token beside its hidden state; made once a forward, from the batch alone."""

    input_ids_BS: Tensor
    """int64."""
    keys_BS: Tensor
    """int64: a token's name in all that is random, from `moe.model.routers.randomness.token_keys`."""


class RouterInput(NamedTuple):
    """What a rule chooses by. Nothing here carries a gradient."""

    logits_TE: Tensor
    """fp32 or fp64, finite."""
    valid_BS: Tensor
    """bool, False for padding: rules that look at a whole row leave it out; elsewhere it is taken out afterwards."""
    expert_bias_E: Tensor | None
    """fp32, for the rules that have one."""
    keys_T: Tensor
    """int64, already different in every layer and under every moe.router_seed."""
    input_ids_T: Tensor | None
    """int64; None when a layer runs outside a model."""
    layer_index: int


class Picks(NamedTuple):
    """Chosen experts."""

    ids_TP: Tensor
    """int64, different ones in a row, best first; NOT_DISPATCHED where a token has fewer than P."""
    margin_T: Tensor
    """How far the last chosen score is above the best one not chosen; 0 where that has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How much an expert counts for a token, as a logarithm: no sum of tiny numbers is ever formed."""

    log_scores: Callable[[Tensor], Tensor]
    """logits [T, E] -> logarithm of the scores, up to a constant per token if `is_distribution`."""
    is_distribution: bool
    """Whether unnormalised weights are the probabilities (scores over their sum over all E) or the scores themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """One way of routing."""

    select: Callable[[RouterInput, MoEConfig], Picks]
    score: Score


def weigh(log_scores_TE: Tensor, log_probs_TE: Tensor, ids_TP: Tensor, score: Score, *, normalize: bool) -> Tensor:
    """Combine weights [T, P] of the chosen experts, differentiable; 0 for NOT_DISPATCHED.

    Normalised ones are the softmax of the chosen log scores: the same number as score / Σ chosen scores, and no epsilon
    is needed however small the scores are. For softmax scores that is "softmax after selection"; unnormalised ones are
    then "softmax before selection", which a single pick learns from.
    """
    absent_TP = ids_TP == NOT_DISPATCHED
    chosen = log_scores_TE if normalize or not score.is_distribution else log_probs_TE
    log_TP = chosen.gather(-1, ids_TP.clamp(min=0))
    weights_TP = log_TP.masked_fill(absent_TP, float("-inf")).softmax(-1) if normalize else log_TP.exp()
    return weights_TP.masked_fill(absent_TP, 0.0)
