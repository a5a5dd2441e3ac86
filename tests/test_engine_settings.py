"""Settings of the engine: what is refused, with its way out, and what is allowed."""

import re

import pytest

from moe.config import ConfigError, load_config


def load(settings: str) -> None:
    """tiny runs DeepSpeed at ZeRO-1 on 2 processes."""
    load_config(settings.split(" "), "tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("engine.offload_adam=deepspeed", r"engine\.offload_adam \(deepspeed\) has no effect with .*; set"),
        ("engine.offload_optimizer=cpu", r"must be none with engine\.zero_stage=1: stages 2 and 3 alone.*; set"),
        ("engine.offload_optimizer=cpu engine.kind=torch", r"must be none with engine\.kind=torch; set"),
        ("engine.offload_optimizer=nvme engine.zero_stage=3", r"engine\.offload_optimizer \(nvme\)"),
    ],
)
def test_refusal_has_a_way_out(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(settings)
    assert re.search(message, str(refused.value)), refused.value


@pytest.mark.parametrize(
    "settings",
    [
        "engine.zero_stage=3",
        "engine.zero_stage=2 engine.offload_optimizer=cpu",
        "engine.zero_stage=3 engine.offload_optimizer=cpu engine.offload_adam=deepspeed",
        "engine.zero_stage=3 parallel.expert_placement=[0,1,1,1]",
    ],
)
def test_what_goes_together(settings: str) -> None:
    load(settings)
