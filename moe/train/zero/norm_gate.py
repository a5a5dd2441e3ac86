"""Keeps a ZeRO optimizer from applying a step whose gradient norm is above a limit (end of a step)."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe.train.mesh import Mesh
from moe.train.optim import agreed_norm


class NormGate:
    """Stands between the norm that DeepSpeed computes and its decision about it.

    Private names of 0.19.8, one of each optimizer, are where its norm comes from; one that is not finite lets the step go
    by as an overflow does, gradients dropped. Condition: a public way to refuse a step after its norm is known.
    tests/train/test_guard.py notices when one of the names goes.
    """

    def __init__(self, optimizer: Any, mesh: Mesh) -> None:
        gates: dict[str, Callable[..., Any]] = {
            "scaled_global_norm": self._whole,  # ZeRO 1 and 2
            "_get_norm_groups": self._groups,  # 3
            "get_grads_for_norm": self._gradients,  # 1 with bf16 weights: BF16_Optimizer
        }
        self._name = next(name for name in gates if hasattr(optimizer, name))
        self._gated = gates[self._name]
        self._optimizer = optimizer
        self._compute = getattr(optimizer, self._name)
        self._mesh = mesh
        self._limit = math.inf
        self.norm: float | None = None
        """Of the newest step, where the gate had to look."""

    @contextmanager
    def closed_above(self, limit: float) -> Iterator["NormGate"]:
        """For the length of the block, which makes one step."""
        self._limit, self.norm = limit, None
        if limit == math.inf:
            yield self
            return
        setattr(self._optimizer, self._name, self._gated)
        try:
            yield self
        finally:
            delattr(self._optimizer, self._name)

    def _open(self, norm: float) -> bool:
        self.norm = agreed_norm(norm, self._limit, self._mesh)
        return self.norm <= self._limit

    def _whole(self) -> Any:
        norm = self._compute()
        return norm if self._open(float(norm)) else math.inf

    def _groups(self) -> Any:
        norms = self._compute()
        return norms if self._open(math.sqrt(sum(float(norm) ** 2 for norm in norms))) else [math.inf]

    def _gradients(self, for_clipping: bool = False) -> Any:
        found = self._compute(for_clipping=for_clipping)
        if for_clipping:
            return found
        optimizer, functions = self._optimizer, sys.modules[type(self._optimizer).__module__]
        dense, experts = found
        norm = functions.get_global_norm_of_tensors(
            input_tensors=dense, mpu=optimizer.mpu, norm_type=optimizer.norm_type
        )
        if optimizer.has_moe_layers:
            norm = functions.get_norm_with_moe_layers(
                norm, mpu=optimizer.mpu, expert_tensors=experts, norm_type=optimizer.norm_type
            )
        if self._open(float(norm)):
            return found
        too_large = torch.full((1,), math.inf, device=self._mesh.device)
        return [too_large], {name: [too_large] for name in experts}
