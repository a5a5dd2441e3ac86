"""Processes of a run: is this one rank of a job, or does it start and watch the ranks itself? Torch-free.

Stands between the configuration and the training loop on the data path.
"""

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from moe.crash import Ending, first_cause
from moe.errors import EnvironmentProblem, ExitCode

SUPERVISOR_VARIABLE = "SWITCHYARD_SUPERVISOR"
"""Process id of the supervisor, in the environment of the workers that `run_local` starts."""

POLL_SECONDS = 0.03
RECORD_GRACE_SECONDS = 2.0
"""How long ranks may still leave crash records after the first has failed."""
TERM_GRACE_SECONDS = 1.0
"""From SIGTERM to SIGKILL for the ranks that are left when one has failed."""
SAME_SIGNAL_SECONDS = 0.2
"""Signals nearer to the first than this are the same request."""
STOP_GRACE_SECONDS = 60.0
"""From the first rank that has stopped on request to the end of the others: they save together, so all are near."""

_SLURM_STEP_IDS_END = 0xFFFFFFF0
"""Slurm's numbers from here on name batch scripts and interactive shells: no step that srun has started."""
_PR_SET_PDEATHSIG = 1
STOPPED_OUTSIDE_OF_TRAINING = 79
"""What a rank of ours tells its supervisor, and nobody else: asked to stop, with nothing to save. Its peers, which may wait
for it in a collective, have nothing to save either."""
_ENDED_WELL = (int(ExitCode.done), int(ExitCode.restart))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """This process's place among the ranks of a job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    """switchyard (our own `run_local`), torchrun, deepspeed, slurm, or environment (variables set by something else)."""
    master_addr: str
    master_port: int


# --- one rank of a job?


def job_environment(environ: Mapping[str, str]) -> JobEnvironment | None:
    """What a launcher has set for this process, or None when there is none and we start processes ourselves.

    RANK, WORLD_SIZE and LOCAL_RANK (torchrun, deepspeed, `run_local`) come first: inside a Slurm allocation torchrun's
    say more. Slurm counts only inside a step that srun has started with more than one task. An sbatch script, an salloc
    shell or `srun --pty bash` also has SLURM_PROCID and SLURM_NTASKS, but is not one of the ranks; there we start
    parallel.nproc processes as on any machine.

    Raises EnvironmentProblem when the variables are incomplete or contradict each other.
    """
    if any(name in environ for name in ("RANK", "LOCAL_RANK")):
        return _checked(_from_ranks(environ))
    if _in_slurm_step(environ):
        return _checked(_from_slurm(environ))
    return None


def export(environ: MutableMapping[str, str], job: JobEnvironment) -> None:
    """Set what torch.distributed and deepspeed read, for launchers that speak otherwise."""
    environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(job.local_rank),
        LOCAL_WORLD_SIZE=str(job.local_world_size),
        MASTER_ADDR=job.master_addr,
        MASTER_PORT=str(job.master_port),
    )


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts of a Slurm node list, in order: n[03-05,7],x -> n03 n04 n05 n7 x.

    Raises EnvironmentProblem for anything else.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\])+(?:,(?:[^\[\],\s]|\[[0-9,-]+\])+)*", text):
        raise EnvironmentProblem(
            f"SLURM_JOB_NODELIST ({text}) must be a Slurm host list such as node[03-05,7]; unset it"
        )
    for pattern in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", pattern)
        # Texts and bracket contents take turns.
        choices = [list(_numbers(part)) if index % 2 else [part] for index, part in enumerate(parts)]
        yield from ("".join(choice) for choice in itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """03-05,7 -> 03 04 05 7, as wide as they were written."""
    for piece in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
        if match is None or int(match[2] or match[1]) - int(match[1]) > 100_000:
            raise EnvironmentProblem(
                f"[{ranges}] in the Slurm node list must hold ranges such as 03-05; unset the list"
            )
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))


def _from_ranks(environ: Mapping[str, str]) -> JobEnvironment:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        raise EnvironmentProblem(
            f"{', '.join(name for name in needed if name not in missing)} set without {', '.join(missing)}: a launcher "
            "must set all of them; start through torchrun or srun, or unset them so that parallel.nproc holds"
        )
    if SUPERVISOR_VARIABLE in environ:
        launcher = "switchyard"
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    else:
        launcher = "deepspeed" if "LOCAL_SIZE" in environ else "environment"
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE; with neither it is one machine.
    local = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), "WORLD_SIZE")
    return JobEnvironment(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, local),
        launcher=launcher,
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _SLURM_STEP_IDS_END:
        return False
    return environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")) != "1"


def _from_slurm(environ: Mapping[str, str]) -> JobEnvironment:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = next(
        (environ[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if name in environ),
        "",
    )
    master = environ.get("MASTER_ADDR") or next(expand_hosts(nodes))
    # Every rank must come to the same port without talking; steps of one job may run at the same time.
    job, step = (
        int(environ[name]) if environ.get(name, "").isdecimal() else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 20_000 + (31 * job + step) % 20_000
    return JobEnvironment(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, tasks),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_tasks_on_this_node(environ, _integer(environ, tasks)),
        launcher="slurm",
        master_addr=master,
        master_port=port,
    )


def _tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    """From SLURM_STEP_TASKS_PER_NODE such as 4(x2),3 and this node's number; all of them when Slurm does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world_size)
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d{1,6})\))?", piece)
        if match is None:
            raise EnvironmentProblem(f"SLURM_TASKS_PER_NODE ({text}) must look like 4(x2),3; unset it")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    if node >= len(counts):
        raise EnvironmentProblem(
            f"SLURM_NODEID ({node}) must be below the {len(counts)} nodes of {text}; start through srun"
        )
    return counts[node]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise EnvironmentProblem(f"{name} ({text}) must be a whole number; start through torchrun or srun, or unset it")
    return int(text)


def _checked(job: JobEnvironment) -> JobEnvironment:
    for name, value, limit_name, limit in (
        ("rank", job.rank, "the number of ranks", job.world_size),
        ("local rank", job.local_rank, "the ranks of this machine", job.local_world_size),
        ("number of ranks of this machine minus one", job.local_world_size - 1, "the number of ranks", job.world_size),
        ("master port", job.master_port, "65536", 65536),
    ):
        if value >= limit:
            raise EnvironmentProblem(
                f"{name} ({value}) must be below {limit_name} ({limit}), as set by {job.launcher}; unset the launcher's "
                "variables, or start again through it"
            )
    return job


# --- a worker's side


def die_with_parent(environ: MutableMapping[str, str]) -> None:
    """Have the kernel kill this worker when its supervisor dies, however it dies; nothing without a supervisor.

    Called first thing in a worker. A supervisor that died before this call is noticed too: ends the process with 6.
    """
    # Taken out: a process that the worker starts has another parent.
    supervisor = environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(supervisor):
        os._exit(int(ExitCode.environment))


# --- the supervisor's side


def run_local(command: Sequence[str], nproc: int, run_dir: Path, environ: Mapping[str, str]) -> int:
    """Run nproc copies of a command as the ranks of one job on this machine, and return the job's exit code.

    Rank 0 writes to this process's own output (a terminal stays a terminal), rank N to run_dir/logs/rank-N.log. When a
    rank fails, all others end within seconds and the first cause is printed last. SIGINT, SIGTERM and SIGHUP are passed on
    once as SIGTERM, and the ranks end by themselves; at the second one they are killed. No process is left behind.

    Call it from the main thread (signals, and the kernel's parent-death signal, are bound to it).
    """
    supervisor = _Supervisor(run_dir)
    with supervisor.signals_caught():
        try:
            supervisor.start(command, nproc, environ)
            return supervisor.watch()
        finally:
            supervisor.kill_all()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class _Worker:
    """One rank's process, which leads a process group of its own."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path | None) -> None:
        self.rank = rank
        self.log = log
        self.ending: Ending | None = None
        self._process = process

    def observe(self) -> None:
        """Notice an end. What the rank itself had started goes with it."""
        if self.ending is not None:
            return
        pid = self._process.pid
        # Look without reaping: until it is reaped, nobody else can have its process id, nor its group's.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.signal_group(signal.SIGKILL)
        returncode = self._process.wait()
        self.ending = Ending(rank=self.rank, pid=pid, returncode=returncode, time=time.time(), log=self.log)

    def signal(self, number: int) -> None:
        """Signal the rank alone."""
        if self.ending is None:
            self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Signal the rank and what it has started."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


class _Supervisor:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._workers: list[_Worker] = []
        self._signals: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def signals_caught(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._signals.append((number, time.monotonic()))

        former = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup's wish holds. An ignored SIGINT is only what shells give to jobs in the background: whoever sends one
            # to this process by hand means it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                former[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def start(self, command: Sequence[str], nproc: int, environ: Mapping[str, str]) -> None:
        common = {
            **environ,
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            SUPERVISOR_VARIABLE: str(os.getpid()),
        }
        common.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
        common.setdefault("PYTHONFAULTHANDLER", "1")
        common.setdefault("PYTHONUNBUFFERED", "1")
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for rank in range(nproc):
            log = logs / f"rank-{rank}.log" if rank else None
            with contextlib.ExitStack() as stack:
                output = stack.enter_context(log.open("ab")) if log else None
                # A session of its own: the terminal's Ctrl-C reaches the supervisor alone.
                process = subprocess.Popen(
                    command,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._workers.append(_Worker(rank, process, log))

    def watch(self) -> int:
        """Until every rank has ended; the job's exit code."""
        asked, first_stop = False, 0.0
        while True:
            running = self._observe()
            if running and (again := self._asked_again()):
                self.kill_all()
                self._say("killed on request; what was saved before is kept")
                return 128 + again
            if self._signals and not asked:
                asked = True
                self._say("stopping: the ranks finish their step and save; once more to kill them")
                for worker in running:
                    worker.signal(signal.SIGTERM)
            if any(
                worker.ending and worker.ending.returncode == STOPPED_OUTSIDE_OF_TRAINING for worker in self._workers
            ):
                self.kill_all()
                name = signal.Signals(self._signals[0][0]).name if self._signals else "a rank was asked to stop"
                self._say(f"{name}: stopped outside of the training loop, with nothing to save")
                return int(ExitCode.restart)
            if any(self._failed(worker, asked) for worker in self._workers):
                return self._failure(asked)
            if not running:
                stopped = any(worker.ending.returncode for worker in self._workers if worker.ending)
                return int(ExitCode.restart if stopped else ExitCode.done)
            if any(worker.ending and worker.ending.returncode for worker in self._workers):
                first_stop = first_stop or time.monotonic()
                if time.monotonic() - first_stop > STOP_GRACE_SECONDS:
                    ranks = ", ".join(str(worker.rank) for worker in running)
                    self._say(f"killing rank {ranks}, which did not stop with the others")
                    self.kill_all()
                    return int(ExitCode.restart)
            time.sleep(POLL_SECONDS)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for worker in self._workers:
            worker.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self._observe() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _observe(self) -> list[_Worker]:
        """The workers that still run."""
        for worker in self._workers:
            worker.observe()
        return [worker for worker in self._workers if worker.ending is None]

    def _failed(self, worker: _Worker, asked: bool) -> bool:
        if worker.ending is None or worker.ending.returncode in _ENDED_WELL:
            return False
        # A rank that was asked to stop before it could listen has nothing to save.
        return not (asked and worker.ending.returncode == -signal.SIGTERM)

    def _failure(self, asked: bool) -> int:
        """A rank has failed: find out why, end the others, say it last."""
        deadline = time.monotonic() + RECORD_GRACE_SECONDS
        while True:
            running = self._observe()
            endings = [worker.ending for worker in self._workers if worker.ending and self._failed(worker, asked)]
            cause = first_cause(self._run_dir, len(self._workers), endings)
            if cause.certain or not running or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        for worker in running:
            worker.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_SECONDS
        while self._observe() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.kill_all()
        self._say(cause.text)
        return cause.exit_code

    def _asked_again(self) -> int:
        """The signal of somebody who cannot wait, or 0.

        `timeout` signals a process and then its group, and a service manager sends SIGHUP after SIGTERM: not meant so.
        """
        for number, moment in self._signals[1:]:
            if number != signal.SIGHUP and moment - self._signals[0][1] > SAME_SIGNAL_SECONDS:
                return number
        return 0

    def _say(self, text: str) -> None:
        # A killed rank 0 may have left a half-drawn line and a hidden cursor.
        restore = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
        print(f"{restore}switchyard: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
