"""Between an engine and the bytes of a checkpoint: what is saved, under which names, and what must fit on loading.

    dense.safetensors       rank 0: `weight/NAME` (fp32 master), `exp_avg/NAME`, `exp_avg_sq/NAME` of every dense
                            parameter, `buffer/NAME` of every buffer (expert biases, a frozen router)
    experts-P.safetensors   expert rank P: the same of its experts; manifest and header name their global ids
    rank-R.safetensors      rank R: states of its random generators

No name and no shape in it depends on the engine, its stage or its dtype; so any layout can read what any other wrote.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from backends.device import Backend
from moe.errors import CheckpointError
from moe.model.transformer import Transformer
from moe.train.checkpoint.manifest import Manifest, TrainState
from moe.train.checkpoint.protocol import Snapshot, TensorFile
from moe.train.checkpoint.tensor_file import Entry, RawTensor, read_header, read_tensor
from moe.train.engine import Engine, ParameterState
from moe.train.mesh import Mesh
from moe.train.optim import is_expert

DENSE = "dense.safetensors"
FIELDS = tuple(f.name for f in fields(ParameterState) if f.name != "step")
"""Tensors of a parameter's state."""
_REQUIRED = {f.name for f in fields(ParameterState) if f.default is MISSING}
"""Those without which there is no state; a field with a default is one that some optimizers lack."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def take_snapshot(engine: Engine, state: TrainState, *, mesh: Mesh, backend: Backend) -> Snapshot:
    """Copy this rank's part of everything to host memory (collective). A rank that writes no copy makes none."""
    dense: dict[str, RawTensor] = {}
    experts: dict[str, RawTensor] = {}
    dense_steps: dict[str, int] = {}
    expert_steps: dict[str, int] = {}
    for name, parameter in engine.parameter_states():
        expert = is_expert(name)
        if not (mesh.edp_rank == 0 if expert else mesh.rank == 0):
            continue
        (expert_steps if expert else dense_steps)[name] = parameter.step
        for field in FIELDS:
            value = getattr(parameter, field)
            if value is not None:
                (experts if expert else dense)[f"{field}/{name}"] = to_raw(value.detach())
    files = {}
    if mesh.rank == 0:
        dense |= {f"buffer/{name}": to_raw(buffer) for name, buffer in _buffers(engine.module).items()}
        files[DENSE] = TensorFile(tensors=dense, metadata={"steps": _pack_steps(dense_steps)})
    if experts:
        ids = _local_expert_ids(engine.module)
        files[f"experts-{mesh.ep_rank}.safetensors"] = TensorFile(
            tensors=experts, metadata={"steps": _pack_steps(expert_steps)}, expert_ids=ids
        )
    generators = {"cpu": to_raw(torch.get_rng_state()), "device": to_raw(backend.rng_state())}
    files[_rank_file(mesh.rank)] = TensorFile(tensors=generators, metadata={})
    return Snapshot(
        state=state,
        files=files,
        layout={"world_size": mesh.world_size, "expert": mesh.expert_size, "sequence": mesh.sequence_size},
        versions={"torch": torch.__version__},
    )


def files_needed(manifest: Manifest, module: Transformer, mesh: Mesh) -> set[str]:
    """Files that this rank reads, and its share of those that no rank reads any more, so that each is verified."""
    local = set(_local_expert_ids(module))
    common = {name for name in manifest.files if name == DENSE or name.endswith(".json")}
    experts = {name: set(entry.expert_ids) for name, entry in manifest.files.items() if entry.expert_ids}
    generators = {_rank_file(rank) for rank in range(mesh.world_size)}
    orphans = sorted(manifest.files.keys() - common - experts.keys() - generators)
    own = {name for name, ids in experts.items() if local & ids} | ({_rank_file(mesh.rank)} & manifest.files.keys())
    return common | own | set(orphans[mesh.rank :: mesh.world_size])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank's part, read and fitting, not yet taken over."""

    states: Mapping[str, ParameterState]
    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Tensor]
    """Empty when the checkpoint was written by fewer ranks."""


def read_parts(folder: Path, manifest: Manifest, module: Transformer, mesh: Mesh) -> Loaded:
    """Read what this rank needs, whatever layout wrote it.

    Raises CheckpointError with a table of all that does not fit the model, before any tensor is read;
    DamagedCheckpointError when a tensor's bytes are not what was written.
    """
    sources = _Sources(folder, manifest)
    wanted = _wanted(module)
    misfits = sources.misfits(wanted, _local_expert_ids(module), _num_experts(module))
    if misfits:
        raise CheckpointError(
            f"{folder} does not fit the model ({len(misfits)} differences); resume with the configuration in the run's "
            "config.yaml:\n" + "\n".join(f"  {line}" for line in misfits)
        )
    ids = _local_expert_ids(module)
    states = {}
    for name in wanted.parameters:
        values = {
            field: sources.read(f"{field}/{name}", ids if is_expert(name) else None)
            for field in FIELDS
            if sources.has(f"{field}/{name}")
        }
        states[name] = ParameterState(**values, step=sources.step_of(name))
    return Loaded(
        states=states,
        buffers={name: sources.read(f"buffer/{name}", None) for name in wanted.buffers},
        generators=sources.read_generators(_rank_file(mesh.rank)),
    )


def take_over(loaded: Loaded, engine: Engine, backend: Backend) -> None:
    """Put what was read into engine, module and generators (collective)."""
    engine.load_parameter_states(loaded.states)
    with torch.no_grad():
        for name, buffer in _buffers(engine.module).items():
            buffer.copy_(loaded.buffers[name])
    if loaded.generators:
        torch.set_rng_state(loaded.generators["cpu"])
        backend.set_rng_state(loaded.generators["device"])


def to_raw(tensor: Tensor) -> RawTensor:
    """A copy of a tensor's bytes in host memory."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    return RawTensor(_NAMES[host.dtype], tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy())


def from_raw(raw: RawTensor) -> Tensor:
    """The tensor of these bytes; it shares their memory."""
    return torch.from_numpy(raw.data).view(_DTYPES[raw.dtype]).reshape(raw.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Names that the model has, with dtype and shape; expert stacks without their first dimension."""

    parameters: Mapping[str, tuple[str, tuple[int, ...]]]
    buffers: Mapping[str, tuple[str, tuple[int, ...]]]


class _Sources:
    """Every tensor of a checkpoint, by key."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._dense: dict[str, Entry] = {}
        self._experts: dict[str, dict[str, Entry]] = {}
        self._ids: dict[str, tuple[int, ...]] = {}
        self._steps: dict[str, str] = {}
        for name, entry in manifest.files.items():
            if name == DENSE or entry.expert_ids is not None:
                header = read_header(folder / name)
                self._steps[name] = header.metadata.get("steps", "0")
                if entry.expert_ids is None:
                    self._dense = header.entries
                else:
                    self._ids[name] = entry.expert_ids
                    for key, value in header.entries.items():
                        self._experts.setdefault(key, {})[name] = value

    def has(self, key: str) -> bool:
        return key in self._dense or key in self._experts

    def step_of(self, name: str) -> int:
        file = next(iter(self._experts[f"weight/{name}"])) if is_expert(name) else DENSE
        steps = json.loads(self._steps[file])
        return int(steps[name] if isinstance(steps, dict) else steps)

    def read(self, key: str, expert_ids: tuple[int, ...] | None) -> Tensor:
        """A dense tensor, or the stack of these experts in this order."""
        if expert_ids is None:
            return self._read_whole(DENSE, key, self._dense[key])
        rows: dict[int, Tensor] = {}
        entries = self._experts[key]
        for file, entry in entries.items():
            if set(self._ids[file]) & set(expert_ids):
                rows |= zip(self._ids[file], self._read_whole(file, key, entry), strict=True)
        if not expert_ids:
            entry = next(iter(entries.values()))
            return torch.empty(0, *entry.shape[1:], dtype=_DTYPES[entry.dtype])
        return torch.stack([rows[expert] for expert in expert_ids])

    def read_generators(self, file: str) -> dict[str, Tensor]:
        if file not in self._manifest.files:
            return {}
        entries = read_header(self._folder / file).entries
        return {key: self._read_whole(file, key, entry) for key, entry in entries.items()}

    def _read_whole(self, file: str, key: str, entry: Entry) -> Tensor:
        expected = self._manifest.files[file].sum.tensors.get(key)
        return from_raw(read_tensor(self._folder / file, key, entry, expected))

    def misfits(self, wanted: _Wanted, local_ids: tuple[int, ...], num_experts: int) -> list[str]:
        """A line for each tensor that is missing, left over, or of another shape or dtype; nothing is ever cast."""
        found: dict[str, set[tuple[str, tuple[int, ...]]]] = {
            key: {(e.dtype, e.shape)} for key, e in self._dense.items()
        }
        for key, files in self._experts.items():
            found[key] = {(entry.dtype, entry.shape[1:]) for entry in files.values()}
        expected = {f"buffer/{name}": value for name, value in wanted.buffers.items()}
        for field in FIELDS:
            keys = {f"{field}/{name}": value for name, value in wanted.parameters.items()}
            expected |= {key: value for key, value in keys.items() if field in _REQUIRED or key in found}
        lines = []
        for key in sorted(expected.keys() | found.keys()):
            want = expected.get(key)
            have = sorted(found.get(key, set()))
            if have != [want]:
                shown = " and ".join(_told(value) for value in have) or "nothing"
                lines.append(f"{key} has {shown}, the model wants {_told(want)}")
        saved = sorted(expert for ids in self._ids.values() for expert in ids)
        if saved != list(range(num_experts)):
            lines.append(f"experts {saved} are in its files, the model wants each of {list(range(num_experts))} once")
        return lines


def _told(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing by this name" if value is None else f"shape {list(value[1])} {value[0]}"


def _wanted(module: Transformer) -> _Wanted:
    parameters = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # ZeRO-3 keeps a parameter's whole shape beside the empty parameter.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            parameters[name] = ("F32", shape[1:] if is_expert(name) else shape)
    buffers = {name: (_NAMES[value.dtype], tuple(value.shape)) for name, value in _buffers(module).items()}
    return _Wanted(parameters=parameters, buffers=buffers)


def _local_expert_ids(module: Transformer) -> tuple[int, ...]:
    layers = module.moe_layers()
    return tuple(layers[0].dispatcher.local_expert_ids) if layers else ()


def _num_experts(module: Transformer) -> int:
    layers = module.moe_layers()
    return layers[0].num_experts if layers else 0


def _buffers(module: Transformer) -> dict[str, Tensor]:
    persistent = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _pack_steps(steps: Mapping[str, int]) -> str:
    """One number when all parameters have taken as many steps, as they nearly always have."""
    different = set(steps.values())
    return json.dumps(next(iter(different)) if len(different) == 1 else dict(steps))
