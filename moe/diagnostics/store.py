"""The run folder's record of what happened (on the data path, at the end of a step; rank 0 alone). Torch-free.

    metrics.jsonl    one object a training step (`StepRecord`)
    eval.jsonl       one object a domain and evaluation (`EvalRecord`)
    guard.jsonl      one object a step that the step guard did not let be applied (`GuardRecord`)
    load/            picks per step, MoE layer and expert: meta.json and counts.bin (`LoadLayout`)
    status.json      how far the run is meant to go, and how it stands
    events/          the same for TensorBoard, when it is installed
    earlier/<n>/     the files above, of a run that began anew in the same folder

A killed run may leave a torn last line or record; readers skip it, and a resume repairs it. A log that cannot be
written (full disk) never stops training: what is lost is counted and said.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.diagnostics.record import EvalRecord, GuardRecord, Json, StepRecord
from moe.errors import DataError

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
GUARD = "guard.jsonl"
LOAD = "load"
STATUS = "status.json"
EVENTS = "events"
EARLIER = "earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLayout:
    """What the columns of load/counts.bin mean; load/meta.json holds the same fields.

    A record of counts.bin is the step (int64) and then L · E picks (int32, layer by layer), little-endian, unpadded.
    """

    layer_indices: tuple[int, ...]
    """For each of the L MoE layers, its number among all blocks: layers.<index>."""
    num_experts: int
    """Experts E per MoE layer."""
    top_k: int
    """Experts per token."""
    rank_of_expert: tuple[int, ...] | None = None
    """For each expert its expert-parallel rank; None = one rank holds all."""

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """One record of counts.bin."""
        return np.dtype([("step", "<i8"), ("counts", "<i4", (len(self.layer_indices), self.num_experts))])


class MetricsStore:
    """Appends `StepRecord`s and `EvalRecord`s to the files of a run folder. A context manager; else call `close`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None,
        max_steps: int,
        load_layout: LoadLayout | None = None,
        resume_command: str | None = None,
        tensorboard: bool | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Open the files of `run_dir` (made when missing).

        resume_step: the step of the checkpoint the run goes on from: whatever a killed run wrote after it is cut off,
            for those steps are done again. None begins anew; files of an earlier run move to earlier/<n>/.
        max_steps: steps of the whole run; the report tells by it whether the run came to its end.
        load_layout: the MoE layers; None without any, then load/ is not written.
        resume_command: what the report names to go on with an unfinished run.
        tensorboard: True writes events/, and says so when it cannot; None does it when installed; False never.
        say: takes each notice for the user (lost records, no TensorBoard); standard error by default.

        Raises DataError when load/ on disk was written for another model than load_layout.
        """
        self._run_dir = run_dir
        self._max_steps = max_steps
        self._resume_command = resume_command
        self._say = say or _say_on_stderr
        self._layout = load_layout
        self._last_step = resume_step or 0
        self._lost = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_earlier_run_aside(run_dir)
        else:
            for name in (METRICS, EVALUATIONS):
                _cut_lines_after(run_dir / name, resume_step)
            _cut_load_after(run_dir, resume_step, load_layout)
        self._metrics = _Appender(run_dir / METRICS)
        self._evaluations = _Appender(run_dir / EVALUATIONS)
        self._counts: _Appender | None = None
        if load_layout is not None:
            (run_dir / LOAD).mkdir(exist_ok=True)
            _write_atomically(run_dir / LOAD / "meta.json", _json_bytes({"format": 1} | asdict(load_layout)))
            self._counts = _Appender(run_dir / LOAD / "counts.bin")
        self._write_status("running")
        self._writer = self._open_tensorboard(tensorboard, purge_step=None if resume_step is None else resume_step + 1)

    def write_step(self, record: StepRecord) -> None:
        """Write a step: its line, its counts, its curves. On disk (in the kernel's hands) when this returns."""
        written = self._metrics.append(_json_line(record.to_json()))
        if self._counts is not None and record.tokens_per_expert_LE is not None:
            written &= self._counts.append(self._count_record(record.step, record.tokens_per_expert_LE))
        self._account(written)
        self._last_step = record.step
        if self._writer is not None:
            scalars = _scalars("train", record.to_json())
            layers = self._layout.layer_indices if self._layout is not None else ()
            if len(layers) == len(record.max_vio_layers):
                scalars |= {f"max_vio/layer_{i}": v for i, v in zip(layers, record.max_vio_layers, strict=True)}
            self._add_scalars(scalars, record.step)

    def write_eval(self, record: EvalRecord) -> None:
        """Write an evaluation of a domain. Of two at the same step (as after a resume) the reader sees the last."""
        self._account(self._evaluations.append(_json_line(record.to_json())))
        if self._writer is not None:
            self._add_scalars({f"eval/{record.domain}": record.lm_loss}, record.step)

    def write_guard(self, record: GuardRecord) -> None:
        """Write a step that was not applied. These lines stay when a run goes back: they say why it did."""
        appender = _Appender(self._run_dir / GUARD)
        self._account(appender.append(_json_line(record.to_json())))
        appender.close()

    def go_back(self, step: int) -> None:
        """Forget the steps after `step`, which are done again. TensorBoard's curves keep both."""
        self._metrics.close()
        self._evaluations.close()
        for name in (METRICS, EVALUATIONS):
            _cut_lines_after(self._run_dir / name, step)
        self._metrics = _Appender(self._run_dir / METRICS)
        self._evaluations = _Appender(self._run_dir / EVALUATIONS)
        if self._counts is not None:
            self._counts.close()
            _cut_load_after(self._run_dir, step, self._layout)
            self._counts = _Appender(self._run_dir / LOAD / "counts.bin")
        self._last_step = step

    def close(self) -> None:
        """Flush, write down how the run stands, and say how much was lost, if anything."""
        self._metrics.close()
        self._evaluations.close()
        if self._counts is not None:
            self._counts.close()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._say(f"TensorBoard's events in {self._run_dir / EVENTS} may be incomplete: {error}")
            self._writer = None
        self._write_status("finished" if self._last_step >= self._max_steps else "stopped")
        if self._lost:
            self._say(f"{self._lost} log records could not be written to {self._run_dir}; the training itself is whole")

    def __enter__(self) -> "MetricsStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count_record(self, step: int, tokens_per_expert_LE: NDArray[np.int64]) -> bytes:
        assert self._layout is not None
        record = np.zeros(1, dtype=self._layout.record_dtype)
        assert tokens_per_expert_LE.shape == record["counts"].shape[1:], (tokens_per_expert_LE.shape, self._layout)
        record["step"] = step
        # An expert with more than 2^31 picks in a step would saturate rather than turn negative.
        record["counts"] = np.minimum(tokens_per_expert_LE, np.iinfo(np.int32).max)
        return record.tobytes()

    def _account(self, written: bool) -> None:
        if written:
            return
        self._lost += 1
        if self._lost == 1:
            error = next((a.error for a in (self._metrics, self._counts, self._evaluations) if a and a.error), None)
            self._say(
                f"the log in {self._run_dir} cannot be written ({error}); training goes on, free some space there"
            )

    def _write_status(self, state: str) -> None:
        status = {"state": state, "last_step": self._last_step, "max_steps": self._max_steps}
        if self._resume_command is not None:
            status["resume_command"] = self._resume_command
        try:
            _write_atomically(self._run_dir / STATUS, _json_bytes(status))
        except OSError as error:
            self._say(f"{self._run_dir / STATUS} could not be written: {error}")

    def _open_tensorboard(self, wanted: bool | None, purge_step: int | None) -> Any:
        if wanted is False:
            return None
        try:
            # Takes a second and pulls torch in, so only here and only when events are written.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            if wanted:
                self._say(f"no TensorBoard events, for it is not installed ({error}); pip install tensorboard")
            return None
        try:
            return SummaryWriter(log_dir=str(self._run_dir / EVENTS), purge_step=purge_step)
        except OSError as error:
            self._say(f"no TensorBoard events: {error}")
            return None

    def _add_scalars(self, scalars: dict[str, float], step: int) -> None:
        try:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            # Raised here for a write that failed earlier, on TensorBoard's own thread, which is gone now.
            self._say(f"no more TensorBoard events: {error}")
            self._writer = None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the objects of metrics.jsonl by rising step, one a step (the last written).

    Values named under `nonfinite` are NaN or inf again, as in the record; a torn or foreign line is skipped.

    Raises DataError when the folder or the file is missing, or no line of it can be read.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run folder: there is no such folder; name one under runs/")
    path = run_dir / METRICS
    if not path.is_file():
        raise DataError(
            f"{run_dir} holds no {METRICS}: it is not a run folder, or the run ended before its first step "
            f"(then {run_dir / 'crash'} says why)"
        )
    rows = _rows(path)
    if not rows:
        what = "is empty: the run has not done its first step" if path.stat().st_size == 0 else "has no readable line"
        raise DataError(f"{path} {what}; name another run, or wait for this one")
    return rows


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the objects of eval.jsonl by rising step, one a step and domain (the last written).

    Empty when the run was never evaluated.
    """
    path = run_dir / EVALUATIONS
    return _rows(path) if path.is_file() else []


def read_guard(run_dir: Path) -> list[dict[str, Any]]:
    """Return the objects of guard.jsonl in the order of writing; empty when every step was applied."""
    path = run_dir / GUARD
    if not path.is_file():
        return []
    rows = (_parse_object(line) for line in path.read_bytes().splitlines())
    return [row for row in rows if row is not None]


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return status.json: state (running, finished, stopped), last_step, max_steps, resume_command; empty when absent.

    A run that was killed still says running, and last_step is then that of its start.
    """
    path = run_dir / STATUS
    if not path.is_file():
        return {}
    status = _parse_object(path.read_bytes())
    return status or {}


def read_load_layout(run_dir: Path) -> LoadLayout:
    """Return load/meta.json. Raises DataError when it is missing (a model without MoE layers has none) or damaged."""
    path = run_dir / LOAD / "meta.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: the run has no MoE layers, or is not a run folder")
    try:
        meta = json.loads(path.read_bytes())
        if meta["format"] != 1:
            raise DataError(f"{path}: format {meta['format']} is not known, only 1 is; use the version that wrote it")
        ranks = meta["rank_of_expert"]
        return LoadLayout(
            layer_indices=tuple(int(index) for index in meta["layer_indices"]),
            num_experts=int(meta["num_experts"]),
            top_k=int(meta["top_k"]),
            rank_of_expert=None if ranks is None else tuple(int(rank) for rank in ranks),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); metrics.jsonl still holds MaxVio per layer") from error


def read_load(run_dir: Path) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return (steps [N], rising; picks [N, L, E]) of load/; a torn tail is left out.

    Raises DataError as `read_load_layout`.
    """
    dtype = read_load_layout(run_dir).record_dtype
    path = run_dir / LOAD / "counts.bin"
    size = path.stat().st_size if path.is_file() else 0
    records = np.fromfile(path, dtype=dtype, count=size // dtype.itemsize) if size >= dtype.itemsize else _none(dtype)
    # After a power cut a file system may show blocks of zeros; steps begin at 1 and rise, so such a tail is recognised.
    rising = np.diff(records["step"], prepend=0) > 0
    good = records[: len(rising) if rising.all() else int(np.argmin(rising))]
    return good["step"].astype(np.int64), good["counts"].astype(np.int32)


class _Appender:
    """A file that grows by whole records or not at all."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        # Unbuffered: a record is in the kernel's hands, and survives this process, when append returns.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - held until close
        self._size = self._file.seek(0, os.SEEK_END)
        self._torn = False

    def append(self, data: bytes) -> bool:
        """Write `data`; on failure return False, and take back what was written of it before anything else is."""
        try:
            self._take_back()
            view = memoryview(data)
            while view:
                self._torn = True
                view = view[self._file.write(view) :]
        except OSError as error:
            self.error = error
            return False
        self._torn = False
        self._size += len(data)
        return True

    def close(self) -> None:
        """Close the file, without the piece of a record that failed last."""
        try:
            with self._file:  # closed whatever happens
                self._take_back()
        except OSError as error:
            self.error = error

    def _take_back(self) -> None:
        if self._torn:
            self._file.truncate(self._size)
            self._torn = False


def _say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _none(dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.empty(0, dtype=dtype)


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _json_line(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _scalars(prefix: str, values: Json) -> dict[str, float]:
    """The plain numbers of a JSON object, as names and values for TensorBoard."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {f"{prefix}/{name}": float(value) for name, value in numbers.items() if name != "step"}


def _write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` in one go: a reader, or a crash, sees the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`; None when there is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """An object with an integer step; None for anything else."""
    row = _parse_object(line)
    return row if row is not None and type(row.get("step")) is int else None


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines, without those torn at the end: a line that is not ended may be half a number."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _rows(path: Path) -> list[dict[str, Any]]:
    """Readable rows by rising step, one a step (and domain, in eval.jsonl): the last written."""
    rows = {}
    for row in map(_parse_row, _lines(path)):
        if row is not None:
            rows[row["step"], row.get("domain")] = _with_nonfinite(row)
    return sorted(rows.values(), key=lambda row: row["step"])


def _with_nonfinite(row: dict[str, Any]) -> dict[str, Any]:
    """Put back the values that `json_numbers` took out."""
    for name, text in row.pop("nonfinite", {}).items():
        key, _, index = name.partition(".")
        if index:
            row[key][int(index)] = float(text)
        else:
            row[key] = float(text)
    return row


def _cut_lines_after(path: Path, last_step: int) -> None:
    """Keep the whole lines up to `last_step`, a step (and domain) once; replace the file only if that changes it."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    previous = -1
    domains: set[object] = set()
    # Line by line: the file of a long run need not fit in memory.
    with open(temporary, "wb") as file:
        for line in _lines(path):
            row = _parse_row(line)
            if row is None or not previous <= row["step"] <= last_step:
                continue
            if row["step"] > previous:
                previous, domains = row["step"], set()
            if row.get("domain") not in domains:
                domains.add(row.get("domain"))
                file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if temporary.stat().st_size == path.stat().st_size:
        temporary.unlink()
    else:
        os.replace(temporary, path)


def _cut_load_after(run_dir: Path, step: int, layout: LoadLayout | None) -> None:
    """Keep the records of load/ up to `step`."""
    path = run_dir / LOAD / "counts.bin"
    if layout is None or not path.is_file():
        return
    on_disk = read_load_layout(run_dir)
    if on_disk.record_dtype != layout.record_dtype or on_disk.layer_indices != layout.layer_indices:
        raise DataError(
            f"{run_dir / LOAD} was written for layers {list(on_disk.layer_indices)} with {on_disk.num_experts} "
            f"experts, the model has layers {list(layout.layer_indices)} with {layout.num_experts}; "
            f"use another run.dir for another model"
        )
    steps, _ = read_load(run_dir)
    size = int((steps <= step).sum()) * layout.record_dtype.itemsize
    if size != path.stat().st_size:
        # Records rise in step, so a cut is a shorter file: one atomic change of its length.
        os.truncate(path, size)


def _set_earlier_run_aside(run_dir: Path) -> None:
    """Move the record of a run that began in this folder before to earlier/<n>/."""
    logs = (run_dir / METRICS, run_dir / EVALUATIONS, run_dir / LOAD / "counts.bin")
    if not any(path.is_file() and path.stat().st_size for path in logs):
        return  # a run that did no step left nothing to keep
    number = 1
    while (run_dir / EARLIER / str(number)).exists():
        number += 1
    target = run_dir / EARLIER / str(number)
    target.mkdir(parents=True)
    for name in (METRICS, EVALUATIONS, GUARD, LOAD, STATUS, EVENTS):
        if (run_dir / name).exists():
            os.replace(run_dir / name, target / name)
