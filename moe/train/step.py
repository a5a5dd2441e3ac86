"""One optimizer step, the same for trainer and parity harness (on the data path: batch → … → balance update)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.balance import balance_sum_batch, expert_bias_rate, expert_bias_update
from moe.model.batch import TokenBatch
from moe.model.config import BalanceScope, MoEConfig, balance_terms
from moe.model.transformer import Transformer
from moe.train.config import GuardConfig
from moe.train.engine import Engine, StepOutcome
from moe.train.guard import StepGuard, Trouble, find_trouble
from moe.train.mesh import Mesh
from moe.train.objective import FIGURES, StepCounts, StepSums, count_picks_of_step, count_tokens, loss_share

NOTHING = -1.0
"""A limit that every norm is above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did, over all ranks."""

    outcome: StepOutcome
    counts: StepCounts
    sums: StepSums
    moe: MoEConfig
    trouble: Trouble | None = None
    """Why nothing was changed; None after an update."""

    @property
    def lm_loss(self) -> float:
        """Mean nats per labelled token."""
        return float(self.sums.lm_loss_sum) / max(self.counts.labelled_tokens, 1)

    def layer_means(self, figure: str) -> list[float]:
        """Mean over valid tokens of one of FIGURES, by MoE layer."""
        column_L = self.sums.figures_LF[:, FIGURES.index(figure)]
        return (column_L / max(self.counts.valid_tokens, 1)).tolist()

    def _mean(self, figure: str) -> float | None:
        return mean_of(self.layer_means(figure))

    @property
    def balance_losses(self) -> dict[BalanceScope, list[float]]:
        """Raw load-balancing loss of each scope asked for, by MoE layer: 1.0 at perfect balance.

        When none is asked for, that of the global batch, which the sums of the step give without further work.
        """
        losses = {scope: self.layer_means(scope.name) for scope in balance_terms(self.moe)}
        if not losses:
            of_step_L = balance_sum_batch(self.sums.probs_sum_LE, self.sums.tokens_per_expert_LE)
            losses[BalanceScope.global_batch] = (of_step_L / max(self.counts.valid_tokens, 1)).tolist()
        return losses

    @property
    def balance_loss(self) -> float | None:
        """Raw load-balancing loss of the widest scope asked for, mean over MoE layers. None without MoE layers."""
        return mean_of(list(self.balance_losses.values())[-1])

    @property
    def mean_probs_LE(self) -> Tensor:
        """Mean router probability of each expert over the step's valid tokens, fp32."""
        return self.sums.probs_sum_LE / max(self.counts.valid_tokens, 1)

    @property
    def z_loss(self) -> float | None:
        """Raw z-loss, mean over MoE layers and tokens."""
        return self._mean("z")

    @property
    def router_entropy(self) -> float | None:
        """Mean entropy of the router's probabilities, nats."""
        return self._mean("entropy")

    @property
    def router_margin(self) -> float | None:
        """Mean distance of the last chosen score from the best one not chosen."""
        return self._mean("margin")

    @property
    def total_loss(self) -> float:
        """The objective."""
        losses = self.balance_losses
        balance = sum(coef * (mean_of(losses[scope]) or 0.0) for scope, coef in balance_terms(self.moe).items())
        return self.lm_loss + balance + self.moe.router_z_coef * (self.z_loss or 0.0)


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def expert_biases(module: Transformer) -> list[Tensor]:
    """The selection bias of each MoE layer, fp32 [E], in the order of depth; empty for a router without one."""
    biases = (layer.router.expert_bias for layer in module.moe_layers())
    return [bias for bias in biases if bias is not None]


def count_step(batches: Sequence[TokenBatch], *, mesh: Mesh, stop_requested: bool) -> tuple[StepCounts, bool]:
    """Tokens of the step over all ranks, and whether any rank was asked to stop (collective).

    The stop flag rides on the one small exchange that a step needs anyway, so all ranks stop before the same step.
    """
    local = count_tokens(batches, mesh)
    numbers = torch.tensor(
        [local.labelled_tokens, local.valid_tokens, int(stop_requested)], dtype=torch.int64, device=mesh.device
    )
    dist.all_reduce(numbers, group=mesh.world_group)
    labelled, valid, stops = numbers.tolist()
    return StepCounts(labelled_tokens=labelled, valid_tokens=valid), stops > 0


def run_step(
    engine: Engine,
    batches: Sequence[TokenBatch],
    counts: StepCounts,
    *,
    mesh: Mesh,
    moe: MoEConfig,
    lr: float,
    step: int = 1,
    max_steps: int = 1,
    before_update: Callable[[], None] | None = None,
    guard: StepGuard | None = None,
) -> StepResult:
    """Forward and backward over the micro-batches, one update, one move of the expert bias.

    step, max_steps: number of this step (from 1) and of all; random routing and the bias's schedule depend on them.
    before_update: called between the last backward and the update (the parity harness reads gradients there).
    guard: knows the norm above which a step is bad, and learns of good ones; None: any finite norm is good.
    A step with trouble (StepResult.trouble) changes nothing anywhere: no weight, no moment, no bias.

    Raises NumericError on the CPU when router logits are not finite and the router stops early: before rows move.
    """
    module = engine.module
    layers = module.moe_layers()
    module.routing_step = step
    sums = StepSums.zeros(len(layers), moe.num_experts, mesh.device)
    step_counts_LE = None
    if layers and len(batches) > 1 and BalanceScope.global_batch in balance_terms(moe):
        step_counts_LE = count_picks_of_step(module, batches, mesh)
    losses = []
    for batch in batches:
        output = engine.forward(batch)
        losses.append(output.lm_loss_sum.detach())
        share = loss_share(output, moe=moe, counts=counts, mesh=mesh, sums=sums, step_counts_LE=step_counts_LE)
        engine.backward(share)
    if before_update is not None:
        before_update()
    sums.reduce(mesh.world_group)
    trouble = find_trouble(
        sums,
        counts,
        losses,
        moe=moe,
        layer_indices=[layer.layer_index for layer in layers],
        group=mesh.world_group,
    )
    guard = guard or StepGuard(GuardConfig())
    limit = guard.norm_limit() if trouble is None else NOTHING
    outcome = engine.step(lr, norm_limit=limit)
    if outcome.applied:
        guard.good(outcome.grad_norm, step)
    elif trouble is None:
        trouble = guard.norm_trouble(outcome.grad_norm, limit)
    rate = expert_bias_rate(moe, step, max_steps)
    if outcome.applied and rate:
        for bias, tokens_per_expert_E in zip(expert_biases(module), sums.tokens_per_expert_LE, strict=True):
            expert_bias_update(bias, tokens_per_expert_E, rate, rule=moe.expert_bias_rule, clamp=moe.expert_bias_clamp)
    return StepResult(outcome=outcome, counts=counts, sums=sums, moe=moe, trouble=trouble)
