"""Where a run begins: anew, or from a checkpoint (on the data path, between engine and loop)."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backends.device import Backend
from moe.errors import CheckpointError
from moe.train.checkpoint.folder import CHECKPOINTS, find_checkpoints, step_of_path
from moe.train.checkpoint.load import load_checkpoint, newest_verified
from moe.train.checkpoint.manifest import TrainState
from moe.train.config import TrainerConfig
from moe.train.engine import Engine
from moe.train.mesh import Mesh


def resume_run(
    run_dir: Path,
    *,
    engine: Engine,
    mesh: Mesh,
    backend: Backend,
    trainer: TrainerConfig,
    fingerprints: Mapping[str, Any],
    say: Callable[[str], None] | None = None,
) -> int:
    """Bring the engine to where the run begins; returns the optimizer steps already done (collective).

    say: shows a warning; None: rank 0 writes to standard error.
    Raises CheckpointError when the checkpoint cannot be loaded or is of another run, and when going on would meet
    checkpoints that are already in the run folder, for these are never written over.
    """
    if say is None:
        say = _to_standard_error if mesh.rank == 0 else _to_nobody
    folder = run_dir / CHECKPOINTS
    source = None
    if trainer.resume == "auto":
        source = newest_verified(folder, engine=engine, mesh=mesh, say=say)
    elif trainer.resume != "never":
        source = Path(trainer.resume)
    step = 0
    if source is not None:
        state = load_checkpoint(
            source,
            engine=engine,
            mesh=mesh,
            backend=backend,
            fingerprints=fingerprints,
            accept_changed_data=trainer.accept_changed_data,
            verified=trainer.resume == "auto",
            say=say,
        )
        check_position(source, state, trainer)
        step = state.step
    newer = [path for path in find_checkpoints(folder) if (step_of_path(path) or 0) > step]
    if newer:
        raise CheckpointError(
            f"{folder} holds {newer[-1].name}, which a run from step {step} would have to write over; "
            "choose trainer.resume=auto, or another run.dir"
        )
    return step


def check_position(source: Path, state: TrainState, trainer: TrainerConfig) -> None:
    """Refuse a checkpoint whose place in the data or in the schedule this run does not have."""
    step = state.step
    if state.next_sample != step * trainer.batch_size:
        raise CheckpointError(
            f"{source} was written with trainer.batch_size={state.next_sample // max(step, 1)}, this run has "
            f"{trainer.batch_size}, so the data position would not be the same; restore the batch size"
        )
    if step > trainer.max_steps:
        raise CheckpointError(f"{source} is after step {step}, but trainer.max_steps is {trainer.max_steps}; raise it")


def _to_standard_error(text: str) -> None:
    print(f"switchyard: {text}", file=sys.stderr, flush=True)


def _to_nobody(text: str) -> None:
    """Of ranks other than 0."""
