"""`switchyard run` on two simulated NPUs: the losses of the CPU run, step by step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 3
RELATIVE_TOLERANCE = 1e-6
"""fp32; both compute with the CPU's kernels, but HCCL's sums and gloo's may associate otherwise."""
ENGINES = {
    "torch": ["engine.kind=torch"],
    "zero0": ["engine.kind=deepspeed", "engine.zero_stage=0"],
    "zero1": ["engine.kind=deepspeed", "engine.zero_stage=1"],
    "zero2": ["engine.kind=deepspeed", "engine.zero_stage=2"],
    "zero3": ["engine.kind=deepspeed", "engine.zero_stage=3"],
}


def losses(folder: Path, *overrides: str, **environ: str) -> list[float]:
    """Train the recipe `tiny` in a run folder; the loss of every step."""
    command = [sys.executable, "-m", "moe.cli", "run", "tiny", f"trainer.max_steps={STEPS}", f"run.dir={folder}"]
    done = subprocess.run(
        [*command, "trainer.sample_tokens=0", *overrides],
        env={**os.environ, "SIM_HCCL_FOLDER": str(folder.parent), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if row.get("lm_loss") is not None]


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(tmp_path_factory.mktemp("cpu") / "run", "backend=cpu", "engine.kind=torch")
    assert len(found) == STEPS
    assert found[0] > found[-1]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_equal_the_cpus(engine: str, cpu_losses: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "run", "backend=npu", *ENGINES[engine])
    assert found == pytest.approx(cpu_losses, rel=RELATIVE_TOLERANCE, abs=0)


LATE = {
    "plain engine": ["engine.kind=torch"],
    "stage 0": ["engine.kind=deepspeed", "engine.zero_stage=0"],
}
"""From stage 1 on the simulator itself stands in the way: a rank that waits on the host, for another's work on a checkpoint,
never comes to its own part of a collective that a device would go on with."""


@pytest.mark.parametrize("settings", LATE)
def test_losses_stay_when_collectives_come_as_late_as_they_may(
    settings: str, cpu_losses: list[float], tmp_path: Path
) -> None:
    """A wait that is missing anywhere between batch and optimizer step would bring NaN into the loss."""
    overrides = ["backend=npu", *LATE[settings]]
    found = losses(tmp_path / "run", *overrides, SIM_LAZY_COLLECTIVES="1")
    assert found == pytest.approx(cpu_losses, rel=RELATIVE_TOLERANCE, abs=0)
