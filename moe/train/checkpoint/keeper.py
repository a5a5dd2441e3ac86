"""Saves beside training: a snapshot in host memory, then a thread (on the data path, after the step)."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from backends.device import Backend
from moe.errors import CheckpointError
from moe.train.checkpoint.folder import checkpoint_path
from moe.train.checkpoint.load import gather_over
from moe.train.checkpoint.manifest import TrainState
from moe.train.checkpoint.protocol import Gather, Keep, Snapshot, Written, alone, write_checkpoint
from moe.train.checkpoint.snapshot import take_snapshot
from moe.train.checkpoint.tensor_file import Fault, no_fault
from moe.train.engine import Engine
from moe.train.mesh import Mesh

CLOSE_SECONDS = 60.0
"""How long `close` waits for a save under way when the run ends by an error."""


class CheckpointKeeper:
    """Writes a run's checkpoints while training goes on; at most one at a time.

    A save that fails is an alarm, not the end: `poll` says so at the next step boundary, and the next due step tries
    again. Only `finish`, after the last step or before a stop, raises. The thread's exchanges have a group of their own
    (gloo, on the host), so that they never mix with training's.
    """

    def __init__(
        self,
        root: Path,
        *,
        engine: Engine,
        mesh: Mesh,
        backend: Backend,
        keep: Keep,
        say: Callable[[str], None],
        fault: Fault = no_fault,
    ) -> None:
        """root: the folder of checkpoints. say: shows a line (on rank 0). fault: for tests."""
        self.root = root
        self.fault = fault
        self._engine, self._mesh, self._backend = engine, mesh, backend
        self._keep, self._say = keep, say
        self._gather: Gather | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._error: Exception | None = None
        self._stall_seconds = 0.0
        self._started = time.perf_counter()
        self.total_stall_seconds = 0.0
        """Time for which saving has kept this rank from training."""

    def save(self, state: TrainState) -> None:
        """Begin to write a checkpoint (collective); waits for one that is still being written."""
        started = time.perf_counter()
        self._join()
        self._report()
        snapshot = take_snapshot(self._engine, state, mesh=self._mesh, backend=self._backend)
        gather = self._gather_over_own_group()
        # A daemon: a run that ends by an error must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._write, args=(snapshot, gather), name="checkpoint", daemon=True)
        self._thread.start()
        self._add_stall(started)

    def poll(self) -> None:
        """At a step boundary: say what has become of the save, if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self._join()
            self._report()

    def finish(self) -> Path | None:
        """Wait for the save under way; the path of what was written, None if nothing was under way (collective).

        Raises CheckpointError when it failed.
        """
        started = time.perf_counter()
        self._join()
        self._add_stall(started)
        error, self._error = self._error, None
        if error is not None:
            raise error
        path = self._written.path if self._written is not None else None
        self._report()
        return path

    @property
    def stall_share(self) -> float:
        """Part of this rank's wall time that saving has cost so far."""
        return self.total_stall_seconds / max(time.perf_counter() - self._started, 1e-9)

    def stands(self, step: int) -> bool:
        """Whether the checkpoint of this step is written, once the save under way has ended (collective)."""
        self._join()
        self._report()
        there: bool = self._gather_over_own_group()(checkpoint_path(self.root, step).is_dir())[0]
        return there

    def take_stall(self) -> float:
        """Seconds of stall since the last call."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def close(self) -> None:
        """Let a save under way come to its end, if it does soon, and give back the group."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                return
            self._thread = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._gather = None

    def _write(self, snapshot: Snapshot, gather: Gather) -> None:
        try:
            self._written = write_checkpoint(
                self.root, snapshot, rank=self._mesh.rank, gather=gather, keep=self._keep, fault=self.fault
            )
        except Exception as error:
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _report(self) -> None:
        """Say how the last save ended. What is no failure of a save, but a fault of ours, ends the run here."""
        written, error = self._written, self._error
        self._written = self._error = None
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        if error is not None:
            self._say(f"ALARM: {error}\ntraining goes on; the next checkpoint that is due will be tried")
        if written is not None:
            self._say(f"saved {written.path}")
            for alarm in written.alarms:
                self._say(f"ALARM: {alarm}")

    def _gather_over_own_group(self) -> Gather:
        if self._gather is None:
            if self._mesh.world_size == 1:
                self._gather = alone
            else:
                self._group = dist.new_group(backend="gloo")
                self._gather = gather_over(self._group, self._mesh.world_size)
        return self._gather

    def _add_stall(self, started: float) -> None:
        seconds = time.perf_counter() - started
        self._stall_seconds += seconds
        self.total_stall_seconds += seconds
