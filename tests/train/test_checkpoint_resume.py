"""A run goes on from what any layout wrote, and from nothing that is damaged or not its own."""

import errno
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.schema import RunConfig
from moe.train.checkpoint.folder import find_checkpoints
from moe.train.checkpoint.manifest import FileEntry, read_manifest
from moe.train.checkpoint.tensor_file import RawTensor, read_header, read_tensor, write_tensors
from moe.train.config import DType, EngineKind
from tests.process_pool import ProcessPool
from tests.train.from_config import with_engine
from tests.train.generations import edit_manifest, raw
from tests.train.test_checkpoint import config_of, run_on_rank, states_of

Pools = Callable[[int], ProcessPool]
Layout = tuple[int, EngineKind, DType, int, int, list[int] | None]
"""Ranks, engine, dtype, ZeRO stage, expert-parallel size, placement of the four experts."""

ALONE: Layout = (1, EngineKind.torch, DType.fp32, 0, 1, None)
LAYOUTS: list[Layout] = [
    ALONE,
    (2, EngineKind.deepspeed, DType.fp32, 1, 2, None),
    (2, EngineKind.torch, DType.fp32, 0, 2, [0, 1, 1, 1]),
    (2, EngineKind.deepspeed, DType.bf16, 2, 1, None),
    (4, EngineKind.deepspeed, DType.fp32, 2, 4, None),
    (4, EngineKind.torch, DType.bf16, 0, 2, [1, 0, 0, 1]),
    (4, EngineKind.deepspeed, DType.fp32, 0, 2, None),
    (4, EngineKind.deepspeed, DType.fp32, 3, 2, None),
    (2, EngineKind.deepspeed, DType.bf16, 3, 2, None),
]


def configured(layout: Layout, **trainer: Any) -> RunConfig:
    """The small run on a layout."""
    _, kind, dtype, stage, expert, placement = layout
    config = config_of(kind, dtype, stage, expert)
    return replace(
        config,
        parallel=replace(config.parallel, expert_placement=placement),
        trainer=replace(config.trainer, **trainer),
    )


FILLS = {"weight": 100.0 + 1 / 1024, "exp_avg": 10.0, "exp_avg_sq": 20.0}
"""Of expert i: i more. 100 + i + 1/1024 is no bf16 number, so a master that went through bf16 shows."""


def fill_and_save(config: RunConfig, folder: str) -> None:
    """Fill expert i with its fills, every dense parameter with its length's; save as step 3."""
    import torch

    from moe.train.checkpoint.keeper import CheckpointKeeper
    from moe.train.checkpoint.manifest import TrainState
    from moe.train.checkpoint.protocol import Keep
    from moe.train.engine import ParameterState
    from moe.train.step import expert_biases

    def work(engine: Any, mesh: Any, backend: Any) -> None:
        ids = list(engine.module.moe_layers()[0].dispatcher.local_expert_ids)
        filled = {}
        for name, state in engine.parameter_states():
            if ".experts." in name:
                offset = torch.tensor(ids, dtype=torch.float32).reshape(-1, *[1] * (state.weight.dim() - 1))
            else:
                offset = torch.tensor(float(len(name)))
            values = {field: torch.zeros_like(state.weight) + fill + offset for field, fill in FILLS.items()}
            filled[name] = ParameterState(**values, step=3)
        engine.load_parameter_states(filled)
        for bias in expert_biases(engine.module):
            bias.copy_(torch.arange(4) / 7)
        keeper = CheckpointKeeper(
            Path(folder), engine=engine, mesh=mesh, backend=backend, keep=Keep(), say=lambda text: None
        )
        keeper.save(TrainState(step=3, next_sample=24, fingerprints={"data": "abc"}))
        keeper.finish()
        keeper.close()

    with_engine(config, work)


def load_filled(config: RunConfig, folder: str) -> tuple[list[int], list[str]]:
    """Load step 3; this rank's expert ids, and what is not as it was filled."""
    import torch

    from moe.train.checkpoint.load import load_checkpoint
    from moe.train.step import expert_biases
    from tests.train.weights import whole_weights

    def work(engine: Any, mesh: Any, backend: Any) -> tuple[list[int], list[str]]:
        load_checkpoint(
            Path(folder) / "step-000003", engine=engine, mesh=mesh, backend=backend, fingerprints={"data": "abc"}
        )
        ids = list(engine.module.moe_layers()[0].dispatcher.local_expert_ids)
        wrong = []
        used = whole_weights(engine)
        for name, state in engine.parameter_states():
            if state.step != 3:
                wrong.append(f"{name}: step {state.step}")
            for field, fill in FILLS.items():
                value = getattr(state, field)
                numbers = [fill + i for i in ids] if ".experts." in name else [fill + len(name)]
                rows = value if ".experts." in name else [value]
                for row, number in zip(rows, numbers, strict=True):
                    if not (row == torch.tensor(number, dtype=torch.float32)).all():
                        wrong.append(f"{field}/{name}: {row.flatten()[0]} is not {number}")
            if not (used[name] == state.weight.to(used[name].dtype)).all():
                wrong.append(f"{name}: the forward's weight is not the master's")
        for bias in expert_biases(engine.module):
            if not (bias == torch.arange(4) / 7).all():
                wrong.append("bias")
        return ids, wrong

    result: tuple[list[int], list[str]] = with_engine(config, work)
    return result


def test_every_number_goes_to_its_expert_on_any_layout(process_pool: Pools, tmp_path: Path) -> None:
    """A30 and fault 27: written by two engines at EP 4 and EP 2 (unevenly), read by seven layouts: masters, moments,
    step, bias, and the weights that a forward uses."""
    for source in (LAYOUTS[4], LAYOUTS[2], LAYOUTS[7]):
        folder = str(tmp_path / f"{source[0]}-{source[3]}")
        process_pool(source[0]).run(fill_and_save, configured(source), folder)
        for layout in LAYOUTS:
            results = process_pool(layout[0]).run(load_filled, configured(layout), folder)
            assert [wrong for _, wrong in results if wrong] == [], layout
            assert {expert for ids, _ in results for expert in ids} == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the runs of this file find the same tokens."""
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def reference(process_pool: Pools, data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """An uninterrupted run of ten steps on one process, and its folder with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    (run,) = process_pool(1).run(run_on_rank, configured(ALONE), str(folder), data)
    return run, folder


def equal_to(run: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Losses, norms and learning rates of the steps of `run`."""
    assert run["losses"]
    for step, numbers in run["losses"].items():
        np.testing.assert_allclose(numbers, expected["losses"][step], rtol=tolerance, err_msg=f"step {step}")


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_another_layout_goes_on_where_one_process_stopped(
    layout: Layout, reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """A31 and fault 27: world size, EP, engine and stage crossed; steps 6 and 7 are the uninterrupted run's to 1e-5.

    With bf16 the masters are taken over to the last bit, and the losses are bf16's."""
    expected, folder = reference
    config = configured(layout, resume=str(folder / "checkpoints" / "step-000005"))
    runs = process_pool(layout[0]).run(run_on_rank, config, str(tmp_path / "run"), data, leave_after=7)
    for run in runs:
        assert run["start"] == 5
        assert sorted(run["losses"]) == [6, 7]
        # bf16 rounds by up to 2^-8 of a value; a norm sums many of them.
        equal_to(run, expected, 1e-5 if layout[2] is DType.fp32 else 2**-7)


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[4], LAYOUTS[7]], ids=str)
def test_one_process_goes_on_where_another_layout_stopped(
    layout: Layout, reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """A31 and fault 27, the other way round: stopped on request after step 5."""
    expected, _ = reference
    folder = str(tmp_path / "run")
    process_pool(layout[0]).run(run_on_rank, configured(layout), folder, data, stop_after=5)
    (run,) = process_pool(1).run(run_on_rank, configured(ALONE), folder, data)
    assert sorted(run["losses"]) == [6, 7, 8, 9, 10]
    equal_to(run, expected, 1e-5)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[7]], ids=str)
def test_ranks_that_share_rows_go_on_and_are_gone_on_from(
    layout: Layout, reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """From one process to parallel.sequence=2 at step 5, back at step 7: every step, and the held-out loss after 6."""
    expected, folder = reference
    config = configured(layout, resume=str(folder / "checkpoints" / "step-000005"))
    config = replace(config, parallel=replace(config.parallel, sequence=2))
    runs = process_pool(layout[0]).run(run_on_rank, config, str(tmp_path / "cut"), data, stop_after=7)
    for run in runs:
        assert sorted(run["losses"]) == [6, 7]
        equal_to(run, expected, 1e-5)
        (said,) = [text for text in run["messages"] if text.startswith("step 6: held-out")]
        assert said in expected["messages"]
    alone = configured(ALONE, resume=str(tmp_path / "cut" / "checkpoints" / "step-000007"))
    (run,) = process_pool(1).run(run_on_rank, alone, str(tmp_path / "alone"), data)
    assert sorted(run["losses"]) == [8, 9, 10]
    equal_to(run, expected, 1e-5)


TWO: Layout = (2, EngineKind.torch, DType.fp32, 0, 2, None)


@pytest.fixture(scope="module")
def two_ranks(process_pool: Pools, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 5 and 10, written by two ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("two") / "run"
    process_pool(2).run(run_on_rank, configured(TWO), str(folder), data)
    return folder


def attempt(*args: Any, **options: Any) -> str | dict[str, Any]:
    """`run_on_rank`, or the error that every rank raises: a pool outlives it."""
    from moe.errors import CheckpointError

    try:
        return run_on_rank(*args, **options)
    except CheckpointError as error:
        return str(error)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "18 a bit that rank 1 alone reads": (
        lambda folder: flip_last_byte(folder / "experts-1.safetensors"),
        r"rank 1: .*experts-1\.safetensors was changed after it was written: tensors",
    ),
    "21 a shard that rank 1 alone reads": (
        lambda folder: (folder / "rank-1.safetensors").unlink(), r"rank 0: .*rank-1\.safetensors cannot be read",
    ),
    "22 of another run": (
        lambda folder: edit_manifest(folder, run="0123456789abcdef"),
        r"was written by run 0123456789abcdef, this folder is of run .* name it with trainer\.resume=PATH",
    ),
    "23 and 22: latest to nowhere, no manifest": (
        lambda folder: [(folder / "manifest.json").unlink(), (folder.parent / "latest").write_text("../../etc")],
        r"latest is not followed: '\.\./\.\./etc' is not the name of a checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_all_ranks_fall_back_together_and_loudly(
    name: str, two_ranks: Path, data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """Faults 18, 21, 22 and 23: what one rank finds, all ranks act on; the damaged one is put aside, not deleted."""
    run_dir = Path(shutil.copytree(two_ranks, tmp_path / "run"))
    damage, message = DAMAGES[name]
    damage(run_dir / "checkpoints" / "step-000010")
    (first, second) = process_pool(2).run(run_on_rank, configured(TWO, max_steps=5), str(run_dir), data)
    assert first["start"] == second["start"] == 5
    said = "\n".join(first["messages"])
    assert said.startswith("WARNING: ")
    assert re.search(message, said), said
    assert "going back to step-000005; step-000010 put aside as .bad-N" in said
    assert (run_dir / "checkpoints" / "step-000010.bad-1").is_dir()
    assert [path.name for path in find_checkpoints(run_dir / "checkpoints")] == ["step-000005"]


def test_without_a_good_one_the_run_does_not_begin_anew(
    two_ranks: Path, data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """Fault 21: both damaged: refused on all ranks, with every reason, and nothing is renamed."""
    run_dir = Path(shutil.copytree(two_ranks, tmp_path / "run"))
    for step in (5, 10):
        flip_last_byte(run_dir / "checkpoints" / f"step-{step:06d}" / "dense.safetensors")
    for error in process_pool(2).run(attempt, configured(TWO), str(run_dir), data):
        assert isinstance(error, str)
        assert "none of the 2 checkpoints in" in error
        assert error.count("was changed after it was written") == 2
    assert len(find_checkpoints(run_dir / "checkpoints")) == 2


def change_dense(folder: Path, change: Callable[[dict[str, RawTensor]], None]) -> None:
    """Rewrite the dense file with other tensors, sums and manifest right: no damage, but another model's."""
    path = folder / "dense.safetensors"
    header = read_header(path)
    tensors = {key: read_tensor(path, key, entry, None) for key, entry in header.entries.items()}
    change(tensors)
    path.unlink()
    sums = write_tensors(path, tensors, header.metadata)
    edit_manifest(folder, lambda m: replace(m, files={**m.files, path.name: FileEntry(sum=sums)}))


def halve(tensors: dict[str, RawTensor]) -> None:
    key = "weight/embed.weight"
    half = tensors[key].data.view(np.float32).astype(np.float16)
    tensors[key] = RawTensor("F16", tensors[key].shape, half.view(np.uint8))


REFUSALS: dict[str, tuple[Callable[[Path, RunConfig], RunConfig | None], str]] = {
    "22 explicit and damaged": (
        lambda folder, config: flip_last_byte(folder / "dense.safetensors"), r"dense\.safetensors was changed",
    ),
    "26 vocabulary": (
        lambda folder, config: replace(config, model=replace(config.model, vocab_size=310)),
        r"does not fit the model \(\d+ differences\)(.|\n)*weight/embed\.weight has shape \[300, 32\] F32, the model wants "
        r"shape \[310, 32\] F32",
    ),
    "26 shapes, all of them": (
        lambda folder, config: replace(config, model=replace(config.model, num_layers=1, hidden_size=64)),
        r"does not fit the model \((?P<count>\d+) differences\).*\n(  .*\n){40,}",
    ),
    "26 experts": (
        lambda folder, config: replace(config, moe=replace(config.moe, num_experts=6)),
        r"experts \[0, 1, 2, 3\] are in its files, the model wants each of \[0, 1, 2, 3, 4, 5\] once",
    ),
    "26 dtype": (
        lambda folder, config: change_dense(folder, halve),
        r"weight/embed\.weight has shape \[300, 32\] F16, the model wants shape \[300, 32\] F32",
    ),
    "26 extra key": (
        lambda folder, config: change_dense(folder, lambda tensors: tensors.update({"weight/extra": raw([1.0])})),
        r"weight/extra has shape \[1\] F32, the model wants nothing by this name",
    ),
    "26 missing key": (
        lambda folder, config: change_dense(folder, lambda tensors: tensors.pop("exp_avg/embed.weight") and None),
        r"exp_avg/embed\.weight has nothing, the model wants shape",
    ),
    "batch size": (
        lambda folder, config: replace(config, trainer=replace(config.trainer, batch_size=4, accumulation=1)),
        r"was written with trainer\.batch_size=8, this run has 4",
    ),
    "15 never": (
        lambda folder, config: replace(config, trainer=replace(config.trainer, resume="never")),
        r"would have to write over; choose trainer\.resume=auto, or another run\.dir",
    ),
    "15 older": (
        lambda folder, config: replace(
            config, trainer=replace(config.trainer, resume=str(folder.parent / "step-000005"))
        ),
        r"holds step-000010, which a run from step 5 would have to write over",
    ),
    "23 nowhere": (
        lambda folder, config: replace(config, trainer=replace(config.trainer, resume="nowhere")),
        r"nowhere is not a checkpoint folder",
    ),
    "13 unfinished": (
        lambda folder, config: replace(
            config, trainer=replace(config.trainer, resume=str(folder.rename(folder.with_suffix(".tmp-00000000"))))
        ),
        r"was never finished; choose a folder without \.tmp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_this_runs_is_refused_by_name(
    name: str, reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """Faults 13, 15, 22, 23 and 26 (each case begins with its number): an older one would not help, so none is tried."""
    run_dir = Path(shutil.copytree(reference[1], tmp_path / "run"))
    folder = run_dir / "checkpoints" / "step-000010"
    change, message = REFUSALS[name]
    config = configured(ALONE)
    if name.startswith("22"):
        config = configured(ALONE, resume=str(folder))
    config = change(folder, config) or config
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    (error,) = process_pool(1).run(attempt, config, str(run_dir), data)
    assert isinstance(error, str)
    assert re.search(message, error), error
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before


def test_changed_data_is_refused_unless_told(
    reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools
) -> None:
    """Fault 44: another fingerprint stops the run; trainer.accept_changed_data=true goes on and says so."""
    config = configured(ALONE, max_steps=10)
    (error,) = process_pool(1).run(attempt, config, str(reference[1]), data, data="xyz")
    assert isinstance(error, str)
    assert "the data fingerprint is 'abc', this run has 'xyz'" in error
    assert "trainer.accept_changed_data=true" in error
    config = configured(ALONE, max_steps=10, accept_changed_data=True)
    (run,) = process_pool(1).run(attempt, config, str(reference[1]), data, data="xyz")
    assert run["start"] == 10  # type: ignore[index]
    assert run["messages"][0].startswith("WARNING: ")  # type: ignore[index]


def run_beside(config: RunConfig, folder: str, data: str) -> dict[str, Any]:
    """The disk does not answer before step 8: training goes on meanwhile."""
    answered = threading.Event()
    passed: list[str] = []

    def fault(place: str) -> None:
        if not answered.is_set():
            assert answered.wait(30)
            passed.append(place)

    result = run_on_rank(config, folder, data, fault=fault, on_step=lambda step: answered.set() if step == 8 else None)
    return result | {"waited": passed}


def test_saving_goes_on_beside_training(
    reference: tuple[dict[str, Any], Path], data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """The checkpoint of step 5, written while steps 6 to 8 were taken, is that of step 5; the stall is in the records."""
    expected, folder = reference
    (run,) = process_pool(1).run(run_beside, configured(ALONE), str(tmp_path / "run"), data)
    assert len(run["waited"]) == 1
    assert run["losses"] == expected["losses"]
    for name in ("dense.safetensors", "experts-0.safetensors", "rank-0.safetensors"):
        paths = [path / "checkpoints" / "step-000005" / name for path in (folder, tmp_path / "run")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert all(stall is not None for stall in run["stalls"])
    assert [step for step, stall in enumerate(run["stalls"], 1) if stall > 0] == [6]


def run_failing(config: RunConfig, folder: str, data: str, fail_step: int) -> str | dict[str, Any]:
    """No room for the checkpoint of fail_step, on rank 0's disk alone."""
    from moe.errors import CheckpointError

    reached: list[int] = []

    def fault(place: str) -> None:
        if place == "after mkdir" and (reached or [0])[-1] in (fail_step, fail_step + 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        return run_on_rank(config, folder, data, fault=fault, on_step=reached.append)
    except CheckpointError as error:
        return f"{int(error.exit_code)}: {error}"


def test_a_save_that_fails_is_an_alarm_and_the_last_one_is_an_error(
    two_ranks: Path, data: str, process_pool: Pools, tmp_path: Path
) -> None:
    """Faults 16 and 17: training goes on, says so at the next step boundary, and the next due step saves; a final save
    that fails ends the run with exit code 4 on every rank."""
    config = configured(TWO, eval_every=0)
    left, right = process_pool(2).run(run_failing, config, str(tmp_path / "a"), data, 5)
    assert left["losses"] == right["losses"]
    assert sorted(left["losses"]) == list(range(1, 11))
    (alarm,) = [text for text in left["messages"] if "ALARM" in text]
    assert "step-000005: rank 0: OSError: [Errno 28] No space left on device\ntraining goes on" in alarm
    assert int(alarm.split()[1].rstrip(":")) in (5, 6, 7, 8, 9, 10)
    assert [path.name for path in find_checkpoints(tmp_path / "a" / "checkpoints")] == ["step-000010"]
    results = process_pool(2).run(run_failing, config, str(tmp_path / "b"), data, 10)
    for error in results:
        assert isinstance(error, str)
        assert error.startswith("4: saving ")
        assert "step-000010: rank 0: OSError: [Errno 28]" in error
    assert [path.name for path in find_checkpoints(tmp_path / "b" / "checkpoints")] == ["step-000005"]
    assert not list((tmp_path / "b" / "checkpoints").glob("*.tmp*"))


def run_to_be_killed(config: RunConfig, folder: str, data: str) -> None:
    """Rank 1 is killed half-way through its experts' file of step 10."""

    def fault(place: str) -> None:
        root = Path(folder) / "checkpoints"
        if place == "write experts-1.safetensors 50%" and any(root.glob("step-000010.tmp*")):
            os.kill(os.getpid(), signal.SIGKILL)

    run_on_rank(config, folder, data, fault=fault)


def test_a_rank_killed_while_saving(process_pool: Pools, two_ranks: Path, data: str, tmp_path: Path) -> None:
    """Fault 13, with two ranks: the older checkpoint is gone on from, and ends in the same bytes."""
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the process died"):
        process_pool(2).run(run_to_be_killed, configured(TWO), str(folder), data)
    assert [path.name for path in find_checkpoints(folder / "checkpoints")] == ["step-000005"]
    first, _ = process_pool(2).run(run_on_rank, configured(TWO), str(folder), data)
    assert first["start"] == 5
    name = "checkpoints/step-000010/experts-1.safetensors"
    assert (folder / name).read_bytes() == (two_ranks / name).read_bytes()


def test_a_manifest_says_what_a_run_was(two_ranks: Path) -> None:
    manifest = read_manifest(two_ranks / "checkpoints" / "step-000010")
    assert (manifest.step, manifest.next_sample) == (10, 80)
    assert manifest.layout == {"world_size": 2, "expert": 2, "sequence": 1}
    assert manifest.files["experts-1.safetensors"].expert_ids == (2, 3)
    state = json.loads((two_ranks / "checkpoints" / "step-000010" / "state.json").read_text())
    assert state["settings"]["engine"]["kind"] == "torch"
    assert state["fingerprints"] == {"data": "abc"}


def test_states_are_copies(process_pool: Pools) -> None:
    """The helper of the tests above does not compare views with themselves."""
    (same,) = process_pool(1).run(_state_twice, configured(ALONE))
    assert not same


def _state_twice(config: RunConfig) -> bool:
    def work(engine: Any, mesh: Any, backend: Any) -> bool:
        one, two = states_of(engine), states_of(engine)
        return any(np.shares_memory(one[name], two[name]) for name in one)

    result: bool = with_engine(config, work)
    return result
