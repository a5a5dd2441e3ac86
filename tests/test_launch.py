"""Which rank am I; starting, watching and ending ranks; what a failure leaves. Ranks here are plain processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe.crash import exit_code_of, record_crash
from moe.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    ExitCode,
    NumericError,
    StopRun,
    SwitchyardError,
    note_step,
)
from moe.launch import SUPERVISOR_VARIABLE, expand_hosts, export, job_environment, usable_cores
from tests.launch_workers import wait_until

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),3",
    "SLURM_JOB_NODELIST": "node[03-04,7]",
}


# --- job_environment


def test_without_a_launcher_there_is_no_job() -> None:
    assert job_environment({"PATH": "/bin", "MASTER_ADDR": "x", "WORLD_SIZE": "4"}) is None


def test_torchrun_is_understood() -> None:
    job = job_environment(TORCHRUN)
    assert job is not None
    assert (job.rank, job.world_size, job.local_rank, job.local_world_size) == (5, 8, 1, 4)
    assert (job.launcher, job.master_addr, job.master_port) == ("torchrun", "node1", 29500)


def test_deepspeed_is_understood() -> None:
    job = job_environment(DEEPSPEED)
    assert job is not None
    assert (job.rank, job.local_world_size, job.launcher) == (1, 2, "deepspeed")


def test_slurm_is_understood_and_exported_for_torch() -> None:
    job = job_environment(SLURM)
    assert job is not None
    assert (job.rank, job.world_size, job.local_rank, job.local_world_size, job.launcher) == (5, 7, 1, 3, "slurm")
    environ: dict[str, str] = {}
    export(environ, job)
    assert environ["MASTER_ADDR"] == "node03"
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("5", "7", "1")
    assert 20_000 <= int(environ["MASTER_PORT"]) < 40_000
    # Every rank finds the same port; another step of the same job another one.
    assert job_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == job.master_port  # type: ignore[union-attr]
    assert job_environment({**SLURM, "SLURM_STEP_ID": "1"}).master_port != job.master_port  # type: ignore[union-attr]


def test_torchrun_inside_slurm_wins() -> None:
    job = job_environment({**SLURM, **TORCHRUN})
    assert job is not None
    assert job.launcher == "torchrun"


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": None},  # an sbatch script
        {"SLURM_STEP_ID": "4294967291"},  # the batch step by number
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell of salloc
        {"SLURM_NTASKS": "1"},  # srun --pty bash
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": None},
    ],
)
def test_allocation_without_a_step_of_several_tasks_is_no_job(changed: dict[str, str | None]) -> None:
    """There `switchyard run` starts parallel.nproc processes, as on any machine."""
    environ = {name: value for name, value in {**SLURM, **changed}.items() if value is not None}
    assert job_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"RANK set without WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.*unset"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, r"set without LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "8"}, r"rank \(8\) must be below the number of ranks \(8\), as set by torchrun"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"local rank \(4\) must be below the ranks of this machine \(4\)"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, r"must be below the number of ranks \(8\)"),
        ({**TORCHRUN, "RANK": "one"}, r"RANK \(one\) must be a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, r"RANK \(-1\) must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, r"master port \(70000\) must be below 65536"),
        ({**SLURM, "SLURM_PROCID": "7"}, r"rank \(7\) must be below the number of ranks \(7\), as set by slurm"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, r"SLURM_TASKS_PER_NODE \(two\)"),
        ({**SLURM, "SLURM_NODEID": "3"}, r"SLURM_NODEID \(3\) must be below the 3 nodes"),
        ({**SLURM, "SLURM_JOB_NODELIST": "node[03"}, r"SLURM_JOB_NODELIST \(node\[03\)"),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, r"SLURM_JOB_NODELIST \(\)"),
    ],
)
def test_contradicting_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=message) as caught:
        job_environment(environ)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[03-05,7]", "node03 node04 node05 node7"),
        ("a,b-2.cluster", "a b-2.cluster"),
        ("r[1-2]n[08-09],x", "r1n08 r1n09 r2n08 r2n09 x"),
        ("gpu[099-101]-ib", "gpu099-ib gpu100-ib gpu101-ib"),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: str) -> None:
    assert list(expand_hosts(text)) == hosts.split()


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a[", "a[1-]", "a[x]", "a b", "a[0-999999999]"])
def test_broken_host_list_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentProblem, match=r"node list|NODELIST"):
        list(expand_hosts(text))


# --- crash records and exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("x"), 3),
        (CheckpointError("x"), 4),
        (NumericError("x"), 5),
        (EnvironmentProblem("x"), 6),
        (StopRun("x"), 75),
        (SwitchyardError("x"), 1),
        (MemoryError(), 6),
        (OSError(28, "No space left on device"), 6),
        (RuntimeError("[gloo] Connection closed by peer"), 6),
        (RuntimeError("shapes differ"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_code_says_what_kind_of_error(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_exit_codes_are_those_of_the_documentation() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "done": 0,
        "unforeseen": 1,
        "bad_config": 2,
        "bad_data": 3,
        "bad_checkpoint": 4,
        "numeric_stop": 5,
        "environment": 6,
        "restart": 75,
    }


def test_crash_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    try:
        raise NumericError("loss is nan")
    except NumericError as error:
        note_step(error, 12)
        note_step(error, 99)  # a frame further out must not overwrite it
        path = record_crash(tmp_path, 3, None, error)
    record = json.loads(path.read_text("utf-8"))
    assert path == tmp_path / "crash" / "rank-3.json"
    assert (record["rank"], record["step"], record["type"], record["message"]) == (3, 12, "NumericError", "loss is nan")
    assert (record["exit_code"], record["pid"], record["communication"]) == (5, os.getpid(), False)
    assert "test_crash_record_holds_what_a_reader_needs" in record["traceback"]
    assert record["host"]
    assert abs(record["time"] - time.time()) < 60


def test_error_raised_from_a_lost_connection_counts_as_one(tmp_path: Path) -> None:
    error = RuntimeError("layer 3 failed")
    error.__cause__ = ConnectionResetError("Connection reset by peer")
    assert json.loads(record_crash(tmp_path, 0, 1, error).read_text("utf-8"))["communication"] is True


# --- run_local


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_", "SLURM"))
    }
    return {**kept, "PYTHONPATH": root}


def supervisor(how: str, run_dir: Path, environ: dict[str, str], nproc: int = 2) -> subprocess.Popen[str]:
    """A process that runs `run_local` over ranks that behave as told."""
    code = (
        "import os, sys; from pathlib import Path; from moe.launch import run_local\n"
        "how, folder, nproc = sys.argv[1:]\n"
        "command = [sys.executable, '-m', 'tests.launch_workers', how, folder]\n"
        "sys.exit(run_local(command, int(nproc), Path(folder), os.environ))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, how, str(run_dir), str(nproc)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(run_dir: Path) -> list[int]:
    return [int(path.read_text("ascii")) for path in run_dir.glob("pid-*")]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def finish(process: subprocess.Popen[str], run_dir: Path, within: float = 60.0) -> tuple[int, str, str]:
    """Exit code and output, after a look that no process is left."""
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    assert not [pid for pid in pids(run_dir) if alive(pid)]
    return process.returncode, out, err


def test_ranks_get_their_environment_and_their_logs(tmp_path: Path, environ: dict[str, str]) -> None:
    environ = {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    code, out, _ = finish(supervisor("environment", tmp_path, environ), tmp_path)
    assert code == 0
    assert out == "rank 0 was here\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text("utf-8") == "rank 1 was here\n"
    facts = [json.loads((tmp_path / f"facts-{rank}.json").read_text("utf-8")) for rank in range(2)]
    for rank, fact in enumerate(facts):
        assert (fact["RANK"], fact["LOCAL_RANK"], fact["WORLD_SIZE"], fact["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
            "2",
        )
        assert fact["MASTER_ADDR"] == "127.0.0.1"
        assert int(fact["OMP_NUM_THREADS"]) == max(1, usable_cores() // 2)
        assert fact["leader"]
    assert facts[0]["MASTER_PORT"] == facts[1]["MASTER_PORT"]


def test_terminal_stays_a_terminal_for_rank_0(tmp_path: Path, environ: dict[str, str]) -> None:
    terminal, other_end = os.openpty()
    code = (
        "import os, sys; from pathlib import Path; from moe.launch import run_local\n"
        f"sys.exit(run_local([sys.executable, '-m', 'tests.launch_workers', 'environment', {str(tmp_path)!r}], 2,"
        f" Path({str(tmp_path)!r}), os.environ))"
    )
    try:
        subprocess.run([sys.executable, "-c", code], env=environ, stdout=other_end, check=True, timeout=60)
        assert b"rank 0 was here" in os.read(terminal, 1000)
    finally:
        os.close(terminal)
        os.close(other_end)
    assert json.loads((tmp_path / "facts-0.json").read_text("utf-8"))["tty"]
    assert not json.loads((tmp_path / "facts-1.json").read_text("utf-8"))["tty"]


def test_failing_rank_ends_the_others_and_is_named_last(tmp_path: Path, environ: dict[str, str]) -> None:
    """Rank 0 is deaf to SIGTERM and has a child of its own: both are gone. What we foresaw comes without our code."""
    process = supervisor("fail", tmp_path, environ)
    code, _, err = finish(process, tmp_path)
    assert code == 3
    assert len(pids(tmp_path)) == 3
    assert re.search(
        r"switchyard: rank 1 of 2 failed at step 17\n"
        rf"  crash record: {re.escape(str(tmp_path))}/crash/rank-1\.json\n"
        rf"  log: {re.escape(str(tmp_path))}/logs/rank-1\.log\n"
        r"  DataError: token id 5000 must be below 4096\n\Z",
        err,
    )
    failed = json.loads((tmp_path / "crash" / "rank-1.json").read_text("utf-8"))["time"]
    assert time.time() - failed < 10


def test_lost_connection_is_not_taken_for_the_cause(tmp_path: Path, environ: dict[str, str]) -> None:
    """Rank 0 fails first, but only because rank 1 is failing. Nobody foresaw that, so the code is shown."""
    code, _, err = finish(supervisor("echo-first", tmp_path, environ), tmp_path)
    assert code == 1
    assert re.search(
        r"rank 1 of 2 failed at step 3\n(    .*\n)+(  (crash record|log): .*\n){2}  ValueError: the true cause\n\Z", err
    )
    assert "Connection closed" not in err


def test_rank_without_a_record_is_named_with_its_last_words(tmp_path: Path, environ: dict[str, str]) -> None:
    code, _, err = finish(supervisor("exit-3", tmp_path, environ), tmp_path)
    assert code == 3
    assert re.search(r"rank 1 of 2 ended with exit code 3 and left no crash record\n  last words\n  log: .*\n\Z", err)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"rank 1 of 2 was killed by SIGKILL; often the kernel's out-of-memory killer"),
        ("segfault", r"rank 1 of 2 was killed by SIGSEGV; a fault in native code"),
    ],
)
def test_death_by_signal_is_named(how: str, message: str, tmp_path: Path, environ: dict[str, str]) -> None:
    code, _, err = finish(supervisor(how, tmp_path, environ), tmp_path)
    assert code == 6
    assert re.search(message, err)
    assert "Connection reset" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_is_passed_on_and_ranks_save(number: int, tmp_path: Path, environ: dict[str, str]) -> None:
    # A signal that this process ignores, as under nohup, would be ignored by what it starts.
    former = signal.signal(number, signal.SIG_DFL)
    try:
        process = supervisor("stop", tmp_path, environ)
    finally:
        signal.signal(number, former)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(number)
    code, _, _ = finish(process, tmp_path)
    assert code == 75
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.parametrize(("ignored", "stops"), [(signal.SIGHUP, False), (signal.SIGINT, True)])
def test_nohup_is_respected_and_background_jobs_can_be_interrupted(
    ignored: int, stops: bool, tmp_path: Path, environ: dict[str, str]
) -> None:
    former = signal.signal(ignored, signal.SIG_IGN)
    try:
        process = supervisor("stop", tmp_path, environ)
    finally:
        signal.signal(ignored, former)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(ignored)
    if not stops:
        time.sleep(0.3)
        assert process.poll() is None
        assert not list(tmp_path.glob("saved-*"))
        process.send_signal(signal.SIGTERM)
    assert finish(process, tmp_path)[0] == 75


def test_two_signals_at_once_are_one_request(tmp_path: Path, environ: dict[str, str]) -> None:
    """coreutils' timeout signals the process and then its group."""
    process = supervisor("stop", tmp_path, environ)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert finish(process, tmp_path)[0] == 75


def test_second_ctrl_c_kills_ranks_that_hang(tmp_path: Path, environ: dict[str, str]) -> None:
    process = supervisor("fail", tmp_path, environ, nproc=1)  # rank 0 of "fail" does not listen
    wait_until(lambda: (tmp_path / "pid-child").exists())
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, tmp_path)
    assert code == 130
    assert "killed on request" in err


def test_rank_that_is_stopped_before_it_listens_is_no_failure(tmp_path: Path, environ: dict[str, str]) -> None:
    process = supervisor("hang", tmp_path, environ)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process, tmp_path)[0] == 75


def test_stop_of_a_single_rank_stops_the_run(tmp_path: Path, environ: dict[str, str]) -> None:
    process = supervisor("stop", tmp_path, environ)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    for pid in pids(tmp_path):
        os.kill(pid, signal.SIGTERM)
    assert finish(process, tmp_path)[0] == 75


def test_killed_supervisor_leaves_no_rank_behind(tmp_path: Path, environ: dict[str, str]) -> None:
    process = supervisor("hang", tmp_path, environ)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: not any(map(alive, pids(tmp_path))), 10)


def test_worker_whose_supervisor_is_gone_ends_at_once(tmp_path: Path, environ: dict[str, str]) -> None:
    lost = {**environ, SUPERVISOR_VARIABLE: "1", "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "tests.launch_workers", "hang", str(tmp_path)]
    assert subprocess.run(command, env=lost, timeout=30, check=False).returncode == 6
    assert not pids(tmp_path)


def test_old_crash_record_is_not_taken_for_a_new_one(tmp_path: Path, environ: dict[str, str]) -> None:
    record_crash(tmp_path, 1, 5, ValueError("of an earlier start"))
    _, _, err = finish(supervisor("exit-3", tmp_path, environ), tmp_path)
    assert "earlier start" not in err


def test_command_that_cannot_start_raises(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from moe.launch import run_local\n"
        f"run_local(['/nowhere/python'], 2, Path({str(tmp_path)!r}), os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "FileNotFoundError" in done.stderr


def test_stop_during_start_up_does_not_wait_for_a_rank_that_waits(tmp_path: Path, environ: dict[str, str]) -> None:
    """One rank is still importing and leaves at once, with nothing to save; the other already waits for it in a collective,
    where a signal is only noted. The job ends within seconds, with 75."""
    process = supervisor("early", tmp_path, environ)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, tmp_path)
    assert code == 75
    assert "SIGTERM: stopped outside of the training loop, with nothing to save" in err
    assert time.monotonic() - started < 30
