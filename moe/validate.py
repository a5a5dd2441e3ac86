"""The rules between settings: what types alone cannot refuse. Pure, torch-free; all problems are found at once."""

from collections.abc import Callable, Iterator

from moe.rules import dispatch, engine, layout, model, routing, run
from moe.rules.ranges import RANGES, out_of_range
from moe.schema import Problem, RunConfig


def validate(config: RunConfig) -> list[Problem]:
    """Every rule that this configuration breaks, in the order of the sections. Changes nothing."""
    problems = [problem for path, rule in RANGES.items() if (problem := out_of_range(config, path, *rule))]
    broken = {problem.path for problem in problems}
    # A rule between settings says nothing useful about a setting that is already out of its own range.
    for rule in _RULES:
        try:
            problems += [problem for problem in rule(config) if not broken & {problem.path, *problem.involves}]
        except ZeroDivisionError:
            # A rule divides by a setting that is 0, which its own range has refused.
            if not broken:
                raise
    return problems


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    model.shape,
    routing.choice,
    routing.balance,
    model.no_sparse_layers,
    layout.processes,
    layout.placement,
    engine.offload,
    engine.ds_config,
    dispatch.exchange,
    run.evaluation,
    run.guard,
    run.sources,
    run.ops,
)
