"""Environment variables of a run on Ascend NPUs: what is set where the user has set nothing. Torch-free.

Read by CANN and torch_npu when they are loaded, so they stand before torch is imported. The reasons are the vendor's, from its
documents and training scripts; no value has been measured here. docs/backends/ascend.md lists them for users.
"""

import importlib.util
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A variable, what a run sets it to, and why."""

    name: str
    value: str
    reason: str
    unless: tuple[str, ...] = ()
    """Other variables that say the same: with one of them set, this one stays unset."""


DEFAULTS = (
    Default(
        name="TASK_QUEUE_ENABLE",
        value="2",
        reason="launches by a second thread, workspaces too: less waiting for the host, at a higher memory peak",
    ),
    Default(name="CPU_AFFINITY_CONF", value="1", reason="each process stays on cores near its device"),
    Default(
        name="PYTORCH_NPU_ALLOC_CONF",
        value="expandable_segments:True",
        reason="uneven loads of experts change sizes every step and would fragment fixed blocks",
        unless=("PYTORCH_ALLOC_CONF",),
    ),
    Default(
        name="HCCL_BUFFSIZE",
        value="200",
        reason="MiB that each communicator keeps in device memory; a run has one per group of ranks",
    ),
    Default(
        name="HCCL_CONNECT_TIMEOUT",
        value="1800",
        reason="seconds until ranks give up finding each other; as long as a collective may take",
    ),
    Default(
        name="INF_NAN_MODE_ENABLE",
        value="1",
        reason="overflows become Inf and NaN; saturated they would pass every check of ours",
    ),
)
"""In the order of docs/backends/ascend.md."""


def concerns(device_kind: str) -> bool:
    """Whether a run with this backend.device may come to use NPUs: `npu`, or `auto` where torch_npu is installed."""
    return device_kind == "npu" or (device_kind == "auto" and importlib.util.find_spec("torch_npu") is not None)


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set each variable that is not set, nor said by another one."""
    for default in DEFAULTS:
        if not any(name in environ for name in (default.name, *default.unless)):
            environ[default.name] = default.value


def report(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """For each variable the value that a run would have, and who says so: for `doctor`."""
    rows = []
    for default in DEFAULTS:
        other = next((name for name in default.unless if name in environ), None)
        if default.name in environ:
            value, source = environ[default.name], "your environment"
        elif other is not None:
            value, source = "unset", f"{other}={environ[other]}"
        else:
            value, source = default.value, "default of a run"
        rows.append({"name": default.name, "value": value, "source": source, "reason": default.reason})
    return rows
