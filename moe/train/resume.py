"""Where a run begins: anew, or from a checkpoint (on the data path, between engine and loop)."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backends.device import Backend
from moe.errors import CheckpointError
from moe.train.checkpoint.folder import CHECKPOINTS, find_checkpoints, step_of_path
from moe.train.checkpoint.load import load_checkpoint, newest_verified
from moe.train.checkpoint.manifest import TrainState
from moe.train.config import TrainerConfig
from moe.train.engine import Engine
from moe.train.guard import StepGuard, batch_of
from moe.train.mesh import Mesh

GUARD = "guard"
"""The step guard's place in TrainState.extra."""


def resume_run(
    run_dir: Path,
    *,
    engine: Engine,
    mesh: Mesh,
    backend: Backend,
    trainer: TrainerConfig,
    fingerprints: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    guard: StepGuard | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Bring the engine to where the run begins; returns the optimizer steps already done (collective).

    settings: this run's whole configuration; held against the checkpoint's (see `check_settings`). None: not compared.
    guard: takes over what the checkpoint's knew.
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
        if settings is not None:
            check_settings(source, state.settings, settings, say)
        if guard is not None:
            guard.load(state.extra.get(GUARD, {}))
        step = state.step
    refuse_to_write_over(folder, step, way_out="choose trainer.resume=auto, or another run.dir")
    return step


def refuse_to_write_over(folder: Path, step: int, *, way_out: str) -> None:
    """Raise CheckpointError when a run that goes on from a step would meet later checkpoints in its folder."""
    newer = [path for path in find_checkpoints(folder) if (step_of_path(path) or 0) > step]
    if newer:
        raise CheckpointError(
            f"{folder} holds {newer[-1].name}, which a run from step {step} would have to write over; {way_out}"
        )


def check_position(source: Path, state: TrainState, trainer: TrainerConfig) -> None:
    """Refuse a checkpoint whose place in the data or in the schedule this run does not have."""
    step = state.step
    skipped = sorted(int(batch) for batch in state.extra.get(GUARD, {}).get("skipped", ()))
    batches = batch_of(step, skipped)
    if state.next_sample != batches * trainer.batch_size:
        raise CheckpointError(
            f"{source} was written with trainer.batch_size={state.next_sample // max(batches, 1)}, this run has "
            f"{trainer.batch_size}, so the data position would not be the same; restore the batch size"
        )
    if step > trainer.max_steps:
        raise CheckpointError(f"{source} is after step {step}, but trainer.max_steps is {trainer.max_steps}; raise it")


THE_MODEL = {
    "moe": (
        "num_experts", "top_k", "moe_intermediate_size", "num_shared_experts", "router", "normalize_topk",
        "routed_scale", "num_groups", "topk_groups", "router_logit_cap",
    ),
    "model": (
        "vocab_size", "hidden_size", "num_layers", "num_dense_layers", "intermediate_size", "num_heads", "num_kv_heads",
        "head_dim", "qk_norm", "rope_theta", "norm_eps", "tie_embeddings",
    ),
}  # fmt: skip
"""Settings that say what the weights mean: with another value the checkpoint is another model's, fitting shapes or not."""
ALWAYS_FREE = {"run", "recipe", "trainer.resume", "trainer.max_steps", "parallel.nproc"}
"""What a resume may change without a word."""


def check_settings(source: Path, before: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Refuse a resume as another model; say every other setting that differs from the checkpoint's.

    Raises CheckpointError naming each setting with both values. A setting that one side does not know is passed over.
    """
    changes = [
        (path, old, new)
        for path, old, new in _differences(before, now)
        if path not in ALWAYS_FREE and path.split(".")[0] not in ALWAYS_FREE
    ]
    shown = {path: f"{path} was {old}, is {new}" for path, old, new in changes}
    model = [text for path, text in shown.items() if path.split(".")[-1] in THE_MODEL.get(path.split(".")[0], ())]
    if model:
        raise CheckpointError(
            f"{source} holds another model: {'; '.join(model)}; restore these, as `switchyard run RUN/config.yaml` does, "
            "or train it anew in another run.dir"
        )
    if shown:
        say(f"settings changed since the checkpoint: {'; '.join(shown.values())}")


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in [name for name in now if name in before]:
            yield from _differences(before[name], now[name], f"{path}.{name}" if path else name)
    elif before != now:
        yield path, before, now


def _to_standard_error(text: str) -> None:
    print(f"switchyard: {text}", file=sys.stderr, flush=True)


def _to_nobody(text: str) -> None:
    """Of ranks other than 0."""
