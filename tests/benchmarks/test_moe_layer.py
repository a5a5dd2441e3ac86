"""The layer benchmark's own logic: its routing is what it says, its ratios are, and the contenders compute one function."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS, EQUAL_RESULTS, Absent, Setting
from benchmarks.layer_cases import ROUTINGS, LayerShape, expert_weights, make_input, pick_experts, router_weight
from benchmarks.moe_layer import GEMM, MARK, Options, Row, table_head, table_row, write_table
from benchmarks.turns import Median, Sample, Turns

SMALL = LayerShape(name="small", num_experts=8, top_k=2, hidden_size=32, intermediate_size=16, num_tokens=64)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _setting() -> Setting:
    return Setting(
        shape=SMALL,
        weights=expert_weights(SMALL, _generator(5)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_ranks=1,
        rank=0,
    )


def _batch(routing: str) -> tuple[Tensor, Tensor]:
    ids_TK = pick_experts(SMALL, routing, _generator(7), _generator(1))
    return make_input(ids_TK, SMALL, torch.float32, _generator(2)), ids_TK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_inputs_are_routed_where_the_case_says(routing: str, dtype: torch.dtype) -> None:
    ids_TK = pick_experts(SMALL, routing, _generator(7), _generator(1))
    assert all(len(set(ids)) == SMALL.top_k for ids in ids_TK.tolist())
    x_TD = make_input(ids_TK, SMALL, dtype, _generator(2))
    assert torch.equal((x_TD @ router_weight(SMALL).to(dtype).T).topk(SMALL.top_k).indices, ids_TK)


def test_balanced_is_exact_and_zipf_is_skewed() -> None:
    load = {name: _batch(name)[1].flatten().bincount(minlength=SMALL.num_experts) for name in ROUTINGS}
    mean = SMALL.num_tokens * SMALL.top_k // SMALL.num_experts
    assert load["balanced"].tolist() == [mean] * SMALL.num_experts
    assert load["zipf"].max() > 2 * mean


def test_more_experts_than_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tight: num_experts \(8\) must not exceed hidden_size \(4\)"):
        LayerShape(name="tight", num_experts=8, top_k=2, hidden_size=4, intermediate_size=4, num_tokens=4)


def _by_hand(x_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """Token by token: softmax over all experts, the chosen weights made to sum to one, SwiGLU."""
    weights = expert_weights(SMALL, _generator(5))
    rows = []
    for x_D, ids in zip(x_TD, ids_TK.tolist(), strict=True):
        probabilities_E = (router_weight(SMALL) @ x_D).softmax(0)
        total = sum(probabilities_E[expert] for expert in ids)
        parts = [
            probabilities_E[expert]
            / total
            * (
                weights.w2_EDF[expert]
                @ (torch.nn.functional.silu(weights.w1_EFD[expert] @ x_D) * (weights.w3_EFD[expert] @ x_D))
            )
            for expert in ids
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["ours", *EQUAL_RESULTS])
def test_contenders_compute_the_same_function(name: str) -> None:
    x_TD, ids_TK = _batch("zipf")
    expected_x, actual_x = x_TD.clone().requires_grad_(), x_TD.clone().requires_grad_()
    try:
        layer = CONTENDERS[name](_setting())
    except Absent as reason:
        pytest.skip(str(reason))
    expected, actual = _by_hand(expected_x, ids_TK), layer.forward(actual_x)
    grad_TD = torch.randn(x_TD.shape, generator=_generator(3))
    expected.backward(grad_TD)
    actual.backward(grad_TD)
    assert expected_x.grad is not None
    assert actual_x.grad is not None
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert (actual_x.grad - expected_x.grad).norm() <= 1e-5 * expected_x.grad.norm()


@pytest.mark.parametrize(("name", "package"), [("DS AutoEP", "deepspeed"), ("HF eager", "transformers")])
def test_a_peer_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    with pytest.raises(Absent, match=f"{package} is not installed"):
        CONTENDERS[name](_setting())


def _median(wall_s: float, busy_s: float, *, quiet: bool = True) -> Median:
    return Median(wall_s=wall_s, busy_s=busy_s, quiet=quiet)


def _options(*contenders: str) -> Options:
    return Options(
        device="cpu",
        turns=3,
        seconds_per_row=1.0,
        fixed_batch=False,
        keep_memory=False,
        contenders=contenders,
        threads=2,
    )


def test_ratios_are_of_ours_losses_and_absent_peers_stay_in_the_row() -> None:
    """Ours 10 ms, one peer 8 ms (a loss: 0.80), one that drops tokens (never the nearest), one that is not there."""
    options = _options("ours", "HF grouped", "DS MoE, drops", "HF eager")
    results: dict[str, Median | str] = {
        GEMM: _median(0.1, 0.2),
        "ours": _median(0.010, 0.020),
        "HF grouped": _median(0.008, 0.030),
        "DS MoE, drops": _median(0.005, 0.010),
        "HF eager": "transformers is not installed",
    }
    row = Row(shape=SMALL, routing="zipf", dtype="bf16", num_ranks=1)
    cells = [cell.strip() for cell in table_row(row, results, options).strip("|").split("|")]
    assert len(cells) == table_head(options).splitlines()[0].count("|") - 1
    assert cells[:5] == ["small", "zipf", "bf16", "1", "10"]
    assert [cell.rsplit(" ", 1)[0] for cell in cells[6:8]] == ["0.80 (1.50)", "0.50 (0.50)"]
    assert cells[8:] == ["(transformers is not installed)", "0.80"]


def test_share_is_useful_work_over_the_plain_product() -> None:
    """12 products of 1024 cubed take 12 · 2 · 1024^3 / 10^12 s at 1 TFLOP/s; ours does its work at half that rate."""
    shape = LayerShape(name="s", num_experts=8, top_k=2, hidden_size=512, intermediate_size=1024, num_tokens=4096)
    seconds = 18.0 * 4096 * 2 * 512 * 1024 / 0.5e12
    results: dict[str, Median | str] = {GEMM: _median(24.0 * 1024**3 / 1e12, 1.0), "ours": _median(seconds, 1.0)}
    row = Row(shape=shape, routing="zipf", dtype="bf16", num_ranks=1)
    assert re.search(r"\| 50% \|", table_row(row, results, _options("ours")))


def test_turns_that_others_disturbed_do_not_count_once_enough_are_quiet() -> None:
    turns = Turns()
    for wall_s, machine_s in [(1.0, 1.0), (9.0, 15.0), (1.2, 1.2), (1.1, 1.1)]:
        turns.add([Sample(wall_s=wall_s, busy_s=min(wall_s, machine_s))], machine_s, cores=2)
    assert turns.quiet == [True, False, True, True]
    assert turns.median() == _median(1.1, 1.1)


def test_writing_keeps_what_people_wrote(tmp_path: Path) -> None:
    path = tmp_path / "layer.md"
    path.write_text(f"# Title\n\nWords.\n\n{MARK}\n\nold\n")
    write_table(path, ["new"])
    write_table(path, ["new", "newer"])
    assert path.read_text() == f"# Title\n\nWords.\n\n{MARK}\n\nnew\nnewer\n"
    made = tmp_path / "made.md"
    write_table(made, ["new"])
    write_table(made, ["newer"])
    assert made.read_text() == f"{MARK}\n\nnewer\n"
