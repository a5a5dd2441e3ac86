"""Rules on how a run is spread over processes."""

from collections.abc import Iterator

from dispatch.placement import place_experts
from moe.rules.words import divisors, multiples_near
from moe.schema import Problem, RunConfig
from moe.train.config import EngineKind


def processes(config: RunConfig) -> Iterator[Problem]:
    moe, parallel, trainer = config.moe, config.parallel, config.trainer
    if parallel.nproc % parallel.expert:
        yield Problem(
            path="parallel.expert",
            value=parallel.expert,
            rule=f"must divide the number of processes, parallel.nproc ({parallel.nproc})",
            way_out=(
                f"choose one of {divisors(parallel.nproc)}, "
                f"or parallel.nproc {multiples_near(parallel.nproc, parallel.expert)}"
            ),
            involves=("parallel.nproc",),
        )
    if parallel.expert > moe.num_experts:
        yield Problem(
            path="parallel.expert",
            value=parallel.expert,
            rule=f"must be at most moe.num_experts ({moe.num_experts}): every rank of an expert group holds an expert",
            way_out=f"choose {moe.num_experts} or less, or more experts",
            involves=("moe.num_experts",),
        )
    yield from _sequence(config)
    if parallel.nproc % parallel.sequence == 0:
        parts = parallel.nproc // parallel.sequence * trainer.accumulation
        ranks = "parallel.nproc" if parallel.sequence == 1 else "parallel.nproc / parallel.sequence"
        if trainer.batch_size % parts:
            yield Problem(
                path="trainer.batch_size",
                value=trainer.batch_size,
                rule=(
                    f"must be divisible by {ranks} * trainer.accumulation "
                    f"({parallel.nproc // parallel.sequence} * {trainer.accumulation} = {parts})"
                ),
                way_out=f"choose {multiples_near(trainer.batch_size, parts)}",
                involves=("parallel.nproc", "parallel.sequence", "trainer.accumulation"),
            )
    nodes = parallel.ranks_per_node
    if nodes is not None and parallel.expert % nodes and nodes % parallel.expert:
        yield Problem(
            path="parallel.ranks_per_node",
            value=nodes,
            rule=(
                f"must divide parallel.expert ({parallel.expert}) or be a multiple of it: an expert group covers whole "
                "nodes or lies inside one"
            ),
            way_out=(
                f"choose one of {divisors(parallel.expert)}, or parallel.expert one of {divisors(nodes)} or "
                f"{multiples_near(parallel.expert, nodes)}"
            ),
            involves=("parallel.expert",),
        )


def _sequence(config: RunConfig) -> Iterator[Problem]:
    """Rows shared by ranks."""
    parallel, model, data = config.parallel, config.model, config.data
    if parallel.nproc % parallel.sequence:
        yield Problem(
            path="parallel.sequence",
            value=parallel.sequence,
            rule=f"must divide the number of processes, parallel.nproc ({parallel.nproc})",
            way_out=(
                f"choose one of {divisors(parallel.nproc)}, "
                f"or parallel.nproc {multiples_near(parallel.nproc, parallel.sequence)}"
            ),
            involves=("parallel.nproc",),
        )
    if model.num_heads % parallel.sequence:
        yield Problem(
            path="parallel.sequence",
            value=parallel.sequence,
            rule=f"must divide model.num_heads ({model.num_heads}): each rank attends with an equal part of the heads",
            way_out=f"choose one of {divisors(model.num_heads)}",
            involves=("model.num_heads",),
        )
    if data.seq_len < parallel.sequence:
        yield Problem(
            path="parallel.sequence",
            value=parallel.sequence,
            rule=f"must be at most data.seq_len ({data.seq_len}): every rank has positions of its own",
            way_out=f"choose {data.seq_len} or less, or longer rows",
            involves=("data.seq_len",),
        )


def placement(config: RunConfig) -> Iterator[Problem]:
    moe, parallel, engine = config.moe, config.parallel, config.engine
    if parallel.expert > moe.num_experts:
        return
    path, value = "moe.num_experts", str(moe.num_experts)
    way_out = (
        f"choose {multiples_near(moe.num_experts, parallel.expert)}, "
        f"or parallel.expert one of {divisors(moe.num_experts)}"
    )
    if parallel.expert_placement is not None:
        path, value = "parallel.expert_placement", str(parallel.expert_placement)
        way_out = "name every rank equally often"
        try:
            place_experts(moe.num_experts, parallel.expert, parallel.expert_placement)
        except ValueError as error:
            rule, _, correction = str(error).removeprefix("the expert placement ").partition("; ")
            yield Problem(
                path=path, value=value, rule=rule, way_out=correction, involves=("moe.num_experts", "parallel.expert")
            )
            return
    counts = place_experts(moe.num_experts, parallel.expert, parallel.expert_placement).experts_per_rank
    if len(set(counts)) > 1 and engine.kind is EngineKind.deepspeed and engine.zero_stage == 2:
        yield Problem(
            path=path,
            value=value,
            rule=(
                f"must be divisible by parallel.expert ({parallel.expert}) with engine.zero_stage={engine.zero_stage}"
                if parallel.expert_placement is None
                else f"must give every rank equally many experts with engine.zero_stage={engine.zero_stage}"
            )
            + ": while backward runs DeepSpeed cuts the reduction of all gradients into pieces by how much a rank has, so "
            "unequal ranks wait for each other forever",
            way_out=f"{way_out}, or engine.zero_stage=1, or engine.kind=torch",
            involves=("moe.num_experts", "parallel.expert", "engine.kind", "engine.zero_stage"),
        )
