"""What a checkpoint costs: `python -m benchmarks.checkpoints [--hidden 512] [--folder DIR]` prints a table.

One process, the plain engine. Stall: what training waits for (the copy into host memory); the rest happens beside it.
"""

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from backends.resolve import resolve_backend
from moe.schema import RunConfig
from moe.train.build import build_engine
from moe.train.checkpoint.load import load_checkpoint, newest_verified
from moe.train.checkpoint.manifest import TrainState, verify_folder
from moe.train.checkpoint.protocol import Keep, alone, write_checkpoint
from moe.train.checkpoint.snapshot import take_snapshot
from moe.train.config import DType, EngineKind
from moe.train.mesh import build_mesh, process_group
from moe.train.parallelize import build_model, weight_dtype


def measure(hidden: int, folder: Path) -> list[tuple[str, float, int]]:
    """(what, seconds, bytes) of each part."""
    base = RunConfig(recipe="benchmark")
    config = replace(
        base,
        model=replace(base.model, hidden_size=hidden, intermediate_size=2 * hidden, num_layers=4, vocab_size=4096),
        moe=replace(base.moe, num_experts=16, moe_intermediate_size=hidden),
        engine=replace(base.engine, kind=EngineKind.torch, dtype=DType.fp32),
    )
    rows: list[tuple[str, float, int]] = []
    size = 0

    def timed(what: str, work: Any) -> Any:
        started = time.perf_counter()
        result = work()
        rows.append((what, time.perf_counter() - started, size))
        return result

    with process_group(collective="gloo", rank=0, world_size=1):
        backend = resolve_backend("cpu", 0)
        mesh = build_mesh(expert_size=1, device=backend.device)
        module = build_model(
            config.model, config.moe, mesh=mesh, dispatch=config.dispatch, ops=config.backend.ops, seed=0,
            dtype=weight_dtype(config.engine.dtype), checkpoint_blocks=False,
        )  # fmt: skip
        engine = build_engine(
            module, mesh=mesh, backend=backend, optim=config.optim, engine=config.engine, accumulation=1
        )
        state = TrainState(step=1, next_sample=0, fingerprints={})
        size = sum(3 * 4 * parameter.numel() for parameter in module.parameters())
        for _ in range(2):  # the second time, memory is warm as in a run
            snapshot = timed(
                "stall: snapshot in host memory", lambda: take_snapshot(engine, state, mesh=mesh, backend=backend)
            )
        timed("beside training: write, sync, read back", lambda: write_checkpoint(
            folder, snapshot, rank=0, gather=alone, keep=Keep()
        ))  # fmt: skip
        path = folder / "step-000001"
        timed("ckpt verify", lambda: verify_folder(path))
        timed("resume: find and verify", lambda: newest_verified(folder, engine=engine, mesh=mesh, say=print))
        timed("resume: read and take over", lambda: load_checkpoint(
            path, engine=engine, mesh=mesh, backend=backend, fingerprints={}, verified=True
        ))  # fmt: skip
        engine.close()
        mesh.close()
    return rows[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="width: the checkpoint grows with its square")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        table = Table("part", "seconds", "GB", "GB/s")
        for what, seconds, size in measure(arguments.hidden, folder):
            table.add_row(what, f"{seconds:.3f}", f"{size / 1e9:.3f}", f"{size / 1e9 / seconds:.2f}")
        Console().print(table)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
