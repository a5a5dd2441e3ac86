"""Settings of the step guard that would have no effect, or could not be followed."""

import re

import pytest

from moe.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["guard.max_in_row=5"], r"guard\.max_in_row \(5\) has no effect with guard\.policy=stop"),
        (["guard.window=50"], r"guard\.window \(50\) has no effect with guard\.z_score=0"),
        (["guard.policy=skip", "guard.max_in_row=0"], r"guard\.max_in_row \(0\) must be at least 1"),
        (["guard.z_score=-1"], r"guard\.z_score \(-1\.0\) must not be negative"),
        (["guard.z_score=6", "guard.window=10"], r"guard\.window \(10\) must be at least 20"),
        (
            ["guard.policy=roll_back", "trainer.save_every=0"],
            r"guard\.policy \(roll_back\) needs a checkpoint to go back to",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings, "tiny")
    assert re.search(message, str(caught.value))


def test_policies_with_what_they_need_are_allowed() -> None:
    config = load_config(
        ["guard.policy=roll_back", "guard.max_in_row=5", "guard.z_score=6", "guard.window=50"], "quickstart"
    )
    assert config.guard.max_in_row == 5
