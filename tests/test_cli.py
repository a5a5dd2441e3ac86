"""The verbs, and the way of `run` from arguments to ranks. The recipe here is tests/launch_workers.py: no model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe.cli import main
from moe.config import from_resolved, load_config, to_yaml
from moe.errors import DataError, EnvironmentProblem, StopRun
from moe.inventory import TOPICS
from moe.launch import JobEnvironment
from moe.start import launch_or_join, make_run_dir, run_rank
from tests.launch_workers import obey, wait_until

ROOT = Path(__file__).resolve().parents[1]
JOB = JobEnvironment(
    rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="torchrun", master_addr="127.0.0.1", master_port=1
)


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher's variables, and a current folder of its own for runs/ and multirun/."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(("MASTER_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def recipe(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`switchyard run ARGS` of the stand-in recipe."""
    return subprocess.run(
        [sys.executable, "-m", "tests.launch_workers", *args],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- run: what is refused before any process starts


def test_bad_configuration_is_refused_within_two_seconds_with_all_problems(tmp_path: Path) -> None:
    """Wall time of a whole process; the best of three, for the machine may be busy with other things."""
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "moe.cli", "run", "quickstart", "moe.top_k=99", "optim.lr=nan", "moe.topk=1"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        seconds.append(time.monotonic() - started)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("switchyard: 3 problems in the configuration:\n  - ")
    assert min(seconds) < 2
    assert not (tmp_path / "runs").exists()


def test_run_folder_is_not_made_for_a_bad_configuration(tmp_path: Path) -> None:
    assert recipe("tiny", "moe.top_k=99").returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], r"RECIPE is missing; see switchyard ls recipes"),
        (["tiny", "--nproc=2"], r"unknown option --nproc=2; settings are written key=value"),
        (["tiny", "-x"], r"unknown option -x"),
        (["tiny", "--cfg", "all"], r"invalid choice: 'all'"),
    ],
)
def test_wrong_arguments_end_with_2(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_or_join(args, obey)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_resolved_configuration_without_a_supervisor_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_or_join(["--resolved", "config.yaml"], obey) == 6
    assert "--resolved is for ranks" in capsys.readouterr().err


def test_incomplete_launcher_variables_end_with_6(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert launch_or_join(["tiny"], obey) == 6
    assert "RANK set without" in capsys.readouterr().err


# --- run --cfg job


def test_cfg_job_prints_the_configuration_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "--cfg", "job", "optim.lr=1e-5", "moe.top_k=3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "saved.yaml").write_text(out, "utf-8")
    assert from_resolved(tmp_path / "saved.yaml") == load_config(["optim.lr=1e-5", "moe.top_k=3"], "tiny")


def test_help_shows_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "switchyard run quickstart moe.num_experts=16" in out
    assert "75 restart me" in out


# --- run: processes of our own


def test_run_makes_its_folder_starts_its_ranks_and_ends_with_0(tmp_path: Path) -> None:
    done = recipe("tiny", "optim.lr=1e-5", "trainer.max_steps=3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [run_dir] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", run_dir.name)
    assert (run_dir / "overrides.txt").read_text("utf-8") == "optim.lr=1e-5\ntrainer.max_steps=3\n"
    config = from_resolved(run_dir / "config.yaml")
    assert (config.run.dir, config.optim.lr, config.trainer.max_steps) == (f"runs/{run_dir.name}", 1e-5, 3)
    assert json.loads((run_dir / "metrics.jsonl").read_text("utf-8")) == {"step": 3, "lm_loss": 1e-5, "world_size": 2}
    assert (run_dir / "launcher").read_text("utf-8") == "switchyard"


def test_error_of_a_worker_is_printed_last_and_sets_the_exit_code() -> None:
    done = recipe("tiny", "trainer.sample_prompt=data", "run.dir=here")
    assert done.returncode == 3
    assert re.search(r"\Aswitchyard: rank [01] of 2 failed\n  crash record: here/crash/rank-[01]\.json\n", done.stderr)
    assert re.search(r"\n(  log: .*\n)?  DataError: no text\n\Z", done.stderr)


def test_output_that_cannot_be_written_is_said_without_a_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moe.cli", "ls"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 6
    assert done.stderr.startswith("switchyard: [Errno 28]")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_stopped_run_ends_with_75_and_says_how_to_go_on() -> None:
    done = recipe("tiny", "trainer.sample_prompt=stop", "run.dir=a b")
    assert done.returncode == 75
    assert done.stderr.endswith("go on with: switchyard run tiny trainer.sample_prompt=stop 'run.dir=a b'\n")


def test_sigterm_before_training_stops_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch_workers", "tiny", "trainer.sample_prompt=wait", "run.dir=here"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list((tmp_path / "here").glob("waiting-*"))) == 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75
    assert "SIGTERM: stopped outside of the training loop" in err
    assert not (tmp_path / "here" / "crash").exists()


def test_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch_workers", "tiny", "trainer.sample_prompt=wait", "run.dir=here"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list((tmp_path / "here").glob("waiting-*"))) == 2)
        saved = (tmp_path / "here" / "config.yaml").read_text("utf-8")
        done = recipe("tiny", "moe.top_k=1", "moe.normalize_topk=false", "run.dir=here")
        assert done.returncode == 6
        assert re.search(r"run\.dir \(here\) is in use by another run", done.stderr)
        assert (tmp_path / "here" / "config.yaml").read_text("utf-8") == saved
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_going_on_keeps_the_configuration_of_the_first_start(tmp_path: Path) -> None:
    config = load_config(["run.dir=here"], "tiny")
    make_run_dir(config, ["run.dir=here"])
    make_run_dir(config, ["run.dir=here"])
    assert not list(tmp_path.glob("here/config.until-*.yaml"))
    config.optim.lr = 0.5
    make_run_dir(config)
    [earlier] = tmp_path.glob("here/config.until-*.yaml")
    assert (from_resolved(earlier).optim.lr, from_resolved(tmp_path / "here" / "config.yaml").optim.lr) == (3e-3, 0.5)


def test_runs_of_the_same_second_get_folders_of_their_own() -> None:
    config = load_config([], "tiny")
    assert len({make_run_dir(config) for _ in range(5)}) == 5


def test_run_folder_that_cannot_be_made_is_an_environment_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"run\.dir \(file/x\) cannot be written \(Not a directory\)"):
        make_run_dir(load_config(["run.dir=file/x"], "tiny"))


# --- run: one rank of a launcher's job


def under_launcher(rank: int, world_size: int) -> dict[str, str]:
    size = str(world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def test_under_a_launcher_the_launchers_count_holds(tmp_path: Path) -> None:
    done = recipe("tiny", "--local_rank=0", "run.dir=here", **under_launcher(0, 4))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "here" / "metrics.jsonl").read_text("utf-8"))["world_size"] == 4
    assert from_resolved(tmp_path / "here" / "config.yaml").parallel.nproc == 4
    assert (tmp_path / "here" / "launcher").read_text("utf-8") == "torchrun"


def test_rules_are_checked_against_the_launchers_count() -> None:
    done = recipe("tiny", **under_launcher(0, 3))
    assert done.returncode == 2
    assert "parallel.nproc (3)" in done.stderr
    silent = recipe("tiny", **under_launcher(1, 3))
    assert (silent.returncode, silent.stderr) == (2, "")


def test_only_rank_0_makes_a_folder_under_a_launcher(tmp_path: Path) -> None:
    assert recipe("tiny", **under_launcher(1, 2)).returncode == 0
    assert not (tmp_path / "runs").exists()


def test_failing_rank_under_a_launcher_prints_its_traceback_and_leaves_a_record(tmp_path: Path) -> None:
    done = recipe("tiny", "trainer.sample_prompt=data", "run.dir=here", **under_launcher(1, 2))
    assert done.returncode == 3
    assert "rank 1 of 2 failed" in done.stderr
    assert done.stderr.endswith("DataError: no text\n")
    assert json.loads((tmp_path / "here" / "crash" / "rank-1.json").read_text("utf-8"))["exit_code"] == 3


def test_sweep_under_a_launcher_is_refused() -> None:
    done = recipe("tiny", "-m", "optim.lr=1,2", **under_launcher(0, 2))
    assert done.returncode == 2
    assert "-m cannot be used under a launcher (torchrun)" in done.stderr


# --- run_rank


def test_run_rank_hands_on_what_the_worker_returns() -> None:
    assert run_rank(lambda config, job, run_dir: 0, load_config([], "tiny"), JOB, None) == 0


def test_run_rank_turns_errors_into_codes_and_restores_signal_handlers(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = load_config([], "tiny")

    def worker(error: BaseException) -> int:
        def raise_it(*_: object) -> int:
            raise error

        return run_rank(raise_it, config, JOB, tmp_path)

    assert [
        worker(error) for error in (DataError("x"), StopRun("x"), SystemExit(4), SystemExit(), ValueError("x"))
    ] == [
        3,
        75,
        4,
        0,
        1,
    ]
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads((tmp_path / "crash" / "rank-0.json").read_text("utf-8"))["type"] == "ValueError"


# --- sweeps


def test_sweep_runs_every_combination_and_ends_with_a_table(tmp_path: Path) -> None:
    """A41: 1E-4 arrives as a float in each run."""
    done = recipe("tiny", "-m", "optim.lr=1E-4,3e-3", "moe.top_k=3,4", "run.dir=sweep")
    assert done.returncode == 0
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text("utf-8"))
    assert [row["overrides"] for row in rows] == [
        ["optim.lr=0.0001", "moe.top_k=3"],
        ["optim.lr=0.0001", "moe.top_k=4"],
        ["optim.lr=0.003", "moe.top_k=3"],
        ["optim.lr=0.003", "moe.top_k=4"],
    ]
    assert [row["lm_loss"] for row in rows] == [1e-4, 1e-4, 3e-3, 3e-3]
    for index, row in enumerate(rows):
        config = from_resolved(tmp_path / "sweep" / str(index) / "config.yaml")
        assert config.run.dir == row["run"] == f"sweep/{index}"
        assert type(config.optim.lr) is float
    assert re.search(r"sweep/3 .* 0\.0030", done.stdout)


def test_sweep_goes_on_after_a_failure_and_ends_with_its_code(tmp_path: Path) -> None:
    done = recipe("tiny", "-m", "trainer.sample_prompt=data,good")
    assert done.returncode == 3
    [folder] = (tmp_path / "multirun").iterdir()
    rows = json.loads((folder / "sweep.json").read_text("utf-8"))
    assert [row["exit_code"] for row in rows] == [3, 0]


def test_sweep_is_validated_as_a_whole_first(tmp_path: Path) -> None:
    done = recipe("tiny", "-m", "moe.top_k=2,98,99")
    assert done.returncode == 2
    assert "2 problems" in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- the other verbs


def test_ls_lists_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    out = capsys.readouterr().out
    for part in ("quickstart", "backend=npu", "moe=bias_balanced", "stdlib", "dispatch.mode=all_to_all"):
        assert part in out
    assert "backend.ops.grouped_gemm=reference" in out


@pytest.mark.parametrize("topic", TOPICS)
def test_everything_listed_that_reads_as_a_setting_is_accepted(topic: str) -> None:
    names = [name for name, _ in TOPICS[topic]()]
    assert names
    for name in names:
        if "=" in name:
            load_config([name, *(["parallel.expert=1"] if name.endswith("mode=local") else [])], "tiny")


def test_doctor_names_devices_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    backends = {row["name"]: row["why_not"] for row in facts["backends"]}
    assert backends["cpu"] is None
    assert set(backends) == {"cuda", "npu", "cpu"}
    assert all(reason is None or reason for reason in backends.values())
    assert {"grouped_gemm=reference", "grouped_gemm=torch_native"} <= {row["name"] for row in facts["ops"]}
    assert facts["versions"]["torch"]
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    assert main(["doctor"]) == 0
    assert "grouped_gemm=reference" in capsys.readouterr().out


def test_report_of_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 3
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["foo"], ["ls", "nonsense"], ["report"]])
def test_wrong_verbs_end_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: switchyard" in capsys.readouterr().err


def test_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m moe.cli run tiny --cfg job | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("recipe: tiny\n", "")


def test_saved_configuration_is_the_one_that_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(["run.dir=here"], "quickstart")
    make_run_dir(config)
    assert (tmp_path / "here" / "config.yaml").read_text("utf-8") == to_yaml(config)


def test_cfg_job_of_a_sweep_prints_every_configuration_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny", "-m", "--cfg", "job", "optim.lr=1e-3,3e-3"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("---")] == [
        "--- # optim.lr=0.001",
        "--- # optim.lr=0.003",
    ]
    assert list(tmp_path.iterdir()) == []


def test_refused_start_leaves_the_settings_of_the_run_as_they_were(tmp_path: Path) -> None:
    """A start that ends with bad data or a bad checkpoint has changed nothing, so config.yaml must not say it has."""
    make_run_dir(load_config(["run.dir=here", "optim.lr=0.5"], "tiny"), ["optim.lr=0.5"])
    before = {path.name: path.read_text("utf-8") for path in (tmp_path / "here").glob("*.*")}
    assert recipe("tiny", "trainer.sample_prompt=data", "run.dir=here").returncode == 3
    after = {path.name: path.read_text("utf-8") for path in (tmp_path / "here").glob("*.*") if path.name in before}
    assert after == before
    assert not list(tmp_path.glob("here/config.until-*.yaml"))
