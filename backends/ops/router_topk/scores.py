"""How much an expert counts for a token, as a logarithm: no sum of tiny numbers is ever formed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One way to turn logits into scores; every function works on each element alone."""

    log_scores: Callable[[Tensor], Tensor]
    """logits -> logarithm of the scores, up to a constant per token if `is_distribution`."""
    slope: Callable[[Tensor], Tensor] | None
    """logits -> derivative of log_scores; None: 1 everywhere."""
    ranked: Callable[[Tensor], Tensor]
    """logits -> what is ranked, a bias added, to choose the best."""
    is_distribution: bool
    """Whether unnormalised weights are the probabilities (scores over their sum over all E) or the scores themselves."""


def _identity(logits_TE: Tensor) -> Tensor:
    return logits_TE


_LINEAR_BELOW = -15.0
"""log(softplus(x)) is x − e^x / 2 for small e^x; below this the difference to x is under 2e-7."""


def _edge(logits_TE: Tensor) -> float:
    # The exponential of −36 is lost beside 1 in fp64.
    return -36.0 if logits_TE.dtype == torch.float64 else _LINEAR_BELOW


def log_sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """log(sqrt(log(1 + e^x))), finite for every finite x: softplus itself is 0 in fp32 below −104."""
    edge = _edge(logits_TE)
    exact_TE = (-F.logsigmoid(-logits_TE.clamp(min=edge))).log()
    return 0.5 * torch.where(logits_TE < edge, logits_TE, exact_TE)


def _slope_of_log_sqrt_softplus(logits_TE: Tensor) -> Tensor:
    edge = _edge(logits_TE)
    inner_TE = logits_TE.clamp(min=edge)
    exact_TE = inner_TE.sigmoid() / -F.logsigmoid(-inner_TE)
    return 0.5 * torch.where(logits_TE < edge, 1.0, exact_TE)


def _slope_of_logsigmoid(logits_TE: Tensor) -> Tensor:
    return (-logits_TE).sigmoid()


def _sqrt_softplus(logits_TE: Tensor) -> Tensor:
    return F.softplus(logits_TE).sqrt()


SCORES: dict[str, Score] = {
    # The K largest logits are the K largest probabilities, but without ties made by rounding to 0 or 1.
    "softmax": Score(log_scores=_identity, slope=None, ranked=_identity, is_distribution=True),
    "sigmoid": Score(log_scores=F.logsigmoid, slope=_slope_of_logsigmoid, ranked=torch.sigmoid, is_distribution=False),
    "sqrt_softplus": Score(
        log_scores=log_sqrt_softplus,
        slope=_slope_of_log_sqrt_softplus,
        ranked=_sqrt_softplus,
        is_distribution=False,
    ),
}
"""softmax: p = e^logit / Σ e^logit. sigmoid: s = 1 / (1 + e^−logit). sqrt_softplus: s = sqrt(log(1 + e^logit)).

Source: softmax: Shazeer et al. 2017, "Outrageously Large Neural Networks". sigmoid: DeepSeek-V3 technical report,
equations 12 to 16. sqrt_softplus: DeepSeek-V4's published configuration (scoring_func sqrtsoftplus).
"""
