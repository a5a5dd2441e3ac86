"""Choosing the device of a run: on the data path, the first thing after the config."""

import logging

from backends import cpu, cuda, npu
from backends.device import Backend
from moe.errors import EnvironmentProblem

BACKENDS = {"cuda": cuda, "npu": npu, "cpu": cpu}
"""Every device kind, in the order in which `auto` tries them."""


def resolve_backend(kind: str, local_rank: int) -> Backend:
    """The backend record of this process.

    kind: auto, cpu, cuda or npu. local_rank: this process's number on its machine, from 0. `auto` takes the first that
    can run and says which, on this module's logger.

    Raises ValueError when the named kind is unknown, EnvironmentProblem when it cannot run here.
    """
    if kind == "auto":
        reasons = {name: module.why_not() for name, module in BACKENDS.items()}
        name = next(name for name, reason in reasons.items() if reason is None)
        passed_over = "; ".join(f"{other}: {reason}" for other, reason in reasons.items() if reason is not None)
        logging.getLogger(__name__).info("backend=auto takes %s (%s)", name, passed_over or "the first choice")
        return BACKENDS[name].make(local_rank)
    if kind not in BACKENDS:
        raise ValueError(f"backend ({kind}) is not a device kind; choose auto, {', '.join(sorted(BACKENDS))}")
    reason = BACKENDS[kind].why_not()
    if reason is not None:
        raise EnvironmentProblem(f"backend ({kind}) cannot run here: {reason}; choose backend=auto or backend=cpu")
    return BACKENDS[kind].make(local_rank)
