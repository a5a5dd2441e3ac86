"""What a forward pass returns beside activations. Tensors only: checkpointing and engines pass them through.

Legend: L MoE layers, B rows, E experts. Everything counts valid (non-padding) tokens only and is a *sum* over this
rank's micro-batch: whoever needs a mean divides by a global count, so the layout cannot matter.
"""

from typing import NamedTuple

from torch import Tensor


class RouterStats(NamedTuple):
    """Of one MoE layer; `ModelOutput.router` holds the same fields stacked to a leading L."""

    tokens_per_expert_BE: Tensor
    """int64: picks of each expert, before any drop. Sums to (valid tokens) · K (docs/routers.md says where not)."""
    router_probs_sum_BE: Tensor
    """fp32, differentiable: Σ over valid tokens of the load-balancing loss's probabilities (each token's sum to 1)."""
    z_sum: Tensor
    """fp32 scalar, differentiable: Σ logsumexp(logits)²."""
    entropy_sum: Tensor
    """fp32 scalar, no gradient: Σ entropy of the probabilities, nats."""
    max_logit: Tensor
    """fp32 scalar, no gradient: largest |logit| (0 without valid tokens); not finite when one of them is not."""
    dropped_per_expert_E: Tensor
    """int64: picks not served because of capacity."""
    margin_sum: Tensor
    """fp32 scalar, no gradient: Σ over valid tokens of the last chosen score minus the best one not chosen."""


class ModelOutput(NamedTuple):
    """Sums over this rank's micro-batch."""

    lm_loss_sum: Tensor
    """fp32 scalar, differentiable: Σ cross-entropy over labelled tokens, nats."""
    router: RouterStats | None
    """None when the model has no MoE layer."""
