"""The step guard: bad steps change nothing on any rank, and the run does what the policy says."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.train.config import DType, EngineKind, GuardConfig, GuardPolicy
from moe.train.guard import StepGuard, batch_of
from tests.process_pool import ProcessPool
from tests.train.test_checkpoint import config_of, run_on_rank
from tests.train.test_engines import TORCH, ZERO, ZERO_BF16, Kind

Pools = Callable[[int], ProcessPool]
BAD = 3
"""The batch, from 0, that something is wrong with."""


def test_batches_are_counted_around_those_passed_over() -> None:
    assert [batch_of(step, []) for step in range(3)] == [0, 1, 2]
    assert [batch_of(step, [1, 2, 4]) for step in range(4)] == [0, 3, 5, 6]


def test_the_limit_follows_the_norms_of_good_steps() -> None:
    """Mean 2 and deviation 1 of 1, 3, 1, 3, ...: at five spreads about 7; before twenty steps there is none."""
    guard = StepGuard(GuardConfig(z_score=5.0, window=1000))
    for step in range(400):
        assert (guard.norm_limit() == math.inf) is (step < 20)
        guard.good(1.0 + 2.0 * (step % 2), step + 1)
    assert guard.mean == pytest.approx(2.0, abs=0.01)
    assert guard.norm_limit() == pytest.approx(7.0, abs=0.05)
    assert StepGuard(GuardConfig()).norm_limit() == math.inf
    steady = StepGuard(GuardConfig(z_score=5.0))
    for _ in range(50):
        steady.good(1.0, 1)
    assert steady.norm_limit() == pytest.approx(1.5)  # a tenth of the mean at least counts as spread


def test_a_window_forgets() -> None:
    guard = StepGuard(GuardConfig(z_score=3.0, window=20))
    for norm in [10.0] * 100 + [1.0] * 400:
        guard.good(norm, 1)
    assert guard.norm_limit() == pytest.approx(1.3, abs=0.01)


def test_what_a_guard_knows_goes_through_a_checkpoint() -> None:
    guard = StepGuard(GuardConfig(z_score=4.0))
    for norm in (1.0, 2.0, 1.5):
        guard.good(norm, 1)
    guard.bad(7, 9)
    guard.bad(4, 5)
    other = StepGuard(GuardConfig(z_score=4.0))
    other.load(guard.state())
    assert other == guard
    assert (guard.skipped, guard.in_row, guard.bad_step) == ([4, 7], 2, 9)


def test_steps_done_again_are_no_progress() -> None:
    """Bad at step 9, back to 4, good at 5 to 8: still one in a row; good at 9: through."""
    guard = StepGuard(GuardConfig(policy=GuardPolicy.roll_back))
    guard.bad(8, 9)
    for step in range(5, 9):
        guard.good(1.0, step)
        assert guard.in_row == 1
    guard.good(1.0, 9)
    assert guard.in_row == 0


def test_going_back_takes_the_norms_of_then_and_keeps_what_is_known_of_bad_data() -> None:
    guard = StepGuard(GuardConfig(policy=GuardPolicy.roll_back))
    guard.good(1.0, 1)
    then = guard.state()
    guard.good(5.0, 2)
    guard.bad(2, 3)
    guard.go_back(then)
    assert (guard.num_norms, guard.mean, guard.skipped, guard.in_row) == (1, 1.0, [2], 1)


def limited_case(kind: Kind) -> None:
    """A step above the limit is as if it had not been, for the step after it too."""
    import torch

    from moe.train.mesh import build_mesh
    from tests.train.test_engines import OPTIM, assert_bitwise, counts_of, global_batch, make, share, snapshot, strict

    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))

    def one_step(engine: Any, batch: Any, limit: float) -> Any:
        for part in share(batch, mesh, 2):
            engine.backward(engine.forward(part).lm_loss_sum / counts_of(batch, mesh).labelled_tokens)
        return engine.step(OPTIM.lr, norm_limit=limit)

    with strict():
        engine = make(kind, mesh, 2)
        before = snapshot(engine)
        for limit in (1e-3, -1.0):
            outcome = one_step(engine, global_batch(1), limit)
            assert not outcome.applied
            assert 1e-3 < outcome.grad_norm < 1e3
            assert_bitwise(snapshot(engine), before)
        after_bad = one_step(engine, global_batch(0), 1e3)
        final = snapshot(engine)
        engine.close()
        untouched = make(kind, mesh, 2)
        plain = one_step(untouched, global_batch(0), math.inf)
        assert after_bad.applied
        assert plain.applied
        assert after_bad.grad_norm == pytest.approx(plain.grad_norm, rel=1e-7)
        assert_bitwise(final, snapshot(untouched))
        untouched.close()


@pytest.mark.parametrize("kind", [TORCH, *ZERO, *ZERO_BF16[1:]], ids=str)
def test_a_norm_above_the_limit_changes_nothing_anywhere(process_pool: Pools, kind: Kind) -> None:
    """Also the test that DeepSpeed 0.19.8's private names, which the gate stands in, are still there."""
    process_pool(2).run(limited_case, kind)


def spoil(kind: str, trainer: Any) -> None:
    """Make batch BAD bad, on rank 1 where it is about a rank."""
    import torch

    from moe.model.batch import IGNORE_LABEL

    whole_batches, forward = trainer._batches, trainer.engine.forward
    now = [-1]

    def batches(number: int) -> Any:
        now[0] = number
        made = whole_batches(number)
        if kind == "labels" and number == BAD:
            made = [batch._replace(labels_BS=torch.full_like(batch.labels_BS, IGNORE_LABEL)) for batch in made]
        if kind == "gate" and number == BAD and trainer.mesh.rank == 1:
            with torch.no_grad():
                trainer.engine.module.moe_layers()[0].router.weight[0, 0] = float("nan")
        return made

    def spoiled_forward(batch: Any) -> Any:
        output = forward(batch)
        if now[0] == BAD and kind == "loss" and trainer.mesh.rank == 1:
            output = output._replace(lm_loss_sum=output.lm_loss_sum * float("nan"))
        if now[0] == BAD and kind == "norm":
            output = output._replace(lm_loss_sum=output.lm_loss_sum * 1e3)
        return output

    trainer._batches, trainer.engine.forward = batches, spoiled_forward
    # Twenty steps before a spread says anything are more than these runs have.
    trainer.guard.num_norms = 20 if kind == "norm" else 0
    trainer.guard.mean = 1.0 if kind == "norm" else 0.0


def pass_over(trainer: Any) -> None:
    """What a run is compared with: it never sees the bad batch."""
    trainer.guard.skipped = [BAD]


def run(folder: str, data: str, guard: GuardConfig, prepare: Callable[[Any], None], engine: EngineKind) -> Any:
    """On a rank: 6 steps with a checkpoint after every second, of batches 0, 1, 2, 4, 5, 6 when all is well."""
    from moe.errors import NumericError

    config = config_of(engine, DType.fp32, 1, 2)
    config = replace(
        config, guard=guard, trainer=replace(config.trainer, max_steps=6, save_every=2, eval_every=0, eval_batches=0)
    )
    try:
        return run_on_rank(config, folder, data, prepare=prepare)
    except NumericError as error:
        return int(error.exit_code), str(error)


@pytest.fixture(scope="module")
def oracle(process_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[EngineKind], Any]:
    """Each engine's run without the bad batch."""
    known: dict[EngineKind, Any] = {}

    def get(engine: EngineKind) -> Any:
        if engine not in known:
            folder = tmp_path_factory.mktemp("oracle")
            known[engine] = process_pool(2).run(
                run, str(folder / "run"), str(folder / "data"), GuardConfig(), pass_over, engine
            )
        return known[engine]

    return get


@pytest.mark.parametrize("engine", list(EngineKind))
@pytest.mark.parametrize("policy", [GuardPolicy.skip, GuardPolicy.roll_back])
@pytest.mark.parametrize("kind", ["loss", "labels", "norm", "gate"])
def test_the_run_goes_on_as_if_the_bad_batch_had_not_been(
    process_pool: Pools, tmp_path: Path, oracle: Callable[[EngineKind], Any], kind: str, policy: GuardPolicy,
    engine: EngineKind,
) -> None:  # fmt: skip
    """Weights, moments, bias, losses and learning rates to the last bit. A poisoned gate heals by going back alone."""
    guard = GuardConfig(policy=policy, z_score=5.0 if kind == "norm" else 0.0)
    results = process_pool(2).run(
        run, str(tmp_path / "run"), str(tmp_path / "data"), guard, partial(spoil, kind), engine
    )
    if kind == "gate" and policy is GuardPolicy.skip:
        for code, message in results:
            assert code == 5
            assert "router logits of layers.1 are not finite on rank 1" in message
            assert "bad step 4 in a row, guard.max_in_row is 3" in message
        return
    for rank, (found, expected) in enumerate(zip(results, oracle(engine), strict=True)):
        assert found["losses"] == expected["losses"]
        for name, value in expected["state"].items():
            np.testing.assert_array_equal(found["state"][name], value, err_msg=name)
        for ours, theirs in zip(found["biases"], expected["biases"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        if rank == 0:
            named = {"gate": "router"}.get(kind, kind)
            assert found["guarded"] == [(named, policy.value, BAD)]


def test_a_stop_names_rank_and_samples(process_pool: Pools, tmp_path: Path) -> None:
    """8 samples a batch, 2 micro-steps, 2 ranks: batch 3's second parts of both micro-steps are 26-27 and 30-31."""
    for code, message in process_pool(2).run(
        run, str(tmp_path / "run"), str(tmp_path / "data"), GuardConfig(), partial(spoil, "loss"), EngineKind.torch
    ):
        assert code == 5
        assert message.startswith(
            "step 4: the language loss is nan (rank 1, micro-step 0: samples 26 to 27; rank 1, micro-step 1: samples 30 to 31)"
        )
        assert "guard.policy=skip" in message


def test_a_resume_after_a_skip_is_exact(
    process_pool: Pools, tmp_path: Path, oracle: Callable[[EngineKind], Any]
) -> None:
    """Ended after step 5 without a save, so it goes on from step 4, with the guard of then."""
    guard = GuardConfig(policy=GuardPolicy.skip)
    places = (str(tmp_path / "run"), str(tmp_path / "data"))
    process_pool(2).run(run_and_leave, *places, guard)
    found = process_pool(2).run(run, *places, guard, nothing, EngineKind.torch)
    for ours, theirs in zip(found, oracle(EngineKind.torch), strict=True):
        assert ours["start"] == 4
        for name, value in theirs["state"].items():
            np.testing.assert_array_equal(ours["state"][name], value, err_msg=name)


def nothing(trainer: Any) -> None:
    """The guard of the checkpoint is what counts."""
    assert trainer.guard.skipped == [BAD]


def run_and_leave(folder: str, data: str, guard: GuardConfig) -> None:
    """On a rank: the first five steps, in which the bad batch is passed over."""
    config = config_of(EngineKind.torch, DType.fp32, 1, 2)
    config = replace(
        config, guard=guard, trainer=replace(config.trainer, max_steps=6, save_every=2, eval_every=0, eval_batches=0)
    )
    run_on_rank(config, folder, data, prepare=partial(spoil, "loss"), leave_after=5)
