"""Which engine a run gets (on the data path, between the model's part of this rank and the loop)."""

import os
import sys

from backends.device import Backend
from moe.model.transformer import Transformer
from moe.train.config import EngineConfig, EngineKind, OptimConfig
from moe.train.engine import Engine
from moe.train.engine_torch import TorchEngine
from moe.train.mesh import Mesh


def build_engine(
    module: Transformer,
    *,
    mesh: Mesh,
    backend: Backend,
    optim: OptimConfig,
    engine: EngineConfig,
    accumulation: int,
) -> Engine:
    """Build the engine that `engine.kind` names (collective). DeepSpeed is imported only if it is asked for.

    module: parallelised and initialised on mesh.device. accumulation: calls of `backward` between two steps.
    Raises ValueError when DeepSpeed is already bound to another kind of device in this process.
    """
    if engine.kind is EngineKind.torch:
        return TorchEngine(module, mesh=mesh, optim=optim, engine=engine, accumulation=accumulation)
    if "deepspeed" not in sys.modules:
        # DeepSpeed chooses its kind of device once, at import. One that is imported already is checked by the engine.
        os.environ["DS_ACCELERATOR"] = backend.deepspeed_accelerator
    from moe.train.engine_deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(module, mesh=mesh, backend=backend, optim=optim, engine=engine, accumulation=accumulation)
