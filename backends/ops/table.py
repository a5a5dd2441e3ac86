"""How an op picks one of its implementations: named ones run or raise, `auto` takes the first that can run and says so.

Every op package keeps an explicit table of `Implementation` records, best first, its reference last.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])
Shape = TypeVar("Shape", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation(Generic[Function, Shape]):
    """One way to compute an op."""

    name: str
    function: Function
    """Same signature as the op, without the choice of implementation."""
    devices: tuple[str, ...]
    """Device types it is meant for."""
    dtypes: tuple[torch.dtype, ...]
    """Types of its floating-point operands."""
    why_not: Callable[[str, torch.dtype, Shape | None], str | None]
    """(device type, dtype, shape facts or None for any shape) -> why it cannot run there; None when it can."""
    cost: str
    """What falling back to it costs, for the log; with the figure's shape and date."""

    def reason_against(self, device_type: str, dtype: torch.dtype, shape: Shape | None) -> str | None:
        """Why this implementation cannot run on such operands; None when it can."""
        if device_type not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {device_type}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        return self.why_not(device_type, dtype, shape)


class CannotRun(ValueError):
    """A named implementation was asked for operands that it does not take; the message says why."""


def always(device_type: str, dtype: torch.dtype, shape: Hashable | None) -> str | None:
    """The `why_not` of an implementation that runs wherever its device and dtype are listed."""
    return None


def choose(
    op: str,
    implementations: Mapping[str, Implementation[Function, Shape]],
    requested: str,
    device_type: str,
    dtype: torch.dtype,
    shape: Shape,
) -> Implementation[Function, Shape]:
    """The implementation to run: the requested one, or for `auto` the first of the table that can run.

    `auto` says once per process and reason, as a warning on this module's logger, when it passes over a better
    one that is meant for this kind of device.

    Raises ValueError for an unknown name, CannotRun (a ValueError) when the requested one cannot run on these operands.
    """
    if requested == "auto":
        reasons: list[str] = []
        refused: list[str] = []
        for implementation in implementations.values():
            reason = implementation.reason_against(device_type, dtype, shape)
            if reason is None:
                if reasons:
                    _say_once(f"{op} falls back to {implementation.name} ({'; '.join(reasons)}): {implementation.cost}")
                return implementation
            refused.append(f"{implementation.name}: {reason}")
            # One that is meant for other devices is no loss here.
            if device_type in implementation.devices:
                reasons.append(refused[-1])
        raise ValueError(f"no implementation of {op} can run: {'; '.join(refused)}; use another device or dtype")
    if requested not in implementations:
        raise ValueError(
            f"backend.ops.{op} ({requested}) is not an implementation; choose auto, {', '.join(implementations)}"
        )
    reason = implementations[requested].reason_against(device_type, dtype, shape)
    if reason is not None:
        raise CannotRun(f"backend.ops.{op} ({requested}) cannot run here: {reason}; choose backend.ops.{op}=auto")
    return implementations[requested]


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
