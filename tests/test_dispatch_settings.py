"""Settings of dispatch and of placement: what is refused, with its way out, and what is allowed."""

import re

import pytest

from moe.config import ConfigError, load_config
from moe.schema import RunConfig
from moe.validate import validate

PADDED = "dispatch.capacity_factor=1.25 dispatch.pad_to_capacity=true"
STATIC = f"{PADDED} dispatch.capacity_scope=local"


def load(settings: str) -> RunConfig:
    """tiny has 4 experts on 2 expert ranks of 2 processes, DeepSpeed at ZeRO-1."""
    return load_config(settings.split(" "), "tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "dispatch.capacity_factor=0",
            r"dispatch\.capacity_factor \(0\.0\) must be above 0.*or null to serve every pick",
        ),
        ("dispatch.min_capacity=-1", r"dispatch\.min_capacity \(-1\) must not be negative"),
        ("dispatch.max_rows_per_rank=0", r"dispatch\.max_rows_per_rank \(0\) must be at least 1"),
        ("dispatch.min_capacity=4", r"dispatch\.min_capacity \(4\) has no effect without dispatch\.capacity_factor"),
        ("dispatch.capacity_scope=local", r"dispatch\.capacity_scope \(local\) has no effect without"),
        ("dispatch.pad_to_capacity=true", r"dispatch\.pad_to_capacity \(true\) has no effect without"),
        ("dispatch.drop_policy=position", r"dispatch\.drop_policy \(position\) has no effect .*: nothing is dropped"),
        ("dispatch.drop_policy=best", r"dispatch\.drop_policy \(best\)"),
        (PADDED, r"dispatch\.capacity_scope \(global\) must be local with .*; set dispatch\.capacity_scope=local"),
        (f"{STATIC} dispatch.mode=two_hop", r"dispatch\.mode \(two_hop\) must be auto, local or all_to_all with"),
        (f"{STATIC} dispatch.chunks=2", r"dispatch\.chunks \(2\) must be 1 with dispatch\.pad_to_capacity"),
        (f"{STATIC} dispatch.save_memory=true", r"dispatch\.save_memory \(true\) has no effect with"),
        (f"{STATIC} dispatch.max_rows_per_rank=9", r"dispatch\.max_rows_per_rank \(9\) has no effect with"),
        (
            "parallel.nproc=4 parallel.expert=4 parallel.ranks_per_node=3",
            r"parallel\.ranks_per_node \(3\) must divide parallel\.expert \(4\).*choose one of 1, 2, 4",
        ),
        ("parallel.ranks_per_node=0", r"parallel\.ranks_per_node \(0\) must be at least 1"),
        ("parallel.nproc=8 parallel.expert=8", r"parallel\.expert \(8\) must be at most moe\.num_experts \(4\)"),
        (
            "parallel.expert_placement=[0,1]",
            r"expert_placement \(\[0, 1\]\) names 2 experts, but moe\.num_experts is 4",
        ),
        ("parallel.expert_placement=[0,1,2,0]", r"puts expert 2 on rank 2, but the expert group has ranks 0 to 1"),
        ("parallel.expert_placement=[1,1,1,1]", r"gives ranks \[0\] no expert"),
        (
            "parallel.expert_placement=[0,1,1,1] engine.zero_stage=2",
            r"must give every rank equally many experts with engine\.zero_stage=2.*or engine\.zero_stage=1",
        ),
        (
            "moe.num_experts=5 engine.zero_stage=2",
            r"moe\.num_experts \(5\) must be divisible by parallel\.expert \(2\) with engine\.zero_stage=2.*choose 4 or 6",
        ),
    ],
)
def test_refusal_names_path_value_rule_and_way_out(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings)
    assert re.search(message, str(caught.value))
    assert all("; " in line for line in str(caught.value).splitlines()[1:])


@pytest.mark.parametrize(
    "settings",
    [
        "dispatch.capacity_factor=1.25",
        "dispatch.capacity_factor=1 dispatch.drop_policy=random dispatch.capacity_scope=local dispatch.min_capacity=4",
        "dispatch.max_rows_per_rank=100 dispatch.drop_policy=position dispatch.mode=all_gather",
        STATIC,
        "parallel.ranks_per_node=1 dispatch.mode=two_hop dispatch.chunks=4",
        "parallel.ranks_per_node=8",
        "parallel.expert_placement=[1,0,0,1]",
        "parallel.expert_placement=[0,1,1,1]",
        "moe.num_experts=5 engine.zero_stage=0",
        "moe.num_experts=5 engine.zero_stage=2 engine.kind=torch",
        "dispatch.check=true",
    ],
)
def test_what_works_is_allowed(settings: str) -> None:
    assert validate(load(settings)) == []


def test_192_experts_on_seven_ranks_are_allowed() -> None:
    settings = "moe.num_experts=192 parallel.nproc=7 parallel.expert=7 trainer.batch_size=14"
    assert validate(load(settings)) == []
    with pytest.raises(ConfigError, match=r"moe\.num_experts \(192\) must be divisible by parallel\.expert \(7\)"):
        load(f"{settings} engine.zero_stage=2")
