"""What a step minimises: sums from the model, divided by the counts of the whole step (on the data path, after forward).

    objective = Σ lm_loss_sum / labelled tokens
              + load_balancing_coef · mean over MoE layers of Σ balance_sum / valid tokens
              + router_z_coef       · mean over MoE layers of Σ z_sum       / valid tokens

Sums run over ranks and micro-batches, counts are those of the step. So each token weighs the same however the step is
cut, and neither data parallel size nor accumulation scales any term.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.balance import balance_sum_batch, balance_sum_sequence
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import BalanceScope, MoEConfig
from moe.model.outputs import ModelOutput, RouterStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Tokens of one optimizer step, over all ranks and micro-batches."""

    labelled_tokens: int
    """Tokens with a label: the language loss is their mean."""
    valid_tokens: int
    """Tokens that are not padding: router losses are their mean."""


def count_tokens(batches: Sequence[TokenBatch]) -> StepCounts:
    """Count this rank's share; the caller sums over ranks."""
    return StepCounts(
        labelled_tokens=sum(int((batch.labels_BS != IGNORE_LABEL).sum()) for batch in batches),
        valid_tokens=sum(int((batch.document_ids_BS != PADDING_DOCUMENT).sum()) for batch in batches),
    )


@dataclass(slots=True)
class StepSums:
    """What a step has summed so far on this rank; `reduced` makes it the whole step's."""

    floats: Tensor
    """fp32: language loss sum, balance sum, z sum, entropy sum (the last three summed over layers)."""
    tokens_per_expert_LE: Tensor
    """int64 picks before any drop."""
    dropped_per_expert_LE: Tensor
    """int64 picks not served."""
    max_logit: Tensor
    """fp32, over layers and tokens."""

    @classmethod
    def zeros(cls, num_moe_layers: int, num_experts: int, device: torch.device) -> "StepSums":
        """An empty sum."""
        counts = torch.zeros(num_moe_layers, num_experts, dtype=torch.int64, device=device)
        return cls(torch.zeros(4, device=device), counts, counts.clone(), torch.zeros((), device=device))

    def add(self, lm_loss_sum: Tensor, balance_sum: Tensor, z_sum: Tensor, router: RouterStats | None) -> None:
        """Add one micro-batch."""
        entropy = router.entropy_sum.sum() if router is not None else lm_loss_sum.new_zeros(())
        self.floats += torch.stack([lm_loss_sum, balance_sum, z_sum, entropy]).detach()
        if router is not None:
            self.tokens_per_expert_LE += router.tokens_per_expert_BE.sum(1)
            self.dropped_per_expert_LE += router.dropped_per_expert_E
            self.max_logit = torch.maximum(self.max_logit, router.max_logit.max())

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks of the group, in place (collective)."""
        dist.all_reduce(self.floats, group=group)
        if self.tokens_per_expert_LE.numel():
            both = torch.stack([self.tokens_per_expert_LE, self.dropped_per_expert_LE])
            dist.all_reduce(both, group=group)
            self.tokens_per_expert_LE, self.dropped_per_expert_LE = both.unbind(0)
            dist.all_reduce(self.max_logit, op=dist.ReduceOp.MAX, group=group)


def loss_share(
    output: ModelOutput, *, moe: MoEConfig, counts: StepCounts, data_group: dist.ProcessGroup, sums: StepSums
) -> Tensor:
    """This rank's and micro-batch's additive share of the objective; adds the raw sums to `sums`.

    Collective when balance_scope=batch: the fractions are those of this micro-step on all ranks of data_group.
    A step without a labelled token has language loss 0, not NaN.
    """
    share = output.lm_loss_sum / max(counts.labelled_tokens, 1)
    router = output.router
    balance_sum = z_sum = torch.zeros((), device=share.device)
    if router is not None:
        num_layers = router.z_sum.shape[0]
        z_sum = router.z_sum.sum()
        balance_sum = _balance_sum(router, moe, data_group)
        valid = max(counts.valid_tokens, 1) * num_layers
        # A zero coefficient leaves no term in the graph at all.
        if moe.load_balancing_coef:
            share = share + moe.load_balancing_coef * balance_sum / valid
        if moe.router_z_coef:
            share = share + moe.router_z_coef * z_sum / valid
    sums.add(output.lm_loss_sum, balance_sum, z_sum, router)
    return share


def _balance_sum(router: RouterStats, moe: MoEConfig, data_group: dist.ProcessGroup) -> Tensor:
    """Σ over layers of the balance sum, in the configured scope."""
    counts_LBE, probs_LBE = router.tokens_per_expert_BE, router.router_probs_sum_BE
    if moe.balance_scope is BalanceScope.sequence:
        per_layer = [balance_sum_sequence(p, c, moe.top_k) for p, c in zip(probs_LBE, counts_LBE, strict=True)]
        return torch.stack(per_layer).sum()
    counts_LE = counts_LBE.sum(1)
    dist.all_reduce(counts_LE, group=data_group)
    per_layer = [balance_sum_batch(p.sum(0), c, moe.top_k) for p, c in zip(probs_LBE, counts_LE, strict=True)]
    return torch.stack(per_layer).sum()
