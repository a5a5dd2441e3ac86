"""One optimizer step, the same for trainer and parity harness (on the data path: batch → … → balance update)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.balance import expert_bias_update
from moe.model.batch import TokenBatch
from moe.model.config import MoEConfig
from moe.model.transformer import Transformer
from moe.train.engine import Engine, StepOutcome
from moe.train.mesh import Mesh
from moe.train.objective import StepCounts, StepSums, count_tokens, loss_share


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did, over all ranks."""

    outcome: StepOutcome
    counts: StepCounts
    sums: StepSums

    @property
    def lm_loss(self) -> float:
        """Mean nats per labelled token."""
        return float(self.sums.floats[0]) / max(self.counts.labelled_tokens, 1)

    def _router_mean(self, index: int) -> float | None:
        num_layers = self.sums.tokens_per_expert_LE.shape[0]
        if not num_layers:
            return None
        return float(self.sums.floats[index]) / (max(self.counts.valid_tokens, 1) * num_layers)

    @property
    def balance_loss(self) -> float | None:
        """Raw load-balancing loss, mean over MoE layers: 1.0 at perfect balance. None without MoE layers."""
        return self._router_mean(1)

    @property
    def z_loss(self) -> float | None:
        """Raw z-loss, mean over MoE layers and tokens."""
        return self._router_mean(2)

    @property
    def router_entropy(self) -> float | None:
        """Mean entropy of the router's probabilities, nats."""
        return self._router_mean(3)

    def total_loss(self, moe: MoEConfig) -> float:
        """The objective."""
        return (
            self.lm_loss
            + moe.load_balancing_coef * (self.balance_loss or 0.0)
            + moe.router_z_coef * (self.z_loss or 0.0)
        )


def expert_biases(module: Transformer) -> list[Tensor]:
    """The selection bias of each MoE layer, fp32 [E], in the order of depth; empty for a router without one."""
    biases = (layer.router.expert_bias for layer in module.moe_layers())
    return [bias for bias in biases if bias is not None]


def count_step(batches: Sequence[TokenBatch], *, mesh: Mesh, stop_requested: bool) -> tuple[StepCounts, bool]:
    """Tokens of the step over all ranks, and whether any rank was asked to stop (collective).

    The stop flag rides on the one small exchange that a step needs anyway, so all ranks stop before the same step.
    """
    local = count_tokens(batches)
    numbers = torch.tensor(
        [local.labelled_tokens, local.valid_tokens, int(stop_requested)], dtype=torch.int64, device=mesh.device
    )
    dist.all_reduce(numbers, group=mesh.data_group)
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
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Forward and backward over the micro-batches, one update, one move of the expert bias.

    before_update: called between the last backward and the update (the parity harness reads gradients there).
    Non-finite gradients change nothing anywhere: no weight, no moment, no bias.
    """
    layers = engine.module.moe_layers()
    sums = StepSums.zeros(len(layers), moe.num_experts, mesh.device)
    for batch in batches:
        output = engine.forward(batch)
        engine.backward(loss_share(output, moe=moe, counts=counts, data_group=mesh.data_group, sums=sums))
    if before_update is not None:
        before_update()
    outcome = engine.step(lr)
    sums.reduce(mesh.data_group)
    if outcome.applied and moe.expert_bias_rate:
        for bias, tokens_per_expert_E in zip(expert_biases(engine.module), sums.tokens_per_expert_LE, strict=True):
            expert_bias_update(bias, tokens_per_expert_E, moe.expert_bias_rate)
    return StepResult(outcome=outcome, counts=counts, sums=sums)
