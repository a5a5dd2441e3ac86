"""The plain engine: forward, all-reduce, clip, AdamW (end of a step). The oracle that DeepSpeed is held against.

One process, or any layout of data and expert parallelism, without partitioning and without overlap: slow and obvious.
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moe.model.batch import TokenBatch
from moe.model.outputs import ModelOutput
from moe.model.transformer import Transformer
from moe.train.config import EngineConfig, OptimConfig
from moe.train.engine import ParameterState, StepOutcome
from moe.train.mesh import Mesh
from moe.train.optim import (
    MasterAdamW,
    agreed_norm,
    cast_parameters,
    check_states,
    clip_coefficient,
    global_grad_norm,
    is_expert,
    parameter_groups,
)


class TorchEngine:
    """Implements `moe.train.engine.Engine` with torch alone.

    The objective is a sum over ranks and micro-batches, so every reduction is a plain sum: dense gradients over all
    ranks, an expert's gradient over the ranks that hold a copy of it (each copy already has the share of all its
    expert-parallel peers' tokens, which came through the dispatcher). Nothing is divided.
    """

    def __init__(
        self, module: Transformer, *, mesh: Mesh, optim: OptimConfig, engine: EngineConfig, accumulation: int
    ) -> None:
        """module: parallelised and initialised, on mesh.device; its parameters are cast to engine.dtype here."""
        cast_parameters(module, engine.dtype)
        self.module = module
        self._mesh = mesh
        self._clip_norm = optim.clip_norm
        self._accumulation = accumulation
        self._micro_batches = 0
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._optimizer = MasterAdamW(parameter_groups(module, optim))

    def forward(self, batch: TokenBatch) -> ModelOutput:
        """See `Engine.forward`."""
        self.module.train()
        output: ModelOutput = self.module(batch)
        return output

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        assert self._micro_batches < self._accumulation, "step() is due"
        loss.backward()
        self._optimizer.accumulate()
        self._micro_batches += 1
        if self._micro_batches == self._accumulation:
            self._reduce()

    def _reduce(self) -> None:
        """Sum gradients over replicas, once a step."""
        for name, parameter in self._parameters.items():
            group = self._mesh.expert_data_group if is_expert(name) else self._mesh.world_group
            if dist.get_world_size(group) > 1:
                dist.all_reduce(self._optimizer.masters[parameter].grad, group=group)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gradients`."""
        assert self._micro_batches == self._accumulation, "gradients are complete after the last micro-batch only"
        for name, parameter in self._parameters.items():
            gradient = self._optimizer.masters[parameter].grad
            assert gradient is not None
            yield name, gradient

    def step(self, lr: float, *, norm_limit: float = math.inf) -> StepOutcome:
        """See `Engine.step`."""
        gradients = dict(self.gradients())
        norm = float(
            global_grad_norm(
                [gradient for name, gradient in gradients.items() if not is_expert(name)],
                [gradient for name, gradient in gradients.items() if is_expert(name)],
                self._mesh.expert_group,
            )
        )
        norm = agreed_norm(norm, norm_limit, self._mesh)
        applied = math.isfinite(norm) and norm <= norm_limit
        if applied:
            self._optimizer.scale_gradients(clip_coefficient(norm, self._clip_norm))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.clear()
        self._micro_batches = 0
        return StepOutcome(grad_norm=norm, applied=applied)

    def parameter_states(self) -> Iterator[tuple[str, ParameterState]]:
        """See `Engine.parameter_states`."""
        for name, parameter in self._parameters.items():
            yield name, self._optimizer.parameter_state(parameter)

    @torch.no_grad()
    def load_parameter_states(self, states: Mapping[str, ParameterState]) -> None:
        """See `Engine.load_parameter_states`."""
        check_states(self._parameters, states)
        for name, parameter in self._parameters.items():
            self._optimizer.load_parameter_state(parameter, states[name])
        self._optimizer.write_back()

    def close(self) -> None:
        """See `Engine.close`: nothing is hooked here; gradients are forgotten."""
        self._optimizer.clear()
