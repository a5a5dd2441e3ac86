"""`switchyard run` on two simulated NPUs over HCCL, through the launcher: the losses of the CPU run, step by step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RELATIVE_TOLERANCE = 1e-5
"""fp32; both compute with the CPU's kernels, but HCCL's sums and gloo's associate otherwise, and 20 steps follow each other."""
ENGINES = {
    "plain engine": ["engine.kind=torch"],
    "stage 0": ["engine.kind=deepspeed", "engine.zero_stage=0"],
    "stage 1": ["engine.kind=deepspeed", "engine.zero_stage=1"],
    "stage 2": ["engine.kind=deepspeed", "engine.zero_stage=2"],
    "stage 3": ["engine.kind=deepspeed", "engine.zero_stage=3"],
}
QUICKSTART = [
    "quickstart", "trainer.max_steps=20", "engine.dtype=fp32", "model.vocab_size=512", "model.hidden_size=64",
    "model.num_layers=2", "model.intermediate_size=96", "moe.moe_intermediate_size=32", "data.seq_len=64",
    "data.sources=[topics]", "trainer.batch_size=8", "trainer.eval_batches=1",
]  # fmt: skip
"""The demo's recipe, shrunk to seconds; fp32 instead of bf16, so that what differs is not rounding."""
TINY = ["tiny", "trainer.max_steps=3"]


def losses(folder: Path, *arguments: str, **environ: str) -> list[float]:
    """Train in a run folder, two ranks; the loss of every step."""
    command = [sys.executable, "-m", "moe.cli", "run", *arguments, f"run.dir={folder}", "trainer.sample_tokens=0"]
    done = subprocess.run(
        command,
        env={**os.environ, "SIM_HCCL_FOLDER": str(folder.parent), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    backend = next(word.removeprefix("backend=") for word in arguments if word.startswith("backend="))
    assert f"layout: 2 ranks on {backend}" in done.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if row.get("lm_loss") is not None]


@pytest.fixture(scope="module")
def quickstart_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(tmp_path_factory.mktemp("cpu") / "run", *QUICKSTART, "backend=cpu", *ENGINES["plain engine"])
    assert len(found) == 20
    assert found[0] > found[-1] + 0.5
    return found


@pytest.fixture(scope="module")
def tiny_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(tmp_path_factory.mktemp("cpu") / "run", *TINY, "backend=cpu", *ENGINES["plain engine"])
    assert len(found) == 3
    assert found[0] > found[-1]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_quickstart_has_the_losses_of_the_cpu(engine: str, quickstart_losses: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "run", *QUICKSTART, "backend=npu", *ENGINES[engine])
    assert found == pytest.approx(quickstart_losses, rel=RELATIVE_TOLERANCE, abs=0)


OVERLAPPED = ["stage 2", "stage 3"]
"""With a stream of DeepSpeed's own for the reductions (stage 2) or the gathers (stage 3) as well."""


@pytest.mark.parametrize(
    ("engine", "overlap"), [*((name, False) for name in ENGINES), *((name, True) for name in OVERLAPPED)]
)
def test_losses_stay_when_collectives_come_as_late_as_they_may(
    engine: str, overlap: bool, tiny_losses: list[float], tmp_path: Path
) -> None:
    """A wait that is missing anywhere between batch and optimizer step would bring NaN into the loss."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"overlap_comm": overlap}}))
    settings = [*ENGINES[engine], *([f"engine.ds_config={file}"] if overlap else [])]
    found = losses(tmp_path / "run", *TINY, "backend=npu", *settings, SIM_LAZY_COLLECTIVES="1")
    assert found == pytest.approx(tiny_losses, rel=RELATIVE_TOLERANCE, abs=0)
