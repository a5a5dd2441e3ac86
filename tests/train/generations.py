"""Small checkpoints without a model, for tests of what lies on disk. Torch-free."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe.train.checkpoint.manifest import MANIFEST, Manifest, TrainState, manifest_bytes, read_manifest, verify_folder
from moe.train.checkpoint.protocol import Keep, Snapshot, TensorFile, Written, alone, write_checkpoint
from moe.train.checkpoint.tensor_file import DamagedCheckpointError, RawTensor


def raw(values: Any, dtype: str = "F32") -> RawTensor:
    """Numbers as fp32 (or other) bytes."""
    array = np.ascontiguousarray(values, {"F32": np.float32, "U8": np.uint8, "I64": np.int64}[dtype])
    return RawTensor(dtype, array.shape, array.reshape(-1).view(np.uint8))


def snapshot(step: int, size: int = 4096) -> Snapshot:
    """Two experts and `size` dense numbers; every value tells the step."""
    dense = {"weight/a": raw(np.full((size,), step)), "weight/b": raw(np.arange(size) + step), "buffer/c": raw([step])}
    experts = {"weight/experts.w": raw([[step, step], [step + 1, step + 1]])}
    return Snapshot(
        state=TrainState(step=step, next_sample=8 * step, fingerprints={"data": "abc"}, settings={"lr": 0.1}),
        files={
            "dense.safetensors": TensorFile(tensors=dense, metadata={"steps": str(step)}),
            "experts-0.safetensors": TensorFile(tensors=experts, metadata={"steps": str(step)}, expert_ids=(0, 1)),
            "rank-0.safetensors": TensorFile(tensors={"cpu": raw([1, 2, 3], "U8")}, metadata={}),
        },
        layout={"world_size": 1, "expert": 1},
        versions={},
    )


def write(root: Path, step: int, keep: Keep | None = None, size: int = 4096, **options: Any) -> Written:
    """One rank's whole save."""
    return write_checkpoint(root, snapshot(step, size), rank=0, gather=alone, keep=keep or Keep(), **options)


def good_steps(root: Path) -> list[int]:
    """Steps of the folders that verify to the last byte."""
    steps = []
    for path in sorted(root.glob("step-??????")):
        try:
            steps.append(verify_folder(path, root=root).step)
        except DamagedCheckpointError:
            continue
    return steps


def edit_manifest(folder: Path, change: Callable[[Manifest], Manifest] | None = None, **values: Any) -> None:
    """Rewrite a manifest with a right sum, as a malicious hand would."""
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_bytes(manifest_bytes(change(manifest) if change else replace(manifest, **values)))


def edit_json(path: Path, **values: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
