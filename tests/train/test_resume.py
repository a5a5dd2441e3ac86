"""What a resume may change, and what it must refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe.errors import CheckpointError
from moe.schema import RunConfig
from moe.train.checkpoint.manifest import settings_of
from moe.train.resume import THE_MODEL, check_settings

CONFIG = RunConfig(recipe="mine")


def check(changed: RunConfig) -> list[str]:
    """Hold a changed configuration against CONFIG; returns what is said."""
    said: list[str] = []
    check_settings(Path("step-5"), settings_of(CONFIG), settings_of(changed), said.append)
    return said


def test_another_model_is_refused_even_if_its_shapes_fit() -> None:
    """rope_theta and top_k leave every shape as it is; going on with them would train another model without a word."""
    changed = replace(CONFIG, model=replace(CONFIG.model, rope_theta=500.0), moe=replace(CONFIG.moe, top_k=1))
    with pytest.raises(
        CheckpointError, match=r"rope_theta was 10000\.0, is 500\.0; moe\.top_k was 2, is 1; restore these"
    ):
        check(changed)


def test_other_changes_are_said_and_the_free_ones_are_not() -> None:
    changed = replace(
        CONFIG,
        optim=replace(CONFIG.optim, lr=0.5),
        trainer=replace(CONFIG.trainer, max_steps=7),
        run=replace(CONFIG.run, dir="elsewhere"),
    )
    assert check(changed) == ["settings changed since the checkpoint: optim.lr was 0.003, is 0.5"]
    assert check(CONFIG) == []


def test_the_settings_of_the_model_exist() -> None:
    """A renamed setting must not slip out of the list."""
    for section, names in THE_MODEL.items():
        assert set(names) <= set(settings_of(CONFIG)[section])
