"""Rules on the rest of a run: evaluation, the guard, data, ops."""

from collections.abc import Iterator

from backends.config import OP_IMPLEMENTATIONS
from moe.data.sources import source_problem
from moe.schema import Problem, RunConfig
from moe.train.config import GuardConfig, GuardPolicy
from moe.values import nearest


def evaluation(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.eval_every > 0 and trainer.eval_batches == 0:
        yield Problem(
            path="trainer.eval_every",
            value=trainer.eval_every,
            rule="has no effect with trainer.eval_batches=0",
            way_out="set trainer.eval_every=0, or trainer.eval_batches=8",
            involves=("trainer.eval_batches",),
        )


def guard(config: RunConfig) -> Iterator[Problem]:
    guard, fresh = config.guard, GuardConfig()
    if guard.policy is GuardPolicy.stop and guard.max_in_row != fresh.max_in_row:
        yield Problem(
            path="guard.max_in_row",
            value=guard.max_in_row,
            rule="has no effect with guard.policy=stop: the first bad step ends the run",
            way_out="choose guard.policy=skip or roll_back, or leave it out",
            involves=("guard.policy",),
        )
    if not guard.z_score and guard.window != fresh.window:
        yield Problem(
            path="guard.window",
            value=guard.window,
            rule="has no effect with guard.z_score=0",
            way_out="set guard.z_score=6, say, or leave it out",
            involves=("guard.z_score",),
        )
    if guard.policy is GuardPolicy.roll_back and config.trainer.save_every == 0:
        yield Problem(
            path="guard.policy",
            value="roll_back",
            rule="needs a checkpoint to go back to, and trainer.save_every is 0",
            way_out="set trainer.save_every=50, say, or choose guard.policy=skip",
            involves=("trainer.save_every",),
        )


def sources(config: RunConfig) -> Iterator[Problem]:
    for source in config.data.sources:
        if problem := source_problem(source):
            rule, _, way_out = problem.removeprefix(f"data.sources: {source} ").partition("; ")
            yield Problem(path="data.sources", value=source, rule=rule, way_out=way_out)


def ops(config: RunConfig) -> Iterator[Problem]:
    for op, names in OP_IMPLEMENTATIONS.items():
        name = getattr(config.backend.ops, op)
        if name not in ("auto", *names):
            near = nearest(name, ["auto", *names])
            yield Problem(
                path=f"backend.ops.{op}",
                value=name,
                rule=f"must be auto or one of {', '.join(names)}",
                way_out=f"did you mean {near}?" if near else "see switchyard ls ops",
            )
    ops = config.backend.ops
    if ops.grouped_gemm != "auto" and ops.expert_mlp not in ("auto", "grouped"):
        yield Problem(
            path="backend.ops.grouped_gemm",
            value=ops.grouped_gemm,
            rule=f"has no effect with backend.ops.expert_mlp={ops.expert_mlp}",
            way_out="choose backend.ops.expert_mlp=grouped, or backend.ops.grouped_gemm=auto",
            involves=("backend.ops.expert_mlp",),
        )
