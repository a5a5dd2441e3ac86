"""What a step minimises: sums from the model, divided by the counts of the whole step (on the data path, after forward).

    objective = Σ lm_loss_sum / labelled tokens
              + Σ over balance scopes: coefficient · mean over MoE layers of Σ balance_sum / valid tokens
              + router_z_coef                      · mean over MoE layers of Σ z_sum       / valid tokens

Sums run over ranks and micro-batches, counts are those of the step. So each token weighs the same however the step is
cut, and neither data parallel size nor accumulation scales any term.

Legend: L MoE layers, B rows, E experts, F figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.balance import balance_sum_batch, balance_sum_sequence
from moe.model.batch import IGNORE_LABEL, PADDING_DOCUMENT, TokenBatch
from moe.model.config import BalanceScope, MoEConfig, balance_terms
from moe.model.outputs import ModelOutput, RouterStats
from moe.model.transformer import Transformer
from moe.train.mesh import Mesh

FIGURES = ("z", "entropy", "margin", *(scope.name for scope in BalanceScope))
"""What is summed per MoE layer; a balance scope that is not asked for stays 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Tokens of one optimizer step, over all ranks and micro-batches."""

    labelled_tokens: int
    """Tokens with a label: the language loss is their mean."""
    valid_tokens: int
    """Tokens that are not padding: router losses are their mean."""


def count_tokens(batches: Sequence[TokenBatch], mesh: Mesh) -> StepCounts:
    """Count this rank's share; the caller sums over ranks. Ranks that share rows have them counted by their first."""
    if mesh.sequence_rank:
        return StepCounts(labelled_tokens=0, valid_tokens=0)
    return StepCounts(
        labelled_tokens=sum(int((batch.labels_BS != IGNORE_LABEL).sum()) for batch in batches),
        valid_tokens=sum(int((batch.document_ids_BS != PADDING_DOCUMENT).sum()) for batch in batches),
    )


@dataclass(slots=True)
class StepSums:
    """What a step has summed so far on this rank; `reduce` makes it the whole step's."""

    lm_loss_sum: Tensor
    """fp32 scalar."""
    figures_LF: Tensor
    """fp32, by FIGURES."""
    probs_sum_LE: Tensor
    """fp32, Σ over valid tokens of each expert's probability."""
    tokens_per_expert_LE: Tensor
    """int64 picks before any drop."""
    dropped_per_expert_LE: Tensor
    """int64 picks not served."""
    max_logit_L: Tensor
    """fp32, over tokens."""
    bad_rank_L: Tensor
    """fp32: 1 + the highest rank whose router logits were not finite, or 0."""

    @classmethod
    def zeros(cls, num_moe_layers: int, num_experts: int, device: torch.device) -> "StepSums":
        """An empty sum."""
        counts = torch.zeros(num_moe_layers, num_experts, dtype=torch.int64, device=device)
        of_layers = torch.zeros(num_moe_layers, device=device)
        return cls(
            lm_loss_sum=torch.zeros((), device=device),
            figures_LF=torch.zeros(num_moe_layers, len(FIGURES), device=device),
            probs_sum_LE=counts.float(),
            tokens_per_expert_LE=counts,
            dropped_per_expert_LE=counts.clone(),
            max_logit_L=of_layers,
            bad_rank_L=of_layers.clone(),
        )

    @property
    def max_logit(self) -> Tensor:
        """fp32 scalar, over layers and tokens; 0 without MoE layers."""
        return self.max_logit_L.max() if self.max_logit_L.numel() else self.max_logit_L.new_zeros(())

    @torch.no_grad()
    def add(self, output: ModelOutput, balance_sums: dict[BalanceScope, Tensor]) -> None:
        """Add one micro-batch. balance_sums: [L] each. Nothing here waits for the device."""
        self.lm_loss_sum += output.lm_loss_sum
        router = output.router
        if router is None:
            return
        figures = {"z": router.z_sum, "entropy": router.entropy_sum, "margin": router.margin_sum}
        figures |= {scope.name: sum_L for scope, sum_L in balance_sums.items()}
        for column, name in enumerate(FIGURES):
            if name in figures:
                self.figures_LF[:, column] += figures[name]
        self.probs_sum_LE += router.router_probs_sum_BE.sum(1)
        self.tokens_per_expert_LE += router.tokens_per_expert_BE.sum(1)
        self.dropped_per_expert_LE += router.dropped_per_expert_E
        self.max_logit_L = torch.maximum(self.max_logit_L, router.max_logit)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks of the group, in place (collective)."""
        parts = (self.lm_loss_sum.view(1), self.figures_LF.flatten(), self.probs_sum_LE.flatten())
        floats = torch.cat(parts)
        dist.all_reduce(floats, group=group)
        lm_loss_sum, figures, probs = floats.split([part.numel() for part in parts])
        self.lm_loss_sum = lm_loss_sum.view(())
        self.figures_LF = figures.view_as(self.figures_LF)
        self.probs_sum_LE = probs.view_as(self.probs_sum_LE)
        if self.tokens_per_expert_LE.numel():
            both = torch.stack([self.tokens_per_expert_LE, self.dropped_per_expert_LE])
            dist.all_reduce(both, group=group)
            self.tokens_per_expert_LE, self.dropped_per_expert_LE = both.unbind(0)
            # A maximum does not carry NaN on every backend: the news of it travels as a rank.
            finite_L = self.max_logit_L.isfinite()
            bad_rank_L = torch.where(finite_L, 0.0, dist.get_rank() + 1.0)
            maxima = torch.stack([self.max_logit_L.where(finite_L, torch.inf), bad_rank_L])
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            self.max_logit_L, self.bad_rank_L = maxima.unbind(0)


def loss_share(
    output: ModelOutput,
    *,
    moe: MoEConfig,
    counts: StepCounts,
    mesh: Mesh,
    sums: StepSums,
    step_counts_LE: Tensor | None = None,
) -> Tensor:
    """This rank's and micro-batch's additive share of the objective; adds the raw sums to `sums`.

    step_counts_LE: int64 picks of the whole step over all ranks, for the scope global_batch; None when the step has one
    micro-step, whose picks they are. Collective when a scope wider than a rank is asked for. A step without a labelled
    token has language loss 0, not NaN. A coefficient of 0 leaves no term, no cost and no exchange.
    """
    share = output.lm_loss_sum / max(counts.labelled_tokens, 1)
    balance_sums: dict[BalanceScope, Tensor] = {}
    router = output.router
    if router is not None:
        valid = max(counts.valid_tokens, 1) * router.z_sum.shape[0]
        terms = balance_terms(moe)
        balance_sums = balance_sums_by_scope(router, list(terms), mesh, step_counts_LE)
        for scope, coefficient in terms.items():
            share = share + coefficient * balance_sums[scope].sum() / valid
        if moe.router_z_coef:
            share = share + moe.router_z_coef * router.z_sum.sum() / valid
    sums.add(output, balance_sums)
    return share


def balance_sums_by_scope(
    router: RouterStats, scopes: Sequence[BalanceScope], mesh: Mesh, step_counts_LE: Tensor | None
) -> dict[BalanceScope, Tensor]:
    """This rank's balance sum [L] in each of the scopes, differentiable. Collective as `loss_share`."""
    counts_LBE, probs_LBE = router.tokens_per_expert_BE, router.router_probs_sum_BE
    if mesh.sequence_group is not None and not {BalanceScope.sequence, BalanceScope.micro_batch}.isdisjoint(scopes):
        # The pools are rows, of which this rank counted its own positions.
        counts_LBE = counts_LBE.clone()
        dist.all_reduce(counts_LBE, group=mesh.sequence_group)
    probs_LE, rows_counts_LE = probs_LBE.sum(1), counts_LBE.sum(1)
    own_counts_LE = router.tokens_per_expert_BE.sum(1)
    micro_step_counts_LE = own_counts_LE
    if BalanceScope.batch in scopes or (BalanceScope.global_batch in scopes and step_counts_LE is None):
        micro_step_counts_LE = own_counts_LE.clone()
        dist.all_reduce(micro_step_counts_LE, group=mesh.world_group)
    pools = {
        BalanceScope.micro_batch: rows_counts_LE,
        BalanceScope.batch: micro_step_counts_LE,
        BalanceScope.global_batch: micro_step_counts_LE if step_counts_LE is None else step_counts_LE,
    }
    return {
        scope: (
            balance_sum_sequence(probs_LBE, counts_LBE)
            if scope is BalanceScope.sequence
            else balance_sum_batch(probs_LE, pools[scope])
        )
        for scope in scopes
    }


@torch.no_grad()
def count_picks_of_step(module: Transformer, batches: Sequence[TokenBatch], mesh: Mesh) -> Tensor:
    """Picks of the whole step over all ranks, [L, E] int64, by a forward without gradients (collective).

    The first backward of a step needs them: the gradient of the global-batch loss is linear in the fractions of *all*
    micro-steps. Fractions of the micro-steps so far would cost nothing, but make the result depend on how the step is
    cut. Routing is a function of weights and tokens (jitter and noise too), so the picks are those of the forward proper.
    """
    module.train()
    total_LE: Tensor | None = None
    for batch in batches:
        stats = module.hidden(batch)[1]
        assert stats is not None
        counts_LE = stats.tokens_per_expert_BE.sum(1)
        total_LE = counts_LE if total_LE is None else total_LE + counts_LE
    assert total_LE is not None
    dist.all_reduce(total_LE, group=mesh.world_group)
    return total_LE
