"""Which checkpoint a run goes on from, and taking it over: all ranks the same one, or none (collective)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from backends.device import Backend
from moe.errors import CheckpointError
from moe.train.checkpoint.folder import (
    checkpoint_path,
    find_checkpoints,
    read_latest,
    run_identity,
    set_aside,
    step_of_path,
)
from moe.train.checkpoint.manifest import Manifest, TrainState, check_place, read_manifest, read_state, verify_folder
from moe.train.checkpoint.protocol import Gather, agree
from moe.train.checkpoint.snapshot import Loaded, files_needed, read_parts, take_over
from moe.train.checkpoint.tensor_file import DamagedCheckpointError
from moe.train.engine import Engine
from moe.train.mesh import Mesh

Say = Callable[[str], None]


def gather_over(group: dist.ProcessGroup | None, size: int) -> Gather:
    """The Gather of a process group. Pickle passes between our own ranks here, and never comes from a file."""

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def newest_verified(root: Path, *, engine: Engine, mesh: Mesh, say: Say) -> Path | None:
    """The newest checkpoint that every rank has verified; None when there is none at all (collective).

    Newer ones that any rank found damaged are named, and put aside as `step-N.bad-M` once an older one is found good.
    Raises CheckpointError when there are checkpoints but no good one, for a run must not begin anew unasked.
    """
    gather = gather_over(mesh.world_group, mesh.world_size)
    seen = gather([step for path in find_checkpoints(root) if (step := step_of_path(path)) is not None])
    steps = sorted({step for own in seen for step in own}, reverse=True)
    if mesh.rank == 0:
        _, problem = read_latest(root)
        if problem is not None:
            say(f"WARNING: {problem}")
    damaged: list[Path] = []
    told: list[str] = []
    for step in steps:
        path = checkpoint_path(root, step)
        problem = _verified_by_all(path, root, engine=engine, mesh=mesh, gather=gather)
        if problem is None:
            agree(lambda: [set_aside(bad) for bad in damaged] if mesh.rank == 0 else None, gather, "putting aside")
            if damaged:
                say(f"WARNING: going back to {path.name}; {', '.join(p.name for p in damaged)} put aside as .bad-N")
            return path
        say(f"WARNING: {problem}")
        damaged.append(path)
        told.append(problem)
    if damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {root} is good; restore one, or choose another run.dir:\n  "
            + "\n  ".join(told)
        )
    return None


def _verified_by_all(path: Path, root: Path, *, engine: Engine, mesh: Mesh, gather: Gather) -> str | None:
    """None when every rank has verified what it will read (and all ranks together every file), else what is wrong.

    Raises CheckpointError for what is not damage, such as another format: an older one would not help.
    """
    problem, damage = None, True
    try:
        if not path.is_dir():
            raise DamagedCheckpointError(f"{path} is not there")
        manifest = _verify_own(path, root, engine=engine, mesh=mesh)
        identity = run_identity(root)
        if identity is not None and manifest.run != identity:
            raise DamagedCheckpointError(
                f"{path} was written by run {manifest.run}, this folder is of run {identity}; to go on from it all the "
                "same, name it with trainer.resume=PATH in a new run.dir"
            )
    except CheckpointError as error:
        problem, damage = str(error), isinstance(error, DamagedCheckpointError)
    except Exception as error:
        problem = f"{path}: {type(error).__name__}: {error}"
    answers = gather((problem, damage))
    for rank, (message, is_damage) in enumerate(answers):
        if message is not None and not is_damage:
            raise CheckpointError(f"rank {rank}: {message}")
    bad = [(rank, message) for rank, (message, _) in enumerate(answers) if message is not None]
    return f"rank {bad[0][0]}: {bad[0][1]}" if bad else None


def _verify_own(path: Path, root: Path | None, *, engine: Engine, mesh: Mesh) -> Manifest:
    check_place(path, root)
    listed = read_manifest(path)
    return verify_folder(path, files_needed(listed, engine.module, mesh), root=root)


def load_checkpoint(
    path: Path,
    *,
    engine: Engine,
    mesh: Mesh,
    backend: Backend,
    fingerprints: Mapping[str, Any],
    accept_changed_data: bool = False,
    verified: bool = False,
    say: Say = print,
) -> TrainState:
    """Take over everything from `path` and return the run's position (collective).

    Weights and moments go by global name and expert id, so any layout finds its own; generator states are taken over
    only where this rank had one. verified: `newest_verified` has just returned it.
    Raises CheckpointError on every rank when any rank cannot; then nothing has been taken over anywhere.
    """
    gather = gather_over(mesh.world_group, mesh.world_size)
    what = f"loading {path}"
    results: list[tuple[TrainState, Loaded]] = []

    def read() -> None:
        manifest = read_manifest(path) if verified else _verify_own(path, None, engine=engine, mesh=mesh)
        state = read_state(path)
        changed = changed_fingerprints(path, state, fingerprints)
        if changed and not accept_changed_data:
            raise CheckpointError(changed)
        if changed and mesh.rank == 0:
            say(f"WARNING: {changed} (trainer.accept_changed_data=true, so the run goes on)")
        results.append((state, read_parts(path, manifest, engine.module, mesh)))

    agree(read, gather, what)
    state, loaded = results[0]
    take_over(loaded, engine, backend)
    return state


def changed_fingerprints(path: Path, state: TrainState, fingerprints: Mapping[str, Any]) -> str:
    """What differs between the data of the checkpoint and that of this run; empty when nothing does."""
    faults = [
        f"the {name} fingerprint is {state.fingerprints.get(name)!r}, this run has {expected!r}"
        for name, expected in fingerprints.items()
        if state.fingerprints.get(name) != expected
    ]
    if not faults:
        return ""
    return (
        f"{path}: {'; '.join(faults)}; a resume must see the same data and tokenizer: restore them, start anew with "
        "trainer.resume=never, or go on with the changed ones with trainer.accept_changed_data=true"
    )
