"""Checkpoints: tensors by global name and global expert id, everything else as JSON (on the data path, after the step).

    checkpoints/step-000010/
        dense.safetensors          rank 0: master, moments of every dense parameter, router buffers
        experts-0.safetensors      one per expert rank: the same of its experts; the header names their global ids
        rank-0.safetensors         per rank: generator states
        state.json                 format, step, layout, data position, fingerprints
    checkpoints/latest             name of the newest folder

Written beside as `step-N.tmp` and renamed when every rank has written and synced its files, so a folder without
`.tmp` is whole and a good one is never written over. No pickle is read or written.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.device import Backend
from moe.errors import CheckpointError
from moe.model.layer import MoELayer
from moe.model.transformer import Transformer
from moe.train.engine import Engine, ParameterState
from moe.train.mesh import Mesh

CHECKPOINTS = "checkpoints"
"""The folder of a run folder that holds them."""
FORMAT = "switchyard-checkpoint-1"
FIELDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What a run must know to go on, beside tensors."""

    step: int
    """Optimizer steps done."""
    next_sample: int
    """Data position: index of the first sample not yet used."""
    fingerprints: Mapping[str, Any]
    """Of data and tokenizer; a resume on other data is refused."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return root / f"step-{step:06d}"


def find_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints under root, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.glob("step-*") if path.suffix != ".tmp" and (path / "state.json").is_file())


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that `latest` names, or else the newest whole one (a kill may come between the two renames)."""
    whole = find_checkpoints(root)
    pointer = root / "latest"
    named = root / pointer.read_text().strip() if pointer.is_file() else None
    if named is not None and named.parent == root and named in whole and named >= whole[-1]:
        return named
    return whole[-1] if whole else None


def save_checkpoint(root: Path, state: TrainState, *, engine: Engine, mesh: Mesh, backend: Backend) -> Path:
    """Write the checkpoint of state.step and make it the latest (collective).

    Raises CheckpointError on every rank, naming the first rank that failed; what was there before stays untouched.
    """
    final = checkpoint_path(root, state.step)
    work = final.with_suffix(".tmp")

    def prepare() -> None:
        if mesh.rank == 0:
            if final.exists():
                raise CheckpointError(
                    f"{final} exists already and is never written over; remove it or choose another run.dir"
                )
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def write() -> None:
        dense, experts, steps = _collect(engine)
        if mesh.rank == 0:
            dense |= {f"buffer/{name}": value.cpu() for name, value in _buffers(engine.module).items()}
            _write_tensors(work / "dense.safetensors", dense, {"optimizer_step": str(steps)})
        if mesh.edp_rank == 0 and experts:
            header = {"optimizer_step": str(steps), "expert_ids": json.dumps(_local_expert_ids(engine.module))}
            _write_tensors(work / f"experts-{mesh.ep_rank}.safetensors", experts, header)
        generators = {"cpu": torch.get_rng_state(), "device": backend.rng_state()}
        _write_tensors(work / f"rank-{mesh.rank}.safetensors", generators, {})

    def publish() -> None:
        if mesh.rank == 0:
            record = {
                "format": FORMAT,
                "step": state.step,
                "next_sample": state.next_sample,
                "fingerprints": dict(state.fingerprints),
                "layout": {"world_size": mesh.world_size, "expert": mesh.expert_size},
                "torch": torch.__version__,
            }
            _write_synced(work / "state.json", json.dumps(record, indent=1).encode())
            _sync_folder(work)
            work.rename(final)
            _sync_folder(root)
            _write_synced(root / "latest.tmp", (final.name + "\n").encode())
            (root / "latest.tmp").rename(root / "latest")
            _sync_folder(root)

    try:
        for phase in (prepare, write, publish):
            _all_or_none(phase, mesh, what=f"saving {final}")
    except CheckpointError:
        if mesh.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    path: Path, *, engine: Engine, mesh: Mesh, backend: Backend, fingerprints: Mapping[str, Any]
) -> TrainState:
    """Take over everything from `path` and return the run's position (collective).

    Weights and moments go by global name and expert id, so another layout finds its experts too; generator states are
    taken over only where this rank has one. Raises CheckpointError on every rank when any rank cannot.
    """
    result: list[TrainState] = []
    states: dict[str, ParameterState] = {}

    def read() -> None:
        record = _read_record(path)
        for name, expected in fingerprints.items():
            found = record["fingerprints"].get(name)
            if found != expected:
                raise CheckpointError(
                    f"{path / 'state.json'}: the {name} fingerprint is {found!r}, this run has {expected!r}; "
                    "a resume must see the same data and tokenizer: restore them, or start anew with trainer.resume=never"
                )
        states.update(_read_states(path, engine.module))
        generators = path / f"rank-{mesh.rank}.safetensors"
        if generators.is_file():
            tensors = _read_tensors(generators)[0]
            torch.set_rng_state(tensors["cpu"])
            backend.set_rng_state(tensors["device"])
        result.append(
            TrainState(step=record["step"], next_sample=record["next_sample"], fingerprints=record["fingerprints"])
        )

    _all_or_none(read, mesh, what=f"loading {path}")
    engine.load_parameter_states(states)
    return result[0]


def _all_or_none(phase: Callable[[], None], mesh: Mesh, *, what: str) -> None:
    """Run phase; if any rank fails, raise on all of them, so that nobody waits for a rank that has left."""
    error: str | None = None
    try:
        phase()
    except (CheckpointError, OSError, SafetensorError, KeyError, ValueError) as exception:
        error = str(exception) if isinstance(exception, CheckpointError) else f"{type(exception).__name__}: {exception}"
    errors: list[str | None] = [None] * mesh.world_size
    dist.all_gather_object(errors, error, group=mesh.data_group)
    failed = [(rank, message) for rank, message in enumerate(errors) if message is not None]
    if failed:
        rank, message = failed[0]
        raise CheckpointError(f"{what}: rank {rank}: {message}")


def _collect(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """This rank's dense and expert tensors, copied to host, and the optimizer's step count (collective)."""
    expert_names = _expert_parameters(engine.module)
    dense: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    steps = 0
    for name, state in engine.parameter_states():
        target = experts if name in expert_names else dense
        steps = state.step
        for field in FIELDS:
            target[f"{field}/{name}"] = getattr(state, field).detach().to("cpu", torch.float32, copy=True).contiguous()
    return dense, experts, steps


def _expert_parameters(module: Transformer) -> set[str]:
    return {
        f"{prefix}.experts.{name}"
        for prefix, layer in module.named_modules()
        if isinstance(layer, MoELayer)
        for name, _ in layer.experts.named_parameters()
    }


def _local_expert_ids(module: Transformer) -> list[int]:
    return list(module.moe_layers()[0].dispatcher.local_expert_ids)


def _buffers(module: Transformer) -> dict[str, Tensor]:
    persistent = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _read_record(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder; trainer.resume takes auto, never, or such a folder")
    if path.suffix == ".tmp":
        raise CheckpointError(f"{path} was never finished; choose a folder without .tmp")
    try:
        record = json.loads((path / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / 'state.json'} cannot be read ({error}); choose an older checkpoint") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {record.get('format')!r}, this version reads {FORMAT!r}")
    return record


def _read_states(path: Path, module: Transformer) -> dict[str, ParameterState]:
    """State of every local parameter; buffers are put into the module."""
    dense, dense_header = _read_tensors(path / "dense.safetensors")
    expert_names = _expert_parameters(module)
    experts: dict[str, dict[int, Tensor]] = {}
    for file in sorted(path.glob("experts-*.safetensors")):
        tensors, header = _read_tensors(file)
        for key, stacked in tensors.items():
            rows = experts.setdefault(key, {})
            rows.update(zip(json.loads(header["expert_ids"]), stacked, strict=True))
    local_ids = _local_expert_ids(module) if expert_names else []

    def find(key: str, parameter: Tensor, is_expert: bool) -> Tensor:
        if is_expert:
            rows = experts.get(key, {})
            missing = [i for i in local_ids if i not in rows]
            if missing:
                raise CheckpointError(f"{path}: {key}: experts {missing} are not in any experts-*.safetensors")
            tensor = torch.stack([rows[i] for i in local_ids])
        elif key in dense:
            tensor = dense[key]
        else:
            raise CheckpointError(f"{path / 'dense.safetensors'} has no {key}; it belongs to another model")
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {key} has shape {list(tensor.shape)}, the model wants {list(parameter.shape)}; "
                "resume with the configuration in the run's config.yaml"
            )
        return tensor

    step = int(dense_header["optimizer_step"])
    states = {}
    for name, parameter in module.named_parameters():
        weight, exp_avg, exp_avg_sq = (find(f"{field}/{name}", parameter, name in expert_names) for field in FIELDS)
        states[name] = ParameterState(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=step)
    known = {f"{field}/{name}" for name in states for field in FIELDS}
    buffers = _buffers(module)
    unknown = sorted((set(dense) | set(experts)) - known - {f"buffer/{name}" for name in buffers})
    if unknown:
        raise CheckpointError(
            f"{path} holds tensors that this model lacks: {', '.join(unknown[:5])}; it belongs to another model"
        )
    for name, buffer in buffers.items():
        with torch.no_grad():
            buffer.copy_(find(f"buffer/{name}", buffer, False))
    return states


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 (no dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); choose an older checkpoint with trainer.resume=PATH"
        ) from error


def _write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    save_file(tensors, path, metadata=header)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
