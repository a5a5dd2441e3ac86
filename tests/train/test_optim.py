"""Schedule, groups, norm and masters, against values worked out by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from moe.model.config import ModelConfig, MoEConfig, RouterKind
from moe.model.transformer import Transformer
from moe.train.config import DType, OptimConfig, ScheduleKind
from moe.train.engine import ParameterState
from moe.train.mesh import build_mesh
from moe.train.optim import (
    MasterAdamW,
    cast_parameters,
    check_states,
    clip_coefficient,
    global_grad_norm,
    is_expert,
    learning_rate,
    parameter_groups,
)
from tests.process_pool import ProcessPool

SCHEDULE = OptimConfig(lr=1e-3, warmup_steps=10, min_lr_ratio=0.1)


def model() -> Transformer:
    """One dense and one sparse block, with the names of every kind of parameter."""
    return Transformer(
        ModelConfig(vocab_size=8, hidden_size=4, num_layers=2, num_heads=2, intermediate_size=4, num_kv_heads=1),
        MoEConfig(num_experts=2, moe_intermediate_size=4, num_shared_experts=1, router=RouterKind.sigmoid),
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    # Half of the cosine, steps 10 to 110, is step 60: 0.1 + 0.9 / 2. After the end it stays.
    [(1, 1e-4), (4, 4e-4), (5, 5e-4), (10, 1e-3), (60, 5.5e-4), (110, 1e-4), (500, 1e-4)],
)
def test_learning_rate_is_a_function_of_the_step(step: int, expected: float) -> None:
    """A32: 5e-4 at step 5 of a warm-up of 10, however often the run was resumed."""
    assert learning_rate(step, SCHEDULE, max_steps=110) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_without_cosine_or_warmup() -> None:
    constant = replace(SCHEDULE, schedule=ScheduleKind.constant)
    assert [learning_rate(s, constant, max_steps=20) for s in (5, 10, 20)] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert learning_rate(1, replace(SCHEDULE, warmup_steps=0, schedule=ScheduleKind.constant), max_steps=1) == 1e-3
    # A warm-up longer than the run, and one that ends with it.
    assert learning_rate(3, SCHEDULE, max_steps=3) == pytest.approx(3e-4)
    assert learning_rate(11, SCHEDULE, max_steps=10) == pytest.approx(1e-4)


def test_groups_hold_every_parameter_once_and_norms_do_not_decay() -> None:
    module = model()
    groups = parameter_groups(module, SCHEDULE)
    names = {parameter: name for name, parameter in module.named_parameters()}
    held = {group["name"]: [names[p] for p in group["params"]] for group in groups}
    assert sorted(name for group in held.values() for name in group) == sorted(names.values())
    assert held["experts"] == [f"layers.1.moe.experts.{w}" for w in ("w1", "w3", "w2")]
    assert all("norm" in name for name in held["dense_no_decay"])
    assert not any("norm" in name for name in held["dense"])
    assert {group["name"]: group["weight_decay"] for group in groups} == {
        "dense": SCHEDULE.weight_decay, "dense_no_decay": 0.0, "experts": SCHEDULE.weight_decay,
    }  # fmt: skip
    again = [[names[p] for p in group["params"]] for group in parameter_groups(module, SCHEDULE)]
    assert again == list(held.values())


def test_shared_experts_are_dense() -> None:
    assert is_expert("layers.1.moe.experts.w1")
    assert not is_expert("layers.1.moe.shared_experts.up_proj.weight")
    assert not is_expert("layers.1.moe.router.weight")


def _norms() -> list[float]:
    own = build_mesh(expert_size=2, device=torch.device("cpu"))
    replicated = build_mesh(expert_size=1, device=torch.device("cpu"))
    # Squared norms 20 and 100: (2, 4) and (6, 8).
    mine = torch.tensor([[2.0, 4.0], [6.0, 8.0]])[own.rank]
    both = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, 8.0])]
    poisoned = mine.clone()
    if own.rank == 1:
        poisoned[0] = float("nan")
    return [
        float(global_grad_norm([], [mine], own.expert_group)),
        float(global_grad_norm([], both, replicated.expert_group)),
        float(global_grad_norm([torch.tensor([1.0]), torch.zeros(2, 2)], [mine], own.expert_group)),
        float(global_grad_norm([], [poisoned], own.expert_group)),
    ]


def test_norm_counts_each_expert_once(process_pool: Callable[[int], ProcessPool]) -> None:
    """A25: 10.954451 on both ranks, with experts spread or replicated; a NaN on one rank is seen by both."""
    for spread, replicated, with_dense, poisoned in process_pool(2).run(_norms):
        assert spread == pytest.approx(10.954451, rel=1e-6)
        assert replicated == pytest.approx(10.954451, rel=1e-6)
        assert with_dense == pytest.approx(11.0, rel=1e-6)
        assert poisoned != poisoned


def test_norm_of_nothing_is_zero() -> None:
    assert float(global_grad_norm([], [], None)) == 0.0


def test_clip_coefficient() -> None:
    """A25: at max-norm 1 the factor is 0.091287."""
    assert clip_coefficient(10.954451, 1.0) == pytest.approx(0.091287, rel=1e-5)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(1e9, 0.0) == 1.0


def test_bf16_parameters_follow_fp32_masters_and_accumulate_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator).bfloat16()
    low, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    settings = {"name": "dense", "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    masters = MasterAdamW([{**settings, "params": [low]}])
    adamw = torch.optim.AdamW([{**settings, "params": [exact]}])
    for _ in range(3):
        # 1 + 8 · 2^-9 is lost in bf16, where 1 + 2^-9 rounds to 1.
        exact.grad = torch.full_like(exact, 1.0 + 8 * 2.0**-9)
        for value in (1.0, *[2.0**-9] * 8):
            low.grad = torch.full_like(low, value)
            masters.accumulate()
        assert masters.masters[low].grad is not None
        torch.testing.assert_close(masters.masters[low].grad, exact.grad, rtol=0, atol=0)
        masters.step()
        adamw.step()
        masters.clear()
        torch.testing.assert_close(masters.masters[low], exact, rtol=0, atol=0)
        torch.testing.assert_close(low, exact.bfloat16(), rtol=0, atol=0)
    assert masters.parameter_state(low).step == 3


def test_a_weight_without_gradient_decays() -> None:
    """The choice on idle experts: a missing gradient is a zero, so AdamW decays it: 1 → 0.99 at lr 0.1, decay 0.1."""
    idle = nn.Parameter(torch.ones(2))
    settings = {"name": "dense", "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = MasterAdamW([{**settings, "params": [idle]}])
    optimizer.accumulate()
    optimizer.step()
    torch.testing.assert_close(idle.data, torch.full((2,), 0.99))


def test_cast_leaves_buffers_alone() -> None:
    """A16: the expert bias stays fp32 in a bf16 run."""
    module = model()
    cast_parameters(module, DType.bf16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for b in module.buffers() if b.is_floating_point())
    assert any(name.endswith("expert_bias") for name, _ in module.named_buffers())


def test_unfitting_states_are_refused_by_name() -> None:
    """A33: never half a restore in silence."""
    parameters = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(3))}
    good = {
        name: ParameterState(weight=p.data, exp_avg=p.data, exp_avg_sq=p.data, step=1) for name, p in parameters.items()
    }
    check_states(parameters, good)
    with pytest.raises(ValueError, match=r"missing \['b'\], unknown none"):
        check_states(parameters, {"a": good["a"]})
    with pytest.raises(ValueError, match=r"missing none, unknown \['c'\]"):
        check_states(parameters, {**good, "c": good["a"]})
    with pytest.raises(ValueError, match=r"exp_avg of b has shape \[2\], but the model's is \[3\]"):
        check_states(parameters, {**good, "b": replace(good["b"], exp_avg=torch.zeros(2))})


def test_the_norm_of_a_large_tensor_is_right_to_the_last_digits() -> None:
    """A CPU's fp32 sum of a million squares is not: the norm is formed in fp64 there and rounded once."""
    gradient = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    expected = float(gradient.double().square().sum().sqrt())
    assert float(global_grad_norm([gradient], [], None)) == pytest.approx(expected, rel=1e-7)
