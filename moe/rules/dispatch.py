"""Rules on the exchange of tokens and its capacity."""

from collections.abc import Iterator

from dispatch.config import CapacityScope, DispatchMode, DropPolicy
from moe.rules.ranges import value_at
from moe.rules.words import plain
from moe.schema import Problem, RunConfig


def exchange(config: RunConfig) -> Iterator[Problem]:
    dispatch, parallel = config.dispatch, config.parallel
    if dispatch.mode is DispatchMode.local and parallel.expert > 1:
        yield Problem(
            path="dispatch.mode",
            value="local",
            rule=f"must not be local with parallel.expert={parallel.expert}: rows have to reach other ranks",
            way_out="choose auto or all_to_all, or parallel.expert=1",
            involves=("parallel.expert",),
        )
    if dispatch.capacity_factor is None:
        for path, neutral in (
            ("dispatch.min_capacity", 0),
            ("dispatch.capacity_scope", CapacityScope["global"]),
            ("dispatch.pad_to_capacity", False),
        ):
            value = value_at(config, path)
            if value != neutral:
                yield Problem(
                    path=path,
                    value=plain(value),
                    rule="has no effect without dispatch.capacity_factor",
                    way_out=f"set dispatch.capacity_factor=1.25, say, or {path}={plain(neutral)}",
                    involves=("dispatch.capacity_factor",),
                )
        if dispatch.drop_policy is not DropPolicy.probability and dispatch.max_rows_per_rank is None:
            yield Problem(
                path="dispatch.drop_policy",
                value=dispatch.drop_policy.name,
                rule="has no effect without dispatch.capacity_factor or dispatch.max_rows_per_rank: nothing is dropped",
                way_out="set one of them, or dispatch.drop_policy=probability",
                involves=("dispatch.capacity_factor", "dispatch.max_rows_per_rank"),
            )
    elif dispatch.pad_to_capacity:
        yield from _static_shapes(config)


def _static_shapes(config: RunConfig) -> Iterator[Problem]:
    """What dispatch.pad_to_capacity cannot be combined with."""
    dispatch = config.dispatch
    flat = (DispatchMode.auto, DispatchMode.local, DispatchMode.all_to_all)
    for path, fits, reason, way_out in (
        (
            "dispatch.capacity_scope",
            dispatch.capacity_scope is CapacityScope["local"],
            "must be local with dispatch.pad_to_capacity: ranks that decide together have to exchange counts",
            "set dispatch.capacity_scope=local",
        ),
        (
            "dispatch.mode",
            dispatch.mode in flat,
            "must be auto, local or all_to_all with dispatch.pad_to_capacity: the others send what the routing asks for",
            "set dispatch.mode=auto",
        ),
        (
            "dispatch.chunks",
            dispatch.chunks == 1,
            "must be 1 with dispatch.pad_to_capacity: every chunk would be filled up to the whole capacity",
            "set dispatch.chunks=1",
        ),
        (
            "dispatch.save_memory",
            not dispatch.save_memory,
            "has no effect with dispatch.pad_to_capacity",
            "set dispatch.save_memory=false",
        ),
        (
            "dispatch.max_rows_per_rank",
            dispatch.max_rows_per_rank is None,
            "has no effect with dispatch.pad_to_capacity: a rank gets its experts' capacity, whatever the routing",
            "set dispatch.max_rows_per_rank=null",
        ),
    ):
        if not fits:
            yield Problem(
                path=path,
                value=plain(value_at(config, path)),
                rule=reason,
                way_out=f"{way_out}, or dispatch.pad_to_capacity=false",
                involves=("dispatch.pad_to_capacity",),
            )
