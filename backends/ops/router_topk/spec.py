"""What goes into router_topk beside the logits, and what comes out.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, P picks per token.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NO_EXPERT = -1
"""The id of a pick that goes nowhere; `dispatch.interface.NOT_DISPATCHED` to the rest of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How experts are scored, and chosen where nobody else has chosen."""

    score: str
    """A key of `scores.SCORES`."""
    top_k: int
    normalize: bool
    """Whether a token's weights sum to 1; else they are the scores (of softmax: the probabilities) themselves."""
    num_groups: int = 1
    """Groups of neighbouring experts, of which each token is limited to topk_groups; divides E."""
    topk_groups: int = 1


class Picks(NamedTuple):
    """Chosen experts."""

    ids_TP: Tensor
    """int64, different ones in a row, best first; NO_EXPERT where a token has fewer than P."""
    margin_T: Tensor
    """How far the last chosen score is above the best one not chosen; 0 where that has no meaning."""


class Routed(NamedTuple):
    """Weights of the chosen experts, and sums over the valid tokens."""

    ids_TP: Tensor
    """int64; NO_EXPERT for padding."""
    weights_TP: Tensor
    """In the dtype of the logits, differentiable; 0 where the id is NO_EXPERT."""
    tokens_per_expert_BE: Tensor
    """int64: picks of each expert in each row."""
    probs_sum_BE: Tensor
    """fp32, differentiable: sum of the probabilities (each token's scores over their sum)."""
    z_sum: Tensor
    """fp32 scalar, differentiable: Σ logsumexp(logits)²."""
    entropy_sum: Tensor
    """fp32 scalar: Σ entropy of the probabilities, nats."""
    max_logit: Tensor
    """fp32 scalar: largest |logit|, 0 without valid tokens."""
    margin_sum: Tensor
    """fp32 scalar: Σ margin."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    """What decides whether an implementation can run."""

    num_experts: int
    top_k: int
