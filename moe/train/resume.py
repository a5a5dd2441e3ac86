"""Where a run begins: anew, or from a checkpoint (on the data path, between engine and loop)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.device import Backend
from moe.errors import CheckpointError
from moe.train.checkpoint import CHECKPOINTS, checkpoint_path, find_checkpoints, latest_checkpoint, load_checkpoint
from moe.train.config import TrainerConfig
from moe.train.engine import Engine
from moe.train.mesh import Mesh


def resume_source(trainer: TrainerConfig, run_dir: Path) -> Path | None:
    """The checkpoint folder that trainer.resume means; None to start anew."""
    match trainer.resume:
        case "never":
            return None
        case "auto":
            return latest_checkpoint(run_dir / CHECKPOINTS)
        case path:
            return Path(path)


def resume_run(
    run_dir: Path,
    *,
    engine: Engine,
    mesh: Mesh,
    backend: Backend,
    trainer: TrainerConfig,
    fingerprints: Mapping[str, Any],
) -> int:
    """Bring the engine to where the run begins; returns the optimizer steps already done (collective).

    Raises CheckpointError when the checkpoint cannot be loaded or is of another run, and when going on would meet
    checkpoints that are already in the run folder, for these are never written over.
    """
    source = resume_source(trainer, run_dir)
    step = 0
    if source is not None:
        state = load_checkpoint(source, engine=engine, mesh=mesh, backend=backend, fingerprints=fingerprints)
        step = state.step
        if state.next_sample != step * trainer.batch_size:
            raise CheckpointError(
                f"{source} was written with trainer.batch_size={state.next_sample // max(step, 1)}, this run has "
                f"{trainer.batch_size}, so the data position would not be the same; restore the batch size"
            )
        if step > trainer.max_steps:
            raise CheckpointError(
                f"{source} is after step {step}, but trainer.max_steps is {trainer.max_steps}; raise it"
            )
    folder = run_dir / CHECKPOINTS
    newer = [path for path in find_checkpoints(folder) if path > checkpoint_path(folder, step)]
    if newer:
        raise CheckpointError(
            f"{folder} holds {newer[-1].name}, which a run from step {step} would have to write over; "
            "choose trainer.resume=auto, or another run.dir"
        )
    return step
