"""From the arguments of `switchyard run` to ranks at work: validate, make the run folder, start processes or be one.

A recipe script hands its worker to `launch_or_join`; whether this process then supervises ranks, runs a sweep, or is a
rank itself, is decided here. Torch-free: a worker imports torch in its body, so that a wrong recipe is refused first.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from backends import npu_environment
from moe.config import ConfigError, Problem, RunConfig, expand_sweep, from_resolved, load_config, to_yaml
from moe.crash import exit_code_of, record_crash
from moe.errors import EnvironmentProblem, ExitCode, StopRun, SwitchyardError
from moe.launch import (
    STOPPED_OUTSIDE_OF_TRAINING,
    JobEnvironment,
    die_with_parent,
    export,
    job_environment,
    run_local,
)

Worker = Callable[[RunConfig, JobEnvironment, Path | None], int]
"""worker(config, job, run_dir) -> exit code. run_dir is None on ranks that cannot know it: those other than 0 under
torchrun, deepspeed or Slurm, which learn it from rank 0."""

RUN_EXAMPLES = """\
examples:
  switchyard run quickstart
  switchyard run quickstart moe.num_experts=16 moe.top_k=4 parallel.expert=2 optim.lr=1e-3
  switchyard run quickstart backend=cuda moe=bias_balanced      choose an option of a group (switchyard ls groups)
  switchyard run my_recipe.yaml run.dir=runs/mine               a YAML file of your own; again to go on
  switchyard run tiny -m optim.lr=1e-3,3e-3 moe.top_k=1,2       a sweep, one run after another
  torchrun --nproc-per-node 2 -m recipes.pretrain quickstart    one rank of a job; also deepspeed, srun

exit codes: 0 done, 2 bad config, 3 bad data, 4 bad checkpoint, 5 numeric stop, 6 environment, 75 restart me
"""


def run_parser() -> argparse.ArgumentParser:
    """The options of `switchyard run`, which are those of `python -m recipes.pretrain`. Recipe and settings are the rest."""
    parser = argparse.ArgumentParser(
        prog="switchyard run",
        usage="switchyard run RECIPE [key=value ...] [-m] [--cfg job]",
        description="Train. RECIPE: a name (switchyard ls recipes) or a YAML file's path. Settings follow Hydra's grammar.",
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination of a=1,2 b=range(1,4)")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    # A rank that `switchyard run` has started gets all settings by it.
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)
    # deepspeed's launcher gives it to each rank; LOCAL_RANK says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def launch_or_join(args: Sequence[str], worker: Worker, module: str = "recipes.pretrain") -> int:
    """What `switchyard run ARGS` does; returns the exit code.

    Refuses a wrong configuration with all problems and 2 before any process starts. Under a launcher this process is one
    rank and calls the worker; else it makes the run folder, starts parallel.nproc processes of `python -m module` and
    supervises them. A rank that fails ends right here, without Python's own finalisation, which could hang.
    """
    parser = run_parser()
    # Not positional arguments of the parser: it would not take them on both sides of an option.
    arguments, words = parser.parse_known_args(args)
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}; settings are written key=value")
    if not words and arguments.resolved is None:
        parser.error("RECIPE is missing; see switchyard ls recipes")
    recipe, overrides = (words or [""])[0], words[1:]
    try:
        job = job_environment(os.environ)
        if arguments.resolved is not None:
            if job is None:
                raise EnvironmentProblem("--resolved is for ranks started by switchyard run; give a recipe instead")
            return _be_rank(worker, from_resolved(arguments.resolved), job, arguments.resolved.parent)
        if arguments.multirun and arguments.cfg:
            for point in expand_sweep(overrides):
                print(f"--- # {' '.join(point)}\n{to_yaml(load_config(point, recipe))}", end="")
            return int(ExitCode.done)
        if arguments.multirun:
            return _sweep(recipe, overrides, job, module)
        if job is not None and not arguments.cfg:
            # The launcher's count holds, so the rules are checked against it.
            config = load_config([*overrides, f"parallel.nproc={job.world_size}"], recipe)
            run_dir = make_run_dir(config, overrides) if job.rank == 0 else None
            return _be_rank(worker, config, job, run_dir)
        config = load_config(overrides, recipe)
        if arguments.cfg:
            print(to_yaml(config), end="")
            return int(ExitCode.done)
        return _supervise(config, recipe, overrides, module)[0]
    except SwitchyardError as error:
        if int(os.environ.get("RANK", "0") or 0) == 0 or not isinstance(error, ConfigError):
            print(f"switchyard: {error}", file=sys.stderr)
        return int(error.exit_code)


def make_run_dir(config: RunConfig, overrides: Sequence[str] = ()) -> Path:
    """Make run.dir, or a new runs/<recipe>-<time>, with config.yaml (resolved) and overrides.txt; rank 0 only.

    A folder that is there is used again, to go on; a config.yaml that said something else is kept beside the new one.
    Raises EnvironmentProblem when the folder cannot be made.
    """
    run_dir = _make_folder(config)
    _save_settings(run_dir, config, overrides)
    return run_dir


def _make_folder(config: RunConfig) -> Path:
    try:
        if config.run.dir is None:
            return _new_folder(Path("runs"), config.recipe)
        run_dir = Path(config.run.dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(error) from error
    return run_dir


def _save_settings(run_dir: Path, config: RunConfig, overrides: Sequence[str]) -> Callable[[], None]:
    """Write config.yaml and overrides.txt; what is returned brings back those that they replaced, if any."""
    text = to_yaml(dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(run_dir))))
    saved, told = run_dir / "config.yaml", run_dir / "overrides.txt"
    earlier: Path | None = None
    try:
        earlier_told = told.read_text("utf-8", "replace") if told.exists() else ""
        if saved.exists() and saved.read_text("utf-8", "replace") != text:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(saved.stat().st_mtime))
            earlier = saved.replace(run_dir / f"config.until-{stamp}.yaml")
        _write(saved, text)
        _write(told, "".join(f"{override}\n" for override in overrides))
    except OSError as error:
        raise _cannot_write(error) from error

    def put_back() -> None:
        if earlier is not None:
            with contextlib.suppress(OSError):
                earlier.replace(saved)
                _write(told, earlier_told)

    return put_back


def _cannot_write(error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"run.dir ({error.filename}) cannot be written ({error.strerror}); choose another run.dir"
    )


def run_rank(worker: Worker, config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> int:
    """Call the worker and turn how it ends into an exit code, and a failure into a crash record as well.

    Until the worker handles SIGINT and SIGTERM itself, both end it as a stop on request.
    """
    try:
        with _stop_before_training():
            return worker(config, job, run_dir)
    except _StoppedOutsideOfTraining as stop:
        if job.launcher == "switchyard":
            return STOPPED_OUTSIDE_OF_TRAINING
        print(f"switchyard: {stop}", file=sys.stderr, flush=True)
        return int(stop.exit_code)
    except StopRun as stop:
        if job.rank == 0:
            print(f"switchyard: {stop}", file=sys.stderr, flush=True)
        return int(stop.exit_code)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except BaseException as error:
        _leave_record(error, config, job, run_dir)
        return exit_code_of(error)


def _be_rank(worker: Worker, config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> int:
    die_with_parent(os.environ)
    export(os.environ, job)
    if npu_environment.concerns(config.backend.device.value):
        npu_environment.set_defaults(os.environ)
    code = run_rank(worker, config, job, run_dir)
    if code not in (ExitCode.done, ExitCode.restart):
        # Collective libraries may wait in their destructors for ranks that are gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _leave_record(error: BaseException, config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> None:
    if run_dir is None and config.run.dir is not None:
        run_dir = Path(config.run.dir)
    recorded = False
    if run_dir is not None:
        with contextlib.suppress(OSError):
            record_crash(run_dir, job.rank, None, error)
            recorded = True
    # The supervisor says rank 0's error last; anywhere else, and for the other ranks' logs, it must be said here.
    if not recorded or job.rank != 0 or job.launcher != "switchyard":
        print(f"switchyard: rank {job.rank} of {job.world_size} failed", file=sys.stderr)
        traceback.print_exception(error)


class _StoppedOutsideOfTraining(StopRun):
    """Nothing was under way that a checkpoint could keep."""


@contextlib.contextmanager
def _stop_before_training() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _StoppedOutsideOfTraining(
            f"{signal.Signals(number).name}: stopped outside of the training loop; start again to go on"
        )

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _supervise(config: RunConfig, recipe: str, overrides: Sequence[str], module: str) -> tuple[int, Path]:
    """Run a configuration in processes of our own: exit code and run folder."""
    run_dir = _make_folder(config)
    with _locked(run_dir):
        put_back = _save_settings(run_dir, config, overrides)
        command = [sys.executable, "-m", module, "--resolved", str(run_dir / "config.yaml")]
        code = run_local(command, config.parallel.nproc, run_dir, os.environ)
        if code in (ExitCode.bad_checkpoint, ExitCode.bad_data):
            # Refused before it trained: the folder still is what the settings of before made of it.
            put_back()
    if code == ExitCode.restart:
        kept = [override for override in overrides if not override.startswith("run.dir=")]
        again = shlex.join(["switchyard", "run", recipe, *kept, f"run.dir={run_dir}"])
        print(f"switchyard: stopped; go on with: {again}", file=sys.stderr)
    return code, run_dir


def _sweep(recipe: str, overrides: Sequence[str], job: JobEnvironment | None, module: str) -> int:
    """One run after another, each in a subfolder; a table of all at the end."""
    if job is not None:
        rule = f"cannot be used under a launcher ({job.launcher})"
        raise ConfigError([Problem(path="-m", value=None, rule=rule, way_out="start the runs of the sweep one by one")])
    points = expand_sweep(overrides)
    configs, problems = [], []
    for point in points:
        try:
            configs.append(load_config(point, recipe))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list({str(problem): problem for problem in problems}.values()))
    given = configs[0].run.dir
    folder = Path(given) if given is not None else _new_folder(Path("multirun"), configs[0].recipe)
    rows: list[dict[str, Any]] = []
    for index, (point, config) in enumerate(zip(points, configs, strict=True)):
        swept = [text for text in point if text not in overrides]
        print(f"switchyard: run {index + 1} of {len(points)}: {' '.join(swept)}", file=sys.stderr, flush=True)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder / str(index))))
        started = time.monotonic()
        code, run_dir = _supervise(config, recipe, point, module)
        seconds = time.monotonic() - started
        rows.append({"run": str(run_dir), "overrides": swept, "exit_code": code, "seconds": round(seconds, 1)})
        rows[-1] |= _last_metrics(run_dir)
        _write(folder / "sweep.json", json.dumps(rows, indent=1) + "\n")
        if code == ExitCode.restart or code > 128:
            break
    _print_sweep(rows)
    return next((int(row["exit_code"]) for row in rows if row["exit_code"]), 0)


def _print_sweep(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("run", "overrides", "exit", "step", "lm_loss", "seconds")
    for row in rows:
        loss = row.get("lm_loss")
        shown = f"{loss:.4f}" if isinstance(loss, float) else "-"
        cells = (row["run"], " ".join(row["overrides"]), row["exit_code"], row.get("step", "-"), shown, row["seconds"])
        table.add_row(*map(str, cells))
    Console().print(table)


def _last_metrics(run_dir: Path) -> dict[str, object]:
    """Step and loss of the last line of metrics.jsonl; nothing when there is none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            last = json.loads(file.read().splitlines()[-1])
        return {key: last[key] for key in ("step", "lm_loss") if key in last}
    except (OSError, ValueError, IndexError, TypeError):
        return {}


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder against a second `switchyard run` with the same run.dir."""
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentProblem(
                f"run.dir ({run_dir}) is in use by another run; wait for it or choose another"
            ) from None
        yield


def _new_folder(parent: Path, name: str) -> Path:
    """Make parent/<name>-<time>, with a number after it when two runs start in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
