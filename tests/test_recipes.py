"""Whole runs through the command line: every recipe, every launcher at hand, a stop on request and its resume."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.compare_routers import run_folder

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml"))
# Small enough for seconds, the same parts: any recipe must still run so.
SHRUNK = [
    "model.vocab_size=512", "model.hidden_size=64", "model.intermediate_size=96", "moe.moe_intermediate_size=32",
    "data.seq_len=32", "data.sources=[topics]", "trainer.batch_size=8", "trainer.eval_batches=1",
    "trainer.sample_tokens=4", "trainer.max_steps=3",
]  # fmt: skip


def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without a launcher's variables; the data cache is shared between these tests only."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR")
    }
    return kept | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The objects of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check(done: subprocess.CompletedProcess[str], run_dir: Path, steps: int = 3) -> list[dict[str, float]]:
    """The run ended well, and left what a run folder must hold."""
    assert done.returncode == 0, done.stdout + done.stderr
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert {"lm_loss", "grad_norm", "lr", "tokens_per_second", "model_flops_per_second", "memory_bytes"} <= set(rows[0])
    for name in ("config.yaml", "env.json", "load/counts.bin", f"checkpoints/step-{steps:06d}/state.json"):
        assert (run_dir / name).exists(), name
    return rows


def switchyard(*arguments: str) -> list[str]:
    """The command line as a list of words."""
    return [sys.executable, "-m", "moe.cli", *arguments]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs(recipe: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = subprocess.run(
        switchyard("run", recipe, *SHRUNK, f"run.dir={tmp_path / 'run'}"),
        cwd=ROOT, env=environment(tmp_path_factory), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    check(done, tmp_path / "run")
    assert f"next: switchyard report {tmp_path / 'run'}" in done.stdout
    assert "held-out loss topics" in done.stdout
    report = subprocess.run(
        switchyard("report", str(tmp_path / "run"), "--json"), cwd=ROOT, capture_output=True, text=True
    )
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["summary"]["steps"] == 3


def test_ranks_per_node_come_from_the_launcher(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two ranks whose launcher says one a machine: all that is exchanged crosses nodes, and auto measures its links."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            switchyard("run", "tiny", *SHRUNK, f"run.dir={tmp_path / 'run'}"),
            cwd=ROOT,
            env=environment(tmp_path_factory)
            | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "XDG_CACHE_HOME": str(tmp_path / f"cache-{rank}")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    rows = steps_of(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["dispatch_bytes_across"] > 0 and row["dispatch_bytes_node"] == 0 for row in rows)


def test_routers_are_compared_in_one_table(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two variants of two seeds, a row each with every column; finished runs are taken up again, but not for other steps."""
    command = [sys.executable, "-m", "recipes.compare_routers", "--steps", "3", "--folder", str(tmp_path / "runs")]
    command += ["--seeds", "2"]
    command += ["--output", str(tmp_path / "table.md"), "--only", "softmax, sequence", "hash", "--"]
    command += [setting for setting in SHRUNK if "max_steps" not in setting]
    times = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, env=environment(tmp_path_factory), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        times.append(sorted(path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")))
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| softmax, sequence", "| hash"]
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert all(" ±" in cell for line in lines[2:4] for cell in line.split(" | ")[1:3])
    assert len(times[0]) == 4
    assert times[0] == times[1]
    assert run_folder(tmp_path, "hash", 0, ["a=1"]) != run_folder(tmp_path, "hash", 0, ["a=2"])


def test_torchrun_gives_the_same_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`torchrun -m recipes.pretrain` and `switchyard run` are the same to the last bit of every loss."""
    env = environment(tmp_path_factory)
    losses = []
    for name, command in (
        ("ours", switchyard("run", "tiny")),
        (
            "torchrun",
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "recipes.pretrain", "tiny"],
        ),
    ):  # fmt: skip
        run_dir = tmp_path / name
        done = subprocess.run(
            [*command, *SHRUNK, f"run.dir={run_dir}"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        losses.append([(row["lm_loss"], row["grad_norm"]) for row in check(done, run_dir)])
    assert losses[0] == losses[1]


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGTERM: the step is finished, a checkpoint written, exit 75, no process left; started again, the losses are those
    of a run that was never stopped."""
    env = environment(tmp_path_factory)
    settings = [*SHRUNK, "trainer.max_steps=40", "trainer.sample_tokens=0", "trainer.eval_batches=0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = subprocess.run(
        switchyard("run", "tiny", *settings, f"run.dir={whole}"),
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    expected = check(done, whole, 40)

    command = switchyard("run", "tiny", *settings, f"run.dir={parts}")
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (parts / "metrics.jsonl").exists() or len((parts / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    (pointer,) = (parts / "checkpoints" / "latest").read_text().split()
    stopped_at = int(pointer.removeprefix("step-"))
    assert 3 <= stopped_at < 40
    assert re.search(rf"stopped after step {stopped_at} of 40", output)
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(parts) not in listing

    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    found = check(done, parts, 40)
    for field in ("lm_loss", "grad_norm", "lr", "balance_loss"):
        assert [row[field] for row in found] == [row[field] for row in expected], field


def test_two_hops_in_chunks_give_the_loss_curve_of_the_default(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The exchange never changes the mathematics: losses and gradient norms within 1e-5, two ranks that are two nodes."""
    env = environment(tmp_path_factory)
    curves = []
    for name, settings in (
        ("default", []),
        ("two-hop", ["dispatch.mode=two_hop", "dispatch.chunks=4", "parallel.ranks_per_node=1"]),
    ):
        done = subprocess.run(
            switchyard("run", "tiny", *SHRUNK, "engine.dtype=fp32", *settings, f"run.dir={tmp_path / name}"),
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        curves.append([(row["lm_loss"], row["grad_norm"]) for row in check(done, tmp_path / name)])
    assert len(curves[0]) == len(curves[1]) == 3
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
