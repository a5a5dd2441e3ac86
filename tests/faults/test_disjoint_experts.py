"""Ranks that use different experts: every engine stays in step, and the result is that of one process."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backends import cpu
from backends.config import OpsConfig
from dispatch.config import DispatchConfig
from moe.model.batch import TokenBatch
from moe.model.routers.replay import replaying
from moe.train.build import build_engine
from moe.train.config import OptimConfig
from moe.train.engine import Engine
from moe.train.mesh import Mesh, build_mesh
from moe.train.parallelize import build_model
from moe.train.step import run_step
from tests.process_pool import ProcessPool
from tests.train.test_engines import (
    MODEL,
    MOE,
    ROWS,
    TOKENS,
    TORCH,
    ZERO,
    Kind,
    counts_of,
    global_batch,
    local_part,
    one_rank_mesh,
    share,
    strict,
)

Pools = Callable[[int], ProcessPool]
STEPS = 6
# Adam's first steps are g / (|g| + eps): with the default eps, rounding of a tiny gradient moves a weight visibly.
OPTIM = OptimConfig(lr=1e-3, clip_norm=0.3, eps=1e-4)


def routes_of(step: int) -> Tensor:
    """Rows of rank 0 go to experts 0 and 1, those of rank 1 to 2 and 3; in the last step the other way round."""
    ids = torch.empty(ROWS, TOKENS, 2, dtype=torch.int64)
    first, second = (torch.tensor([0, 1]), torch.tensor([2, 3]))
    if step == STEPS - 1:
        first, second = second, first
    ids[: ROWS // 2], ids[ROWS // 2 :] = first, second
    return ids


def engine_of(kind: Kind, mesh: Mesh) -> Engine:
    module = build_model(
        MODEL, MOE, mesh=mesh, dispatch=DispatchConfig(), ops=OpsConfig(), seed=0, dtype=torch.float32,
        checkpoint_blocks=False,
    )  # fmt: skip
    return build_engine(module, mesh=mesh, backend=cpu.make(0), optim=OPTIM, engine=kind.config, accumulation=1)


def train_forced(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    """Six steps along routes_of; the weights after them."""
    size = ROWS // mesh.world_size
    own = slice(mesh.rank * size, (mesh.rank + 1) * size)
    for step in range(STEPS):
        batch: TokenBatch = global_batch(step)
        layers = [layer.layer_index for layer in engine.module.moe_layers()]
        with replaying(engine.module, {layer: routes_of(step)[own] for layer in layers}):
            run_step(engine, share(batch, mesh, 1), counts_of(batch, mesh), mesh=mesh, moe=MOE, lr=OPTIM.lr)
    return {name: state.weight.clone() for name, state in engine.parameter_states()}


def disjoint_case(kind: Kind, expert_size: int) -> str:
    """Runs on both ranks."""
    alone = one_rank_mesh()
    expected = train_forced(engine_of(TORCH, alone), alone)
    mesh = build_mesh(expert_size=expert_size, device=torch.device("cpu"))
    with strict():
        engine = engine_of(kind, mesh)
        found = train_forced(engine, mesh)
        engine.close()
    digest = hashlib.sha256()
    for name, whole in expected.items():
        part = local_part(name, whole, mesh)
        torch.testing.assert_close(found[name], part, rtol=0, atol=1e-5 * float(whole.abs().max()))
        if part.shape == whole.shape:
            digest.update(found[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("expert_size", [1, 2])
@pytest.mark.parametrize("kind", [TORCH, *ZERO], ids=str)
def test_disjoint_experts_do_not_hang(process_pool: Pools, kind: Kind, expert_size: int) -> None:
    """A23: rank 0 uses experts 0 and 1 alone, rank 1 only 2 and 3, for five steps, then swapped; ends within a minute."""
    digests = process_pool(2).run(disjoint_case, kind, expert_size, timeout=60)
    assert len(set(digests)) == 1
