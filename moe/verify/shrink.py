"""A user's recipe, made small enough to be compared on two cores, with its layout untouched. Torch-free."""

from dataclasses import dataclass, replace
from typing import Any

from dispatch.config import CapacityScope
from moe.model.config import BalanceScope, balance_terms
from moe.schema import ConfigError, Problem, RunConfig
from moe.train.config import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that the comparison changes."""

    path: str
    before: Any
    after: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} → {_shown(self.after)} ({self.reason})"


SIZES = {
    "model.vocab_size": 1024,
    "model.hidden_size": 128,
    "model.intermediate_size": 128,
    "moe.moe_intermediate_size": 64,
    "data.seq_len": 64,
}
"""Upper bounds of what costs time and memory and cannot depend on the layout."""


def shrink(config: RunConfig) -> tuple[RunConfig, list[Change]]:
    """Return the recipe as it is compared, and what was changed.

    Kept: experts, top-k, router, balance, groups, ranks, ZeRO stage, accumulation, dispatch, optimizer. Widths are cut,
    heads with them; blocks to the dense ones (two at most) and two sparse ones; the batch to two sequences per rank and
    micro-step; numbers to fp32, where a departure can be told from rounding.
    """
    changes: list[Change] = []

    def change(current: RunConfig, path: str, after: Any, reason: str) -> RunConfig:
        section, name = path.split(".")
        part = getattr(current, section)
        before = getattr(part, name)
        if before == after:
            return current
        changes.append(Change(path=path, before=before, after=after, reason=reason))
        return replace(current, **{section: replace(part, **{name: after})})

    small = config
    for path, bound in SIZES.items():
        section, name = path.split(".")
        small = change(small, path, min(getattr(getattr(config, section), name), bound), "size")
    if small.model.hidden_size != config.model.hidden_size or config.model.head_dim is not None:
        # Heads keep their number, which the layout may divide; 16 wide is enough to rotate.
        small = change(small, "model.head_dim", 16, "follows hidden_size")
    dense = min(config.model.num_dense_layers, 2)
    sparse = min(config.model.num_layers - config.model.num_dense_layers, 2)
    small = change(small, "model.num_dense_layers", dense, "depth")
    small = change(small, "model.num_layers", dense + sparse, "depth")
    rows = 2 * config.parallel.nproc // config.parallel.sequence * config.trainer.accumulation
    small = change(
        small, "trainer.batch_size", min(rows, config.trainer.batch_size), "two rows per rank and micro-step"
    )
    small = change(small, "engine.ds_config", None, "it speaks of the whole recipe, and not of the mathematics")
    small = change(small, "engine.dtype", DType.fp32, "rounding would hide a departure")
    # Adam's first steps are g / (|g| + eps): with a tiny eps they blow rounding up to a visible share of lr.
    small = change(small, "optim.eps", max(config.optim.eps, 1e-4), "Adam magnifies rounding")
    small = change(small, "optim.warmup_steps", min(config.optim.warmup_steps, 1), "the weights shall move")
    return small, changes


def refuse_layout_dependent(config: RunConfig) -> None:
    """Raise ConfigError when the recipe asks for something that depends on the layout by its own definition."""
    problems = []
    if BalanceScope.micro_batch in balance_terms(config.moe):
        problems.append(
            Problem(
                path="moe.balance.micro_batch",
                value=balance_terms(config.moe)[BalanceScope.micro_batch],
                rule="is defined by one rank's micro-batch, so no layout equals another",
                way_out="use batch, sequence or global_batch",
            )
        )
    if config.dispatch.capacity_factor is not None and config.dispatch.capacity_scope is CapacityScope.local:
        problems.append(
            Problem(
                path="dispatch.capacity_scope",
                value="local",
                rule="decides capacity per rank, so no layout equals another",
                way_out="use dispatch.capacity_scope=global",
            )
        )
    if config.dispatch.max_rows_per_rank is not None:
        problems.append(
            Problem(
                path="dispatch.max_rows_per_rank",
                value=config.dispatch.max_rows_per_rank,
                rule="bounds a rank, and which experts share one is the layout, so no layout equals another",
                way_out="use dispatch.max_rows_per_rank=null",
            )
        )
    if problems:
        raise ConfigError(problems)


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))
