"""The step guard: what is wrong with a step is known before the update, on all ranks alike, and then decided by policy.

On the data path between the last backward and the optimizer. What any rank sees wrong rides on the sums that are reduced
once a step anyway; the details are exchanged only when there is something to say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.config import ROUTER_TRAITS, MoEConfig
from moe.train.config import GuardConfig
from moe.train.objective import StepCounts, StepSums

_FEWEST_STEPS = 20
"""Applied steps before the norm's spread says anything."""
_LEAST_SPREAD = 0.1
"""Of the mean: a norm that has hardly moved so far may still move by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a step must not change anything; the same on all ranks."""

    kind: str
    """router, loss, labels, counts or norm."""
    text: str
    """What is wrong, without the data it was seen on."""
    micro_steps: tuple[tuple[int, int], ...] = ()
    """(rank, micro-step) where it was seen; empty: the step as a whole."""


def find_trouble(
    sums: StepSums,
    counts: StepCounts,
    losses: Sequence[Tensor],
    *,
    moe: MoEConfig,
    layer_indices: Sequence[int],
    group: dist.ProcessGroup,
) -> Trouble | None:
    """Look at the reduced sums of a step (collective when something is wrong).

    losses: this rank's language loss sum of each micro-step.
    """
    bad_layers = [
        (index, int(rank) - 1) for index, rank in zip(layer_indices, sums.bad_rank_L.tolist(), strict=True) if rank
    ]
    loss = float(sums.lm_loss_sum)
    if bad_layers or not math.isfinite(loss):
        where = _where_not_finite(losses, group)
        if bad_layers:
            layer, rank = bad_layers[0]
            text = f"router logits of layers.{layer} are not finite on rank {rank}"
            return Trouble(kind="router", text=text, micro_steps=where)
        return Trouble(kind="loss", text=f"the language loss is {loss}", micro_steps=where)
    if counts.labelled_tokens == 0:
        return Trouble(kind="labels", text="no token has a label: every label is masked or padding")
    if ROUTER_TRAITS[moe.router].exact_top_k:
        expected = counts.valid_tokens * moe.top_k
        for layer, picks in zip(layer_indices, sums.tokens_per_expert_LE.sum(1).tolist(), strict=True):
            if picks != expected:
                text = (
                    f"layers.{layer} counts {picks} picks over all ranks, where {counts.valid_tokens} tokens with "
                    f"{moe.top_k} picks each make {expected}"
                )
                return Trouble(kind="counts", text=text)
    return None


def _where_not_finite(losses: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[tuple[int, int], ...]:
    own = torch.stack([~loss.detach().isfinite() for loss in losses]).long()
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own, group=group)
    return tuple((rank, step) for rank, bad in enumerate(of_ranks) for step, flag in enumerate(bad.tolist()) if flag)


@dataclass(slots=True)
class StepGuard:
    """Remembers the norms of good steps and the data of bad ones; part of every checkpoint."""

    config: GuardConfig
    skipped: list[int] = field(default_factory=list)
    """Batches of the data that trained nothing, by their number in the order of the data; ascending."""
    in_row: int = 0
    """Bad steps without getting any further than the furthest of them."""
    bad_step: int = 0
    """The furthest bad step, from 1."""
    num_norms: int = 0
    mean: float = 0.0
    """Of the gradient norm over about the last `config.window` good steps."""
    variance: float = 0.0

    def norm_limit(self) -> float:
        """The norm above which a step changes nothing; infinite without a z-score, and while too few steps are known."""
        if not self.config.z_score or self.num_norms < _FEWEST_STEPS:
            return math.inf
        spread = max(math.sqrt(self.variance), _LEAST_SPREAD * self.mean)
        return self.mean + self.config.z_score * spread

    def norm_trouble(self, norm: float, limit: float) -> Trouble:
        """What is said of a step whose norm kept it from being applied."""
        if not math.isfinite(norm):
            return Trouble(kind="norm", text=f"the gradient norm is {norm}")
        text = (
            f"the gradient norm is {norm:.4g}, above {limit:.4g} = mean {self.mean:.4g} + {self.config.z_score:g} spreads "
            f"of the last {min(self.num_norms, self.config.window)} good steps"
        )
        return Trouble(kind="norm", text=text)

    def good(self, norm: float, step: int) -> None:
        """A step was applied. Steps that are done again after going back are no progress."""
        if step >= self.bad_step:
            self.in_row = 0
        self.num_norms += 1
        weight = 1 / min(self.num_norms, self.config.window)
        difference = norm - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)

    def bad(self, batch: int, step: int) -> None:
        """A step was not; its data is passed over from now on."""
        self.in_row += 1
        self.bad_step = max(self.bad_step, step)
        self.skipped = sorted({*self.skipped, batch})

    def batch_of(self, step: int) -> int:
        """The batch of the data that step `step` (steps done before it) trains on."""
        return batch_of(step, self.skipped)

    def state(self) -> dict[str, Any]:
        """For TrainState.extra."""
        return {
            "skipped": self.skipped,
            "in_row": self.in_row,
            "bad_step": self.bad_step,
            "num_norms": self.num_norms,
            "mean": self.mean,
            "variance": self.variance,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds; nothing of older ones."""
        self.skipped = [int(batch) for batch in state.get("skipped", ())]
        self.in_row = int(state.get("in_row", 0))
        self.bad_step = int(state.get("bad_step", 0))
        self.go_back(state)

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Take over the norms alone: what has been learned of bad data since stays."""
        self.num_norms = int(state.get("num_norms", 0))
        self.mean = float(state.get("mean", 0.0))
        self.variance = float(state.get("variance", 0.0))


def batch_of(step: int, skipped: Sequence[int]) -> int:
    """The step-th batch, from 0, of those that are not skipped (ascending)."""
    for batch in skipped:
        if batch <= step:
            step += 1
    return step
