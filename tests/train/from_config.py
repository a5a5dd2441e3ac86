"""An engine as a run would build it, for tests that need no data and no loop."""

from collections.abc import Callable
from typing import Any

from moe.schema import RunConfig
from moe.train.config import Checkpointing


def build(config: RunConfig) -> tuple[Any, Any, Any]:
    """(engine, mesh, backend) of this rank on the CPU; the caller closes engine and mesh.

    Imports inside, for ranks are sent functions of modules that shall not load torch early.
    """
    from backends.resolve import resolve_backend
    from moe.train.build import build_engine
    from moe.train.mesh import build_mesh
    from moe.train.parallelize import build_model, weight_dtype

    backend = resolve_backend("cpu", 0)
    mesh = build_mesh(expert_size=config.parallel.expert, sequence_size=config.parallel.sequence, device=backend.device)
    backend.seed(config.trainer.seed)
    module = build_model(
        config.model, config.moe, mesh=mesh, dispatch=config.dispatch, ops=config.backend.ops,
        seed=config.trainer.seed, dtype=weight_dtype(config.engine.dtype),
        checkpoint_blocks=config.engine.activation_checkpointing is Checkpointing.full,
        placement=config.parallel.expert_placement,
    )  # fmt: skip
    engine = build_engine(
        module, mesh=mesh, backend=backend, optim=config.optim, engine=config.engine,
        accumulation=config.trainer.accumulation,
    )  # fmt: skip
    return engine, mesh, backend


def with_engine(config: RunConfig, work: Callable[[Any, Any, Any], Any]) -> Any:
    """work(engine, mesh, backend), with engine and mesh closed afterwards."""
    import torch.distributed as dist

    engine, mesh, backend = build(config)
    try:
        return work(engine, mesh, backend)
    finally:
        engine.close()
        mesh.close()
        dist.barrier()  # no rank goes on to the next case with a group that another is closing
