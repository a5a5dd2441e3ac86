"""Process groups that tests share: spawned once a session, so that a multi-process case costs milliseconds.

A pool of N workers has a default group of N ranks (gloo on CPUs). `run(function, *args)` calls a module-level function on every
rank and returns the results by rank. A failure raises here with the remote traceback; after a failure or a timeout the
pool is thrown away and spawned anew, since ranks may wait for each other.
"""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

COLLECTIVES = {"cpu": "gloo", "npu": "hccl"}
"""Kind of device -> the backend of the ranks' default group."""


def _worker(
    rank: int, world_size: int, store_path: str, pipe: Connection, device: str, environ: dict[str, str]
) -> None:
    os.environ.update(environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR=device, OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(COLLECTIVES[device], store=store, rank=rank, world_size=world_size)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        function, args, kwargs = job
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class ProcessPool:
    """N spawned ranks; see the module's docstring."""

    def __init__(self, world_size: int, device: str = "cpu", **environ: str) -> None:
        """device: kind; rank r takes number r. environ: variables of the workers, set before torch is loaded."""
        self.world_size = world_size
        self._device, self._environ = device, environ
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="switchyard-pool-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker,
                args=(rank, self.world_size, f"{folder}/store", theirs, self._device, self._environ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call function(*args, **kwargs) on every rank; results by rank."""
        if any(not process.is_alive() for process in self._processes):
            # Killed from outside between two cases: no reason to fail all that follow.
            self.close(kill=True)
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(self._pipes))
        while pending and not failures:
            ready = wait(list(pending.values()), timeout)
            if not ready:
                self.close(kill=True)
                raise TimeoutError(f"ranks {sorted(pending)} of {self.world_size} did not answer within {timeout} s")
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    good, value = pending.pop(rank).recv()
                except EOFError:
                    good, value = False, "the process died"
                (results if good else failures)[rank] = value
        if failures:
            # Peers of a failed rank often fail a moment later with a connection error: give them that moment.
            for pipe in wait(list(pending.values()), 0.5):
                rank = next(r for r, p in pending.items() if p is pipe)
                with contextlib.suppress(EOFError):
                    good, value = pipe.recv()
                    if not good:
                        failures[rank] = value
            self.close(kill=True)
            raise RuntimeError("\n".join(f"--- rank {r} of {self.world_size}\n{t}" for r, t in failures.items()))
        return [results[rank] for rank in range(self.world_size)]

    def close(self, kill: bool = False) -> None:
        """End the workers; the next `run` spawns new ones."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(BrokenPipeError, OSError):
                    pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._processes, self._pipes = [], []
