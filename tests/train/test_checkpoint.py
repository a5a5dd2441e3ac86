"""Saving and resuming: whole, exact, and never over a good one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.model.config import RouterKind
from moe.schema import RunConfig
from moe.train.config import DType, EngineKind
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


def config_of(kind: EngineKind, dtype: DType, zero_stage: int, expert: int, batch_size: int = 8) -> RunConfig:
    """A small run with a selection bias, so that every kind of state is there."""
    base = RunConfig(recipe="resume")
    return replace(
        base,
        model=replace(base.model, vocab_size=300, hidden_size=32, num_layers=2, intermediate_size=48),
        moe=replace(
            base.moe, num_experts=4, moe_intermediate_size=16, router=RouterKind.sigmoid, load_balancing_coef=0.0,
            expert_bias_rate=1e-3,
        ),
        data=replace(base.data, seq_len=16),
        parallel=replace(base.parallel, expert=expert),
        engine=replace(base.engine, kind=kind, dtype=dtype, zero_stage=zero_stage),
        trainer=replace(base.trainer, max_steps=10, batch_size=batch_size, accumulation=2, seed=5, save_every=5,
                        eval_batches=1, eval_every=3),
        optim=replace(base.optim, warmup_steps=4),
    )  # fmt: skip


def run_on_rank(
    config: RunConfig, folder: str, data_folder: str, *, stop_after: int | None = None, evaluate_often: bool = True,
    fault: Callable[[str], None] | None = None, data: str = "abc", leave_after: int | None = None,
    on_step: Callable[[int], None] | None = None, prepare: Callable[[Any], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train with the real trainer in `folder`, from its newest checkpoint; returns losses by step and final state.

    fault: of the checkpoints' writer. data: the data's fingerprint. leave_after: step after which to end without a save.
    on_step: told of each step that has ended. prepare: gets the trainer before it begins.
    """
    import torch
    import torch.distributed as dist

    from moe.data.loader import HeldoutData, TrainingData
    from moe.diagnostics.record import StepRecord
    from moe.errors import StopRun
    from moe.train.checkpoint.manifest import settings_of
    from moe.train.guard import StepGuard
    from moe.train.resume import resume_run
    from moe.train.step import expert_biases
    from moe.train.stop import StopFlag
    from moe.train.trainer import Trainer
    from tests.train.from_config import build
    from tests.train.shards import tiny_shards

    class Recorder:
        """Takes the place of store and progress line; asks for a stop after a step."""

        def __init__(self) -> None:
            self.losses: dict[int, tuple[float, float, float]] = {}
            self.messages: list[str] = []
            self.stalls: list[float | None] = []
            self.guarded: list[Any] = []

        def write_step(self, record: StepRecord) -> None:
            self.losses[record.step] = (record.lm_loss, record.grad_norm, record.lr)
            self.stalls.append(record.save_stall_seconds)
            if on_step is not None:
                on_step(record.step)
            if record.step == leave_after:
                raise KeyboardInterrupt
            if record.step == stop_after:
                flag.request("SIGTERM")

        def write_guard(self, record: Any) -> None:
            self.guarded.append((record.kind, record.action, record.batch))

        def go_back(self, step: int) -> None:
            self.losses = {of: values for of, values in self.losses.items() if of <= step}

        def write_eval(self, record: object) -> None: ...
        def update(self, record: object) -> None: ...
        def message(self, text: str) -> None:
            self.messages.append(text)

    flag = StopFlag()
    recorder = Recorder()
    engine, mesh, backend = build(config)
    fingerprints = {"data": data}
    run_dir = Path(folder)
    guard = StepGuard(config.guard)
    shards = tiny_shards(Path(data_folder), config.model.vocab_size)
    stopped = False
    try:
        step = resume_run(
            run_dir, engine=engine, mesh=mesh, backend=backend, trainer=config.trainer, fingerprints=fingerprints,
            guard=guard, say=recorder.message,
        )  # fmt: skip
        restored = states_of(engine)
        trainer = Trainer(
            run_dir=run_dir, mesh=mesh, backend=backend, engine=engine,
            training_data=TrainingData([shards], config.data.seq_len, config.trainer.seed, config.model.vocab_size),
            heldout_data=HeldoutData({"tiny": shards}, config.data.seq_len, config.model.vocab_size),
            trainer=config.trainer if evaluate_often else replace(config.trainer, eval_every=0),
            guard=guard, optim=config.optim, moe=config.moe, training_flops_per_token=1.0,
            fingerprints=fingerprints, stop=flag, store=recorder, progress=recorder, step=step,  # type: ignore[arg-type]
            settings=settings_of(config),
        )  # fmt: skip
        if prepare is not None:
            prepare(trainer)
        if fault is not None:
            trainer.keeper.fault = fault
        try:
            trainer.fit()
        except StopRun:
            stopped = True
        except KeyboardInterrupt:
            pass
        state = states_of(engine)
        biases = [bias.clone().numpy() for bias in expert_biases(engine.module)]
        random = torch.get_rng_state().numpy()
    finally:
        engine.close()
        mesh.close()
        dist.barrier()
    return {
        "losses": recorder.losses, "state": state, "biases": biases, "start": step, "stopped": stopped, "random": random,
        "restored": restored, "messages": recorder.messages, "stalls": recorder.stalls, "guarded": recorder.guarded,
    }  # fmt: skip


def states_of(engine: Any) -> dict[str, Any]:
    """Masters and moments of this rank by `field/name`, as copies."""
    return {
        f"{field}/{name}": getattr(parameter, field).clone().numpy()
        for name, parameter in engine.parameter_states()
        for field in ("weight", "exp_avg", "exp_avg_sq")
    }


CASES = [
    (1, EngineKind.torch, DType.fp32, 0, 1),
    (2, EngineKind.torch, DType.bf16, 0, 2),
    (2, EngineKind.deepspeed, DType.bf16, 1, 2),
    (2, EngineKind.deepspeed, DType.fp32, 0, 2),
    (2, EngineKind.deepspeed, DType.bf16, 0, 1),
    (4, EngineKind.deepspeed, DType.fp32, 2, 2),
    (2, EngineKind.deepspeed, DType.bf16, 3, 2),
]


@pytest.mark.parametrize(("world_size", "kind", "dtype", "stage", "expert"), CASES)
def test_a_resumed_run_is_the_uninterrupted_run(
    world_size: int, kind: EngineKind, dtype: DType, stage: int, expert: int, process_pool: Pools, tmp_path: Path
) -> None:
    """A14, A31, A32, A33: stopped on request after step 5 and started again, steps 6 to 10 are the same to the last bit:
    losses, gradient norms, learning rates, masters, moments, biases, generators."""
    config = config_of(kind, dtype, stage, expert)
    pool = process_pool(world_size)
    data = str(tmp_path / "data")
    whole = pool.run(run_on_rank, config, str(tmp_path / "whole"), data)
    first = pool.run(run_on_rank, config, str(tmp_path / "parts"), data, stop_after=5)
    second = pool.run(run_on_rank, config, str(tmp_path / "parts"), data)
    for rank in range(world_size):
        assert first[rank]["stopped"]
        assert second[rank]["start"] == 5
        assert first[rank]["losses"] | second[rank]["losses"] == whole[rank]["losses"]
        assert sorted(whole[rank]["losses"]) == list(range(1, 11))
        assert whole[rank]["state"].keys() == second[rank]["state"].keys()
        for name, expected in whole[rank]["state"].items():
            assert (second[rank]["state"][name] == expected).all(), name
        for expected, found in zip(whole[rank]["biases"], second[rank]["biases"], strict=True):
            assert (expected == found).all()
            assert expected.any()
        assert (whole[rank]["random"] == second[rank]["random"]).all()


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_leaves_no_trace(stage: int, process_pool: Pools, tmp_path: Path) -> None:
    """A17: with and without evaluations between the steps, everything is the same to the last bit."""
    config = config_of(EngineKind.deepspeed, DType.bf16, stage, 2)
    pool = process_pool(2)
    data = str(tmp_path / "data")
    often = pool.run(run_on_rank, config, str(tmp_path / "often"), data)
    seldom = pool.run(run_on_rank, config, str(tmp_path / "seldom"), data, evaluate_often=False)
    for left, right in zip(often, seldom, strict=True):
        assert left["losses"] == right["losses"]
        assert all((left["state"][name] == right["state"][name]).all() for name in left["state"])
        assert all((a == b).all() for a, b in zip(left["biases"], right["biases"], strict=True))
        assert (left["random"] == right["random"]).all()


def test_checkpoints_hold_every_expert_by_its_global_id(process_pool: Pools, tmp_path: Path) -> None:
    """A30: with EP 2 the files hold experts 0 to 3 once, and a run on one process takes them up, moments included."""
    from safetensors import safe_open

    config = config_of(EngineKind.deepspeed, DType.fp32, 1, 2)
    data = str(tmp_path / "data")
    (left, right) = process_pool(2).run(run_on_rank, config, str(tmp_path / "run"), data)
    folder = tmp_path / "run" / "checkpoints" / "step-000010"
    ids = []
    for rank, run in enumerate((left, right)):
        with safe_open(folder / f"experts-{rank}.safetensors", framework="np") as file:
            ids += json.loads(file.metadata()["expert_ids"])
            for name in run["state"]:
                if ".experts." in name:
                    assert (file.get_tensor(name) == run["state"][name]).all()
    assert ids == [0, 1, 2, 3]
    alone = replace(config_of(EngineKind.torch, DType.fp32, 0, 1), parallel=replace(config.parallel, expert=1))
    alone = replace(alone, trainer=replace(alone.trainer, resume=str(folder)))
    (run,) = process_pool(1).run(run_on_rank, alone, str(tmp_path / "alone"), data)
    assert run["start"] == 10
    for name, value in run["state"].items():
        parts = [left["state"][name], right["state"][name]] if ".experts." in name else [left["state"][name]]
        size = len(parts[0])
        for index, part in enumerate(parts):
            assert (value[index * size : (index + 1) * size] == part).all(), name
