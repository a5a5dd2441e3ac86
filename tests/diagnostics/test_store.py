"""The store keeps one line a step through kills, resumes, torn writes and full disks."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.diagnostics.record import EvalRecord
from moe.diagnostics.store import (
    LoadLayout,
    MetricsStore,
    read_evaluations,
    read_load,
    read_load_layout,
    read_metrics,
    read_status,
)
from moe.errors import DataError, ExitCode
from tests.diagnostics.runs import LAYOUT, step_record, write_run

RECORD_BYTES = 8 + 2 * 8 * 4


def steps_of(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir)]


def test_steps_and_counts_come_back_as_written(tmp_path: Path) -> None:
    records = [step_record(step) for step in (1, 2, 3)]
    write_run(tmp_path, records)
    rows = read_metrics(tmp_path)
    assert [row["lm_loss"] for row in rows] == [record.lm_loss for record in records]
    steps, counts_NLE = read_load(tmp_path)
    assert steps.tolist() == [1, 2, 3]
    assert counts_NLE.dtype == np.int32
    for counts_LE, record in zip(counts_NLE, records, strict=True):
        assert record.tokens_per_expert_LE is not None
        assert np.array_equal(counts_LE, record.tokens_per_expert_LE)
        assert counts_LE.sum(axis=1).tolist() == [1024 * 2] * 2  # conservation: tokens · K
    assert read_load_layout(tmp_path) == LAYOUT


def test_every_line_is_one_strict_json_object(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(1, grad_norm=float("nan")), step_record(2)])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line, parse_constant=refuse)["step"] for line in lines] == [1, 2]
    assert np.isnan(read_metrics(tmp_path)[0]["grad_norm"])


def test_a_step_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    """A process that is killed right after loses nothing, and a reader need not wait."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from moe.diagnostics.store import MetricsStore; from tests.diagnostics.runs import LAYOUT, step_record\n"
        "store = MetricsStore("
        "    Path(sys.argv[1]), resume_step=None, max_steps=9, load_layout=LAYOUT, tensorboard=False)\n"
        "store.write_step(step_record(1)); store.write_step(step_record(2)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps_of(tmp_path) == [1, 2]
    assert read_load(tmp_path)[0].tolist() == [1, 2]
    assert read_status(tmp_path)["state"] == "running"


def test_resume_cuts_off_what_will_be_done_again(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in range(1, 8)], max_steps=10)
    again = [step_record(step, lm_loss=1.5) for step in range(6, 11)]
    write_run(tmp_path, again, max_steps=10, resume_step=5)
    assert steps_of(tmp_path) == list(range(1, 11))
    assert [row["lm_loss"] == 1.5 for row in read_metrics(tmp_path)] == [False] * 5 + [True] * 5
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 10
    assert read_load(tmp_path)[0].tolist() == list(range(1, 11))
    assert (tmp_path / "load" / "counts.bin").stat().st_size == 10 * RECORD_BYTES
    assert read_status(tmp_path) == {"state": "finished", "last_step": 10, "max_steps": 10}


def test_resume_twice_from_the_same_step(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in range(1, 5)], max_steps=10)
    for _ in range(2):
        write_run(tmp_path, [step_record(step) for step in (3, 4, 5)], max_steps=10, resume_step=2)
        assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_torn_tails_are_passed_over_by_readers_and_repaired_by_a_resume(tmp_path: Path, cut: int) -> None:
    write_run(tmp_path, [step_record(step) for step in (1, 2, 3)], max_steps=10)
    for name in ("metrics.jsonl", "load/counts.bin"):
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - cut)
    assert steps_of(tmp_path) == [1, 2]
    assert read_load(tmp_path)[0].tolist() == [1, 2]
    write_run(tmp_path, [step_record(3)], max_steps=10, resume_step=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert read_load(tmp_path)[0].tolist() == [1, 2, 3]


def test_blocks_of_zeros_after_a_power_cut_are_no_steps(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in (1, 2)], max_steps=10)
    for name in ("metrics.jsonl", "load/counts.bin"):
        with open(tmp_path / name, "ab") as file:
            file.write(bytes(2 * RECORD_BYTES))
    assert steps_of(tmp_path) == [1, 2]
    assert read_load(tmp_path)[0].tolist() == [1, 2]
    write_run(tmp_path, [step_record(3)], max_steps=10, resume_step=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert read_load(tmp_path)[0].tolist() == [1, 2, 3]


def test_a_resume_that_changes_nothing_leaves_the_file_alone(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in (1, 2)], max_steps=10)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    MetricsStore(tmp_path, resume_step=2, max_steps=10, load_layout=LAYOUT, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert not list(tmp_path.glob("*.tmp"))


def test_beginning_anew_moves_the_earlier_run_aside(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in (1, 2, 3)])
    write_run(tmp_path, [step_record(1)])
    write_run(tmp_path, [step_record(step) for step in (1, 2)])
    assert steps_of(tmp_path) == [1, 2]
    assert steps_of(tmp_path / "earlier" / "1") == [1, 2, 3]
    assert read_load(tmp_path / "earlier" / "2")[0].tolist() == [1]


def test_another_model_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(1)], max_steps=10)
    other = LoadLayout(layer_indices=(1, 2), num_experts=16, top_k=2)
    with pytest.raises(DataError, match=r"with 8 experts, the model has .* with 16; use another run.dir") as caught:
        MetricsStore(tmp_path, resume_step=1, max_steps=10, load_layout=other, tensorboard=False)
    assert caught.value.exit_code == ExitCode.bad_data == 3


def test_a_model_without_experts_has_no_load_folder(tmp_path: Path) -> None:
    record = step_record(1, tokens_per_expert_LE=np.zeros((0, 8), dtype=np.int64))
    write_run(tmp_path, [record], load_layout=None)
    assert not (tmp_path / "load").exists()
    with pytest.raises(DataError, match="no MoE layers"):
        read_load(tmp_path)


def test_a_full_disk_loses_records_but_stops_nothing(tmp_path: Path) -> None:
    """Writes fail half-way for step 2 and at once for step 3: no trace of them remains, and 4 is whole again."""
    said: list[str] = []
    store: Any = MetricsStore(
        tmp_path, resume_step=None, max_steps=4, load_layout=LAYOUT, tensorboard=False, say=said.append
    )

    class FullDisk:
        """The real file, with room for `room` more bytes."""

        def __init__(self, file: Any, room: int) -> None:
            self.file, self.room = file, room

        def write(self, data: memoryview) -> int:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = int(self.file.write(data[: self.room]))
            self.room -= written
            return written

        def truncate(self, size: int) -> int:
            return int(self.file.truncate(size))

    store.write_step(step_record(1))
    real = (store._metrics._file, store._counts._file)
    store._metrics._file, store._counts._file = FullDisk(real[0], 100), FullDisk(real[1], 30)
    store.write_step(step_record(2))
    store.write_step(step_record(3))
    store._metrics._file, store._counts._file = real
    store.write_step(step_record(4))
    store.close()
    assert steps_of(tmp_path) == [1, 4]
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 2
    assert read_load(tmp_path)[0].tolist() == [1, 4]
    assert len(said) == 2
    assert "No space left on device" in said[0]
    assert said[1].startswith("2 log records could not be written")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_the_system_s_own_full_device(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "eval.jsonl").symlink_to("/dev/full")
    store = MetricsStore(tmp_path, resume_step=None, max_steps=1, tensorboard=False, say=said.append)
    store.write_eval(EvalRecord(step=1, domain="code", lm_loss=2.0, num_tokens=7))
    store.write_step(step_record(1))
    store.close()
    assert steps_of(tmp_path) == [1]
    assert "No space left" in said[0]


def test_evaluations_are_kept_per_domain_and_cut_on_resume(tmp_path: Path) -> None:
    with MetricsStore(tmp_path, resume_step=None, max_steps=9, tensorboard=False) as store:
        for step in (2, 4):
            for domain, loss in (("code", 4.0), ("topics", 6.0)):
                store.write_eval(EvalRecord(step=step, domain=domain, lm_loss=loss - step, num_tokens=10))
    with MetricsStore(tmp_path, resume_step=2, max_steps=9, tensorboard=False) as store:
        store.write_eval(EvalRecord(step=3, domain="code", lm_loss=1.0, num_tokens=10))
    found = [(row["step"], row["domain"], row["lm_loss"]) for row in read_evaluations(tmp_path)]
    assert found == [(2, "code", 2.0), (2, "topics", 4.0), (3, "code", 1.0)]


def test_without_tensorboard_it_is_said_once_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    write_run(tmp_path / "asked", [step_record(1), step_record(2)], tensorboard=True, say=said.append)
    assert len(said) == 1
    assert "pip install tensorboard" in said[0]
    write_run(tmp_path / "auto", [step_record(1)], tensorboard=None, say=said.append)
    assert len(said) == 1


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, [step_record(1), step_record(2, grad_norm=float("inf"))], max_steps=9, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [e.step for e in events.Scalars("train/lm_loss")] == [1, 2]
    assert [e.step for e in events.Scalars("train/grad_norm")] == [1]
    assert [e.step for e in events.Scalars("max_vio/layer_2")] == [1, 2]


def test_reading_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        read_metrics(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no metrics.jsonl"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="has not done its first step"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lm_lo\nnot json\n[1]\n')
    with pytest.raises(DataError, match="has no readable line"):
        read_metrics(tmp_path)


def test_a_damaged_load_description_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(1)])
    meta = tmp_path / "load" / "meta.json"
    meta.write_text(meta.read_text()[:20])
    with pytest.raises(DataError, match=r"meta.json is damaged"):
        read_load(tmp_path)
    meta.write_text('{"format": 2}')
    with pytest.raises(DataError, match="format 2 is not known"):
        read_load(tmp_path)
