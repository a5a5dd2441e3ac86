"""The traps of DeepSpeed 0.19.8 that our side corrects or keeps away from: each is set off here, in DeepSpeed itself.

A test that fails says that DeepSpeed no longer does what we work around: read docs/deepspeed.md, take the correction out
together with its test, and keep the tests of the mathematics (tests/distributed/test_parity.py).
"""

import ast
import contextlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends import cpu
from moe.train.config import DType, EngineConfig, EngineKind, OffloadAdam
from moe.train.mesh import Mesh, build_mesh
from tests.process_pool import ProcessPool
from tests.train.test_engines import (
    MOE,
    OPTIM,
    Kind,
    OneWeightModel,
    counts_of,
    global_batch,
    make,
    share,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def raw_pool() -> Iterator[ProcessPool]:
    """Two ranks of this file alone: bare DeepSpeed leaves process-wide state behind."""
    pool = ProcessPool(2)
    yield pool
    pool.close()


def bare(mesh: Mesh, module: nn.Module, params: Any, *, stage: int, lr: float = 1.0, **options: Any) -> Any:
    """DeepSpeed as its manual has it, around SGD."""
    import deepspeed

    from moe.train.engine_deepspeed import _known_warnings, _prepare_deepspeed

    _prepare_deepspeed(mesh, cpu.make(0))
    arguments = {name: options.pop(name) for name in ("mpu", "mesh_param") if name in options}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": False},
        "steps_per_print": 10**9, **options,
    }  # fmt: skip
    with _known_warnings():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.SGD(params, lr=lr), config=config, dist_init_required=False, **arguments
        )
    return engine


def one_step(engine: Any, loss: Tensor) -> None:
    from moe.train.engine_deepspeed import _known_warnings

    with _known_warnings():
        engine.backward(loss)
        engine.step()


def parameters_of(model: nn.Module, group_name: str) -> list[dict[str, Any]]:
    """The dense scale and the expert weight of OneWeightModel, as DeepSpeed wants its groups."""
    named = dict(model.named_parameters())
    return [
        {"params": [named["scale"]], "name": "dense"},
        {"params": [named["moe.experts.w1"]], "name": group_name, "moe": True},
    ]


# 1


def test_1_clipping_is_on_unless_it_is_set() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    assert (
        DeepSpeedConfig({"train_batch_size": dist.get_world_size() if dist.is_initialized() else 1}).gradient_clipping
        == 1.0
    )


# 3 and A25


def stage_zero_clipping_case() -> tuple[float, float]:
    from moe.train.engine_deepspeed import _install_expert_groups, _mark_layers, _remove_expert_groups

    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    model = OneWeightModel(mesh)
    name = _install_expert_groups(mesh)
    marked = _mark_layers(model, mesh, name, stage=0)
    engine = bare(mesh, model, parameters_of(model, name), stage=0, gradient_clipping=1e-3)
    x = torch.tensor([[1.0], [3.0]] if mesh.rank == 0 else [[2.0], [4.0]])
    one_step(engine, engine(x))
    change = 1.0 - float(model.scale)
    for layer, own in marked:
        layer.__class__ = own
    _remove_expert_groups(mesh)
    return change, 7.5 / math.sqrt(1.25**2 + 6.25**2 + 7.5**2) * 1e-3


def test_3_stage_0_clips_by_the_mean_of_norms(raw_pool: ProcessPool) -> None:
    """A25: ranks hold different experts, so the mean of their norms is the norm of nothing."""
    for change, right in raw_pool.run(stage_zero_clipping_case, timeout=40):
        assert change != pytest.approx(right, rel=1e-2)
        assert change == pytest.approx(right, rel=0.3)


# 4


def unmarked_case(stage: int) -> str:
    from moe.train.engine_deepspeed import _install_expert_groups, _remove_expert_groups

    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    model = OneWeightModel(mesh)
    name = _install_expert_groups(mesh)
    for parameter in model.moe.experts.parameters():
        vars(parameter).update(allreduce=False, group_name=name)
    try:
        engine = bare(mesh, model, parameters_of(model, name), stage=stage)
        one_step(engine, engine(torch.tensor([[1.0], [3.0]] if mesh.rank == 0 else [[2.0], [4.0]])))
    except Exception as error:
        return type(error).__name__
    finally:
        _remove_expert_groups(mesh)
    return f"{float(model.moe.experts.w1)}"


@pytest.mark.parametrize(("stage", "error"), [(0, "KeyError"), (1, "TypeError"), (2, "TypeError")])
def test_4_layers_with_experts_are_known_by_their_class_alone(raw_pool: ProcessPool, stage: int, error: str) -> None:
    assert raw_pool.run(unmarked_case, stage, timeout=40) == [error, error]


# 5


class Forked(nn.Module):
    """Each rank uses some of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.forks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 3)

    def forward(self, x_BD: Tensor, used: list[int]) -> Tensor:
        x_BD = self.first(x_BD)
        for index in used:
            x_BD = x_BD + self.forks[index](x_BD)
        loss: Tensor = self.last(x_BD).pow(2).mean()
        return loss


def missing_gradient_case(stage: int) -> float:
    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    x_WBD = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    used = [[0, 1], [1, 2]]
    reference, model = Forked(), Forked()
    for rank in range(2):
        (reference(x_WBD[rank], used[rank]) / 2).backward()
    engine = bare(mesh, model, model.parameters(), stage=stage, lr=0.1)
    one_step(engine, engine(x_WBD[mesh.rank], used[mesh.rank]))
    return max(
        float((right - 0.1 * right.grad - found).abs().max())  # type: ignore[operator]
        for found, right in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_5_a_gradient_on_one_rank_alone_spoils_others_in_silence(raw_pool: ProcessPool) -> None:
    """Stage 0 is right; at stage 1 weights are off without a word. (Stages 2 and 3 exchange while backward runs.)"""
    assert max(raw_pool.run(missing_gradient_case, 0, timeout=40)) < 1e-6
    assert max(raw_pool.run(missing_gradient_case, 1, timeout=40)) > 1e-4


# 6, 7, 9


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "load_universal", "ds_to_universal"])
def test_6_7_9_no_checkpoint_of_deepspeed_is_written_or_read(name: str) -> None:
    """Its plain format loads silently wrong at another EP size; its universal one shares Adam's step between groups at
    stage 3, and restores group names of another layout. Ours (docs/checkpoints.md) takes their place."""
    for path in [ROOT / "moe/train/engine_deepspeed.py", *(ROOT / "moe/train/zero").glob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert name not in {call.attr for call in calls}, path


# 8


def unlinked_case() -> set[str]:
    """Parameters of this rank's partitions whose moments cannot be found after one step."""
    from unittest import mock

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from moe.train import engine_deepspeed
    from moe.train.step import run_step

    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    with (
        mock.patch.object(engine_deepspeed, "allocate_state"),
        mock.patch.object(DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state"),
    ):
        engine = make(Kind(EngineKind.deepspeed, 1), mesh)
    batch = global_batch(0)
    run_step(engine, share(batch, mesh, 1), counts_of(batch, mesh), mesh=mesh, moe=MOE, lr=OPTIM.lr)
    unlinked = set()
    for name, parameter in engine.module.named_parameters():
        place = parameter._hp_mapping  # type: ignore[attr-defined]
        if place is not None and not place.optim_fragment:
            unlinked.add(name)
    engine.close()
    return unlinked


def test_8_moments_are_linked_after_the_first_group_alone(raw_pool: ProcessPool) -> None:
    for unlinked in raw_pool.run(unlinked_case, timeout=40):
        assert any(".experts." in name for name in unlinked)


# 10 and 11


@contextlib.contextmanager
def sequence_parallel_gone() -> Iterator[None]:
    """Bare DeepSpeed keeps what it was told of sequence parallelism for the process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    states = {module: dict(vars(module)) for module in (parallel_state_sp, groups)}
    try:
        yield
    finally:
        for module, state in states.items():
            vars(module).update(state)


def sequence_norm_case(stage: int, how: str) -> float:
    """Σ over two sequence ranks of the loss; the norm that DeepSpeed finds, over the right one."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import safe_get_full_grad

    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    x_W4 = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    right = torch.autograd.grad((model(x_W4) ** 2).sum(), model.weight)[0]
    with sequence_parallel_gone():
        if how == "mesh_param":
            engine = bare(mesh, model, model.parameters(), stage=stage, mesh_param=(1, 2), sequence_parallel_size=2)
        else:
            parallel_state_sp.initialize_sequence_parallel(2)
            engine = bare(mesh, model, model.parameters(), stage=stage, mpu=parallel_state_sp)
        engine.backward((engine(x_W4[mesh.rank : mesh.rank + 1]) ** 2).sum())
        found: Tensor = safe_get_full_grad(model.weight)
        ratio = float(found.norm() / right.norm())
        engine.destroy()
    return ratio


def test_10_mesh_param_forgets_to_sum_over_sequence_ranks(raw_pool: ProcessPool) -> None:
    """Each rank is left with twice its own gradient, here 1.095 of the norm of the sum."""
    for ratio in raw_pool.run(sequence_norm_case, 1, "mesh_param", timeout=40):
        assert ratio == pytest.approx(2 * 30**0.5 / 10, rel=1e-5)


def test_11_stage_3_halves_with_two_sequence_ranks(raw_pool: ProcessPool) -> None:
    """Stage 1 is right by the same way."""
    assert raw_pool.run(sequence_norm_case, 1, "mpu", timeout=40) == pytest.approx([1.0, 1.0], rel=1e-5)
    assert raw_pool.run(sequence_norm_case, 3, "mpu", timeout=40) == pytest.approx([0.5, 0.5], rel=1e-5)


def test_10_11_deepspeed_is_never_told_of_sequence_ranks() -> None:
    """To it every rank has samples of its own; our loss is a share of a sum, so that is right."""
    from moe.train import engine_deepspeed

    source = inspect.getsource(engine_deepspeed)
    for name in ("mesh_param", "mpu=", "sequence_parallel"):
        assert name not in source


# Found here


def test_12_stage_3_takes_no_sums() -> None:
    """So the engine multiplies the loss by the number of ranks there."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = {"train_batch_size": 1, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        DeepSpeedConfig(config)


def offload_overflow_case(forget: bool) -> list[bool]:
    """Whether each of three steps was applied; the first has a bad gradient on rank 1."""
    from unittest import mock

    from moe.train.zero import offload

    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    engine = make(Kind(EngineKind.deepspeed, 2, DType.bf16, OffloadAdam.torch), mesh)
    applied = []
    keeping = contextlib.nullcontext() if forget else mock.patch.object(offload, "forget_bad_gradients")
    with keeping:
        for step in range(3):
            batch = global_batch(step)
            loss = engine.forward(share(batch, mesh, 1)[0]).lm_loss_sum / counts_of(batch, mesh).labelled_tokens
            engine.backward(loss * float("inf") if step == 0 and mesh.rank == 1 else loss)
            applied.append(engine.step(OPTIM.lr).applied)
    engine.close()
    return applied


def test_13_an_offloaded_step_2_never_recovers_from_a_bad_gradient(raw_pool: ProcessPool) -> None:
    assert raw_pool.run(offload_overflow_case, False, timeout=40) == [[False, False, False]] * 2
    assert raw_pool.run(offload_overflow_case, True, timeout=40) == [[False, True, True]] * 2


def odd_size_case() -> str:
    from deepspeed.utils import safe_set_full_fp32_param

    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    model = nn.Linear(3, 1, bias=False)
    engine = bare(mesh, model, model.parameters(), stage=3)
    try:
        safe_set_full_fp32_param(model.weight, torch.ones(1, 3))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "set"


def test_14_stage_3_cannot_set_what_does_not_divide(raw_pool: ProcessPool) -> None:
    assert "set" not in raw_pool.run(odd_size_case, timeout=40)[1:]


def test_15_npu_norms_are_asked_for_in_fp64() -> None:
    import deepspeed.accelerator.abstract_accelerator as abstract

    source = Path(inspect.getfile(abstract)).with_name("npu_accelerator.py").read_text()
    assert "def is_fp64_supported" not in source
    assert "return True" in inspect.getsource(abstract.DeepSpeedAccelerator.is_fp64_supported)


def test_15_an_npu_gets_fp32_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended NPU: the accelerator of this process answers as one for the length of the preparation."""
    from dataclasses import replace

    from deepspeed.runtime.zero.utils import get_norm_dtype

    from moe.train import engine_deepspeed

    accelerator = engine_deepspeed.get_accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda index=None: "npu")
    monkeypatch.setattr(accelerator, "is_fp64_supported", accelerator.is_fp64_supported)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
        assert get_norm_dtype() is torch.float64
        engine_deepspeed._prepare_deepspeed(mesh, replace(cpu.make(0), deepspeed_accelerator="npu"))
        assert get_norm_dtype() is torch.float32
    finally:
        dist.destroy_process_group()


def stack_case() -> int:
    from deepspeed.runtime.zero import parameter_offload

    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    model = nn.Linear(4, 4)
    engine = bare(mesh, model, model.parameters(), stage=3)
    engine.destroy()
    return sum(module is model for module in parameter_offload.FWD_MODULE_STACK)


def test_16_stage_3_keeps_every_module_for_ever(raw_pool: ProcessPool) -> None:
    """`DeepSpeedEngine.close` takes it out (see test_engines_follow_each_other_in_one_process)."""
    assert raw_pool.run(stack_case, timeout=40) == [1, 1]


def test_the_engine_refuses_what_it_cannot_correct() -> None:
    """No stage beyond 3."""
    from moe.train.engine_deepspeed import DeepSpeedEngine

    with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
        DeepSpeedEngine(
            nn.Linear(1, 1), mesh=None, backend=None, optim=OPTIM, engine=EngineConfig(zero_stage=4), accumulation=1  # type: ignore[arg-type]
        )  # fmt: skip
