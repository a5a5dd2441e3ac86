"""Rules on the engine."""

from collections.abc import Iterator

from moe.schema import Problem, RunConfig
from moe.train.config import EngineKind, Offload, OffloadAdam
from moe.train.zero.ds_config import Ours, conflicts, read_ds_config


def offload(config: RunConfig) -> Iterator[Problem]:
    """Where masters and moments live, and who updates them there."""
    engine = config.engine
    if engine.offload_optimizer is Offload.none:
        if engine.offload_adam is not OffloadAdam.torch:
            yield Problem(
                path="engine.offload_adam",
                value=engine.offload_adam.name,
                rule="has no effect with engine.offload_optimizer=none",
                way_out="set engine.offload_optimizer=cpu, or leave it out",
                involves=("engine.offload_optimizer",),
            )
    elif engine.kind is not EngineKind.deepspeed or engine.zero_stage < 2:
        yield Problem(
            path="engine.offload_optimizer",
            value=engine.offload_optimizer.name,
            rule=(
                "must be none with engine.kind=torch"
                if engine.kind is not EngineKind.deepspeed
                else f"must be none with engine.zero_stage={engine.zero_stage}: stages 2 and 3 alone can offload"
            ),
            way_out="set engine.zero_stage=2 or 3 (engine.kind=deepspeed), or engine.offload_optimizer=none",
            involves=("engine.kind", "engine.zero_stage"),
        )


def ds_config(config: RunConfig) -> Iterator[Problem]:
    """A DeepSpeed configuration file: what contradicts our settings, with both sources, and what cannot be taken over."""
    engine, moe, parallel = config.engine, config.moe, config.parallel
    if engine.ds_config is None:
        return
    if engine.kind is not EngineKind.deepspeed:
        yield Problem(
            path="engine.ds_config",
            value=engine.ds_config,
            rule=f"has no effect with engine.kind={engine.kind.name}",
            way_out="set engine.kind=deepspeed, or engine.ds_config=null",
            involves=("engine.kind",),
        )
        return
    try:
        file = read_ds_config(engine.ds_config)
    except ValueError as error:
        yield Problem(path="engine.ds_config", value=engine.ds_config, rule=str(error), way_out="name a JSON file")
        return
    equal_ranks = moe.num_experts % parallel.expert == 0
    if parallel.expert_placement is not None:
        equal_ranks = len({parallel.expert_placement.count(rank) for rank in range(parallel.expert)}) == 1
    ours = Ours(
        engine=engine,
        optim=config.optim,
        accumulation=config.trainer.accumulation,
        batch_size=config.trainer.batch_size,
        num_ranks=parallel.nproc // parallel.sequence,
        equal_ranks=equal_ranks,
    )
    for conflict in conflicts(file, ours):
        yield Problem(
            path=f"{engine.ds_config}:{conflict.key}",
            value=conflict.value,
            rule=conflict.rule,
            way_out=conflict.way_out,
            involves=(conflict.setting,) if conflict.setting else (),
        )
