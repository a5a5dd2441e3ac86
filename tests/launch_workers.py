"""What ranks do in the tests of the launcher: plain processes that fail, hang, stop or die as told. Free of torch.

`python -m tests.launch_workers HOW RUN_DIR` is one rank. `python -m tests.launch_workers RECIPE ...`, with arguments as of
`switchyard run`, stands in for a recipe script; its worker obeys trainer.sample_prompt.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moe.crash import exit_code_of, record_crash
from moe.errors import DataError, StopRun, note_step
from moe.launch import STOPPED_OUTSIDE_OF_TRAINING, JobEnvironment, die_with_parent
from moe.schema import RunConfig
from moe.start import launch_or_join

HOW = ("environment", "stop", "early", "fail", "echo-first", "exit-3", "killed", "segfault", "hang")
RANK = int(os.environ.get("RANK", "0"))


def write_pid(run_dir: Path) -> None:
    """Leave rank and pid behind, so that the test can look whether the process is gone."""
    temporary = run_dir / f".pid-{RANK}"
    temporary.write_text(str(os.getpid()), "ascii")
    temporary.replace(run_dir / f"pid-{RANK}")


def wait_for_pids(run_dir: Path) -> None:
    """Until every rank is up, so that no test depends on who starts first."""
    wait_until(lambda: len(list(run_dir.glob("pid-[0-9]"))) == int(os.environ["WORLD_SIZE"]))


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def fail(run_dir: Path, error: Exception, step: int | None = None) -> None:
    """End as a rank does that failed."""
    try:
        raise error
    except Exception as caught:
        if step is not None:
            note_step(caught, step)
        record_crash(run_dir, RANK, None, caught)
        os._exit(exit_code_of(caught))


def stop_on_sigterm(run_dir: Path) -> None:
    """Finish the step and leave with 75, as the trainer does."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    write_pid(run_dir)
    wait_until(lambda: asked)
    (run_dir / f"saved-{RANK}").touch()
    sys.exit(75)


def act(how: str, run_dir: Path) -> None:
    """One rank."""
    die_with_parent(os.environ)
    if how == "environment":
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
        )
        facts = {name: os.environ[name] for name in names}
        facts |= {"tty": os.isatty(1), "leader": os.getpid() == os.getsid(0)}
        (run_dir / f"facts-{RANK}.json").write_text(json.dumps(facts), "utf-8")
        print(f"rank {RANK} was here")
        return
    if how == "stop":
        return stop_on_sigterm(run_dir)
    if how == "early":
        # Rank 0 waits in a collective, deaf to the signal; rank 1 has not come so far.
        leave = signal.SIG_IGN if RANK == 0 else lambda number, frame: os._exit(STOPPED_OUTSIDE_OF_TRAINING)
        signal.signal(signal.SIGTERM, leave)
    write_pid(run_dir)
    wait_for_pids(run_dir)
    if how == "echo-first" and RANK == 0:
        fail(run_dir, RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4242"))
    if RANK == 1:
        if how in ("fail", "killed"):
            wait_until((run_dir / "pid-child").exists)
        if how == "fail":
            fail(run_dir, DataError("token id 5000 must be below 4096"), step=17)
        if how == "echo-first":
            time.sleep(0.3)
            fail(run_dir, ValueError("the true cause"), step=3)
        if how == "exit-3":
            print("last words", file=sys.stderr)
            sys.exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
    if how in ("fail", "killed") and RANK == 0:
        # Deaf, and with a child: both must be gone in the end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "300"])
        (run_dir / ".child").write_text(str(child.pid), "ascii")
        (run_dir / ".child").rename(run_dir / "pid-child")
    if how == "killed" and RANK == 0:
        time.sleep(0.1)
        fail(run_dir, ConnectionResetError("Connection reset by peer"))
    time.sleep(300)


def obey(config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> int:
    """The worker of a recipe, without a model."""
    assert run_dir is not None or job.rank > 0
    if config.trainer.sample_prompt == "data":
        raise DataError("no text")
    if config.trainer.sample_prompt == "stop":
        raise StopRun("asked to stop")
    if config.trainer.sample_prompt == "wait":
        (Path(str(config.run.dir)) / f"waiting-{job.rank}").touch()
        time.sleep(300)
    if run_dir is not None and job.rank == 0:
        line = {"step": config.trainer.max_steps, "lm_loss": config.optim.lr, "world_size": job.world_size}
        (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
        (run_dir / "launcher").write_text(job.launcher, "utf-8")
    return 0


def main(args: list[str]) -> int:
    """See the module's docstring."""
    if len(args) == 2 and args[0] in HOW:
        act(args[0], Path(args[1]))
        return 0
    return launch_or_join(args, obey, module="tests.launch_workers")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
