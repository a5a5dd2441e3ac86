"""The engine contract: what a training step asks of whoever owns gradients and optimizer (on the data path, after the batch).

Two implementations: `engine_torch.TorchEngine`, the oracle, and `engine_deepspeed.DeepSpeedEngine`. The same trainer runs
on both, and the parity harness holds one against the other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from moe.model.batch import TokenBatch
from moe.model.outputs import ModelOutput
from moe.model.transformer import Transformer


class StepOutcome(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping, over the whole model: dense parameters once, each expert once."""
    applied: bool
    """False when the norm was not finite, or above the limit: then no rank changed anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """Everything the optimizer knows about one local parameter, unpartitioned. Expert tensors hold this rank's experts."""

    weight: Tensor
    """fp32 master, in the parameter's shape."""
    exp_avg: Tensor
    """fp32 first moment; zeros before the first step."""
    exp_avg_sq: Tensor
    """fp32 second moment; zeros before the first step."""
    step: int
    """Optimizer steps taken."""


class Engine(Protocol):
    """Forward, backward, step; gradients and state by global parameter name."""

    module: Transformer

    def forward(self, batch: TokenBatch) -> ModelOutput:
        """Run the model in training mode on this rank's micro-batch."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients.

        loss: this rank's share of the objective. The objective of a step is the plain *sum* of `loss` over ranks and
        micro-batches; the engine sees to it that gradients come out as those of that sum, whatever it averages inside.
        Called exactly `accumulation` times between two steps.
        """
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of every local parameter: fp32, reduced over replicas, unclipped.

        Only between the last backward and `step`. Collective: all ranks iterate to the end, in the same order.
        """
        ...

    def step(self, lr: float, *, norm_limit: float = math.inf) -> StepOutcome:
        """Clip by the global norm, update with learning rate lr, clear gradients.

        norm_limit: with a norm above it nothing is updated, on any rank; a negative one updates nothing in any case.
        """
        ...

    def parameter_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Yield (name, state) of every local parameter. Collective, as `gradients`. Tensors may be views: copy to keep."""
        ...

    def load_parameter_states(self, states: Mapping[str, ParameterState]) -> None:
        """Take over weights, moments and step count of every local parameter; refuses missing, unknown or misshapen ones."""
        ...

    def close(self) -> None:
        """Release hooks and engine state, so that another engine can be built in this process."""
        ...
