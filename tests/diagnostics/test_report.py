"""The report of made-up runs: each fault is found, named and answered; a healthy run is left in peace."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moe.diagnostics.record import EvalRecord
from moe.diagnostics.report import build_report, render_report
from moe.diagnostics.store import LoadLayout, MetricsStore
from moe.errors import DataError
from tests.diagnostics.runs import LAYOUT, TOKENS, even_counts, step_record, write_run


def report_of(
    run_dir: Path, change: Callable[[int], dict[str, Any]] = lambda step: {}, *, steps: int = 100, **options: Any
) -> dict[str, Any]:
    """Write a run of healthy steps with `change(step)` applied to each, and report on it."""
    write_run(run_dir, [step_record(step, **change(step)) for step in range(1, steps + 1)], **options)
    return build_report(run_dir)


def kinds(report: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in report["findings"]]


def shown(report: dict[str, Any], *, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render_report(report, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert report["verdict"] == "healthy"
    assert report["findings"] == []
    assert report["window"] == [81, 100]
    summary = report["summary"]
    assert (summary["state"], summary["steps"], summary["max_steps"]) == ("finished", 100, 100)
    assert (summary["tokens"], summary["labelled_tokens"]) == (100 * TOKENS, 100 * (TOKENS - 4))
    assert summary["lm_loss_first"] == pytest.approx(5.0 + 3.0 * 0.97)
    assert summary["lm_loss_best_step"] == 100
    assert summary["tokens_per_second_median"] == pytest.approx(10240)
    assert summary["memory_bytes_max"] == 3 * 2**30
    for layer in report["layers"]:
        assert layer["evenness"] > 0.999
        assert layer["effective_experts"] == pytest.approx(8, abs=0.05)
        # c̄ = 256, E = 8, K = 2: sqrt(2 ln 8 · 3/4 / 256)
        assert layer["noise_floor"] == pytest.approx(np.sqrt(2 * np.log(8) * 0.75 / 256))
        assert layer["max_vio_over_floor"] < 1.5
        assert sum(layer["load_over_ideal"]) == pytest.approx(8)


def test_the_report_is_strict_json_even_of_a_broken_run(tmp_path: Path) -> None:
    report = report_of(tmp_path, lambda step: {"lm_loss": np.nan, "grad_norm": np.inf, "tokens_per_second": np.nan})
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["verdict"] == "act"
    assert report["loss_curve"] == []
    assert "not finite in 100 of 100 steps" in shown(report)


def test_dead_experts_are_named_with_layer_and_steps(tmp_path: Path) -> None:
    """Layer 2 routes to 2 of its 8 experts from step 50 on."""

    def collapse(step: int) -> dict[str, Any]:
        counts_LE = even_counts(np.random.default_rng(step))
        if step >= 50:
            counts_LE[1] = [TOKENS, 0, 0, TOKENS, 0, 0, 0, 0]
        return {"tokens_per_expert_LE": counts_LE}

    report = report_of(tmp_path, collapse)
    assert report["verdict"] == "act"
    assert kinds(report) == ["dead_experts", "imbalance"]
    dead, imbalance = report["findings"]
    assert (dead["layer"], dead["experts"], dead["steps"]) == (2, [1, 2, 4, 5, 6, 7], [81, 100])
    assert dead["text"] == "layer 2: experts 1, 2, 4, 5, 6, 7 of 8 got no token in steps 81 to 100"
    assert "moe.load_balancing_coef" in dead["change"]
    # Two of eight take all: four times their share.
    assert (imbalance["layer"], imbalance["level"], imbalance["value"]) == (2, "act", pytest.approx(3.0))
    assert report["layers"][1]["effective_experts"] == pytest.approx(2.0)


def test_a_layer_collapsed_to_8_of_64_has_the_known_values(tmp_path: Path) -> None:
    layout = LoadLayout(layer_indices=(0,), num_experts=64, top_k=8)
    counts_LE = np.array([[TOKENS] * 8 + [0] * 56])
    report = report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}, load_layout=layout)
    layer = report["layers"][0]
    assert layer["max_vio"] == pytest.approx(7.0)
    assert layer["evenness"] == pytest.approx(0.5)
    assert layer["effective_experts"] == pytest.approx(8.0)
    assert len(layer["dead"]) == 56
    assert "experts 8, 9, 10, 11, 12, 13 ... (56) of 64 got no token" in report["findings"][0]["text"]


def test_an_expert_is_not_called_dead_after_a_handful_of_picks(tmp_path: Path) -> None:
    """16 picks over 8 experts a step, 5 steps: 10 expected each; chance alone could leave one out."""
    counts_LE = np.array([[0, 4, 2, 2, 2, 2, 2, 2]] * 2)
    assert kinds(report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}, steps=5)) == []


def test_imbalance_must_be_more_than_chance(tmp_path: Path) -> None:
    """MaxVio 1 of four picks an expert is noise (floor 0.88); of 400 it is the router."""
    few, many = np.array([[8, 4, 4, 4, 4, 4, 3, 1]] * 2), np.array([[800, 400, 400, 400, 400, 400, 300, 100]] * 2)
    assert kinds(report_of(tmp_path / "few", lambda step: {"tokens_per_expert_LE": few})) == []
    report = report_of(tmp_path / "many", lambda step: {"tokens_per_expert_LE": many})
    assert kinds(report) == ["imbalance"]
    assert report["verdict"] == "watch"
    assert report["findings"][0]["experts"] == [0]
    assert "expert 0 got 2.0 times its share; 1 more layers above 1.0" in report["findings"][0]["text"]


def test_starving_experts_and_waiting_ranks_are_watched(tmp_path: Path) -> None:
    """Experts 4–7 (rank 1) get 1 % each: rank 0 has 96 % of the work, so ranks wait 1 − 1/1.92 of it."""
    counts_LE = np.array([[2400] * 4 + [100] * 4] * 2)
    layout = LoadLayout(layer_indices=(1, 2), num_experts=8, top_k=2, rank_of_expert=(0, 0, 0, 0, 1, 1, 1, 1))
    report = report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}, load_layout=layout)
    assert kinds(report) == ["rank_waste", "starving_experts"]
    assert report["findings"][0]["value"] == pytest.approx(1 - 1 / 1.92)
    assert report["findings"][1]["experts"] == [4, 5, 6, 7]
    assert report["verdict"] == "watch"


@pytest.mark.parametrize(("rate", "verdict"), [(0.005, "healthy"), (0.04, "watch"), (0.25, "act")])
def test_drops_above_one_percent_are_found(tmp_path: Path, rate: float, verdict: str) -> None:
    report = report_of(tmp_path, lambda step: {"drop_rate": rate, "drop_rate_layers": (0.0, 2 * rate)})
    assert report["verdict"] == verdict
    assert report["layers"][1]["drop_rate"] == pytest.approx(2 * rate)
    if verdict != "healthy":
        assert kinds(report) == ["drops"]
        assert report["findings"][0]["layer"] == 2
        assert f"{100 * rate:.1f} % of the picks were dropped in steps 81 to 100" in report["findings"][0]["text"]
        assert "dispatch.capacity_factor" in report["findings"][0]["change"]


@pytest.mark.parametrize(
    ("loss", "verdict", "text"),
    [
        (lambda step: 8.3, "act", "did not fall: 8.300 nats at first, 8.300 over steps 91 to 100"),
        (lambda step: 5.0 + 0.03 * step, "act", "rose from"),
        (lambda step: 5.0 + 0.002 * (step - 60) ** 2, "watch", "rose again from 5.0"),
    ],
)
def test_a_loss_that_does_not_fall_is_found(
    tmp_path: Path, loss: Callable[[int], float], verdict: str, text: str
) -> None:
    report = report_of(tmp_path, lambda step: {"lm_loss": loss(step)})
    assert kinds(report) == ["loss"]
    assert report["verdict"] == verdict
    assert text in report["findings"][0]["text"]


@pytest.mark.parametrize(("bad_step", "level"), [(10, "watch"), (95, "act")])
def test_gradients_that_are_not_finite_are_found(tmp_path: Path, bad_step: int, level: str) -> None:
    report = report_of(tmp_path, lambda step: {"grad_norm": np.inf} if step == bad_step else {})
    assert kinds(report) == ["non_finite"]
    assert report["findings"][0]["level"] == level
    assert f"in 1 of 100 steps (step {bad_step})" in report["findings"][0]["text"]
    assert report["summary"]["grad_norm_median"] == 0.5


def test_a_run_that_became_slow_is_found(tmp_path: Path) -> None:
    report = report_of(tmp_path, lambda step: {"tokens_per_second": 1000.0 if step <= 66 else 600.0})
    assert kinds(report) == ["speed"]
    assert "600 tokens/s in steps 68 to 100, 40 % below the 1.0k before" in report["findings"][0]["text"]


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    command = f"switchyard run quickstart run.dir={tmp_path}"
    report = report_of(tmp_path, steps=30, max_steps=200, resume_command=command)
    assert report["verdict"] == "watch"
    assert kinds(report) == ["unfinished"]
    assert "stopped after step 30 of 200" in report["findings"][0]["text"]
    assert report["next_command"] == command


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path, resume_step=None, max_steps=200, load_layout=LAYOUT, tensorboard=False)
    for step in range(1, 31):
        store.write_step(step_record(step))
    alive = build_report(tmp_path)
    assert (alive["verdict"], alive["summary"]["state"]) == ("healthy", "running")
    hour_ago = os.stat(tmp_path / "metrics.jsonl").st_mtime - 3600
    os.utime(tmp_path / "metrics.jsonl", (hour_ago, hour_ago))
    (tmp_path / "crash").mkdir()
    (tmp_path / "crash" / "rank-1.json").write_text("{}")
    killed = build_report(tmp_path)
    assert (killed["verdict"], killed["summary"]["state"]) == ("act", "killed")
    assert "crash says why" in killed["findings"][0]["text"]
    store.close()


def test_at_most_five_findings_the_worst_first(tmp_path: Path) -> None:
    def everything(step: int) -> dict[str, Any]:
        return {
            "tokens_per_expert_LE": np.array([[8000, 10, 400, 400, 400, 400, 400, 0]] * 2),
            "lm_loss": np.nan if step == 5 else 8.0,
            "drop_rate": 0.02,
            "tokens_per_second": 1000.0 if step <= 66 else 100.0,
        }

    report = report_of(tmp_path, everything, max_steps=1000)
    assert kinds(report) == ["loss", "dead_experts", "imbalance", "non_finite", "unfinished"]
    assert [finding["level"] for finding in report["findings"]] == ["act"] * 3 + ["watch"] * 2
    assert report["findings_left_out"] == 3
    assert "and 3 lesser findings" in shown(report)


def test_held_out_losses_are_per_domain_and_of_the_newest_evaluation(tmp_path: Path) -> None:
    with MetricsStore(tmp_path, resume_step=None, max_steps=4, load_layout=LAYOUT, tensorboard=False) as store:
        for step in range(1, 5):
            store.write_step(step_record(step))
            store.write_eval(EvalRecord(step=step, domain="code", lm_loss=6.0 - step, num_tokens=2048))
        store.write_eval(EvalRecord(step=4, domain="topics", lm_loss=5.5, num_tokens=1024))
    report = build_report(tmp_path)
    assert report["held_out"] == [
        {"domain": "code", "lm_loss_first": 5.0, "lm_loss": 2.0, "step": 4, "num_tokens": 2048},
        {"domain": "topics", "lm_loss_first": 5.5, "lm_loss": 5.5, "step": 4, "num_tokens": 1024},
    ]
    assert "code: 2.000 nats over 2.0k tokens after step 4" in shown(report)


def test_language_loss_and_objective_are_shown_apart(tmp_path: Path) -> None:
    """A47: 2.0 is the loss; 2.15, with router losses, is named as such."""
    report = report_of(tmp_path, lambda step: {"lm_loss": 2.0, "balance_loss": 1.5, "total_loss": 2.15}, steps=3)
    text = shown(report)
    assert "lm_loss      2.000 to 2.000 nats per token" in text
    assert "objective    2.150 with router losses; raw balance 1.500 (1 = even)" in text


def test_the_terminal_form_shows_layers_and_their_load(tmp_path: Path) -> None:
    counts_LE = np.array([[1400, 1040, 1040, 1040, 1040, 1040, 1400, 0], [1000] * 8])
    text = shown(report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}))
    assert text.startswith(f"ACT  {tmp_path}")
    assert "layer   1 |▅▄▄▄▄▄▅!|" in text
    assert "layer   2 |▄▄▄▄▄▄▄▄|" in text
    assert "expert load in steps 81 to 100" in text
    assert "next: switchyard report" in text


def test_the_terminal_form_survives_an_ascii_terminal(tmp_path: Path) -> None:
    """Strips and shortened lists need no Unicode there, and a folder's name in it is shown as well as can be."""
    tmp_path = tmp_path / "läuft"
    layout = LoadLayout(layer_indices=(0,), num_experts=64, top_k=8)
    counts_LE = np.array([[TOKENS] * 8 + [0] * 56])
    report = report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}, load_layout=layout)
    text = shown(report, encoding="ascii")
    assert "l?uft" in text
    assert "|@@@@@@@@!!!!" in text


def test_many_experts_are_pooled_without_hiding_a_dead_one(tmp_path: Path) -> None:
    layout = LoadLayout(layer_indices=(0,), num_experts=256, top_k=8)
    counts_LE = np.full((1, 256), 1000)
    counts_LE[0, 101] = 0
    report = report_of(tmp_path, lambda step: {"tokens_per_expert_LE": counts_LE}, load_layout=layout)
    strip = next(line for line in shown(report).splitlines() if line.startswith("layer   0"))
    assert strip == "layer   0 |" + "▄" * 25 + "!" + "▄" * 38 + "|"


def test_a_run_without_experts_is_reported_without_them(tmp_path: Path) -> None:
    plain = {"tokens_per_expert_LE": np.zeros((0, 8), dtype=np.int64), "balance_loss": None, "z_loss": None}
    report = report_of(tmp_path, lambda step: plain | {"drop_rate": None, "drop_rate_layers": ()}, load_layout=None)
    assert (report["verdict"], report["layers"]) == ("healthy", [])
    assert "expert load" not in shown(report)


def test_one_step_is_enough_for_a_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, steps=1)
    assert report["verdict"] == "healthy"
    assert "1 of 1 (finished)" in shown(report)


def test_a_torn_run_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    write_run(tmp_path, [step_record(step) for step in range(1, 41)])
    for name in ("metrics.jsonl", "load/counts.bin"):
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 3)
    assert build_report(tmp_path)["summary"]["steps"] == 39


def test_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        build_report(tmp_path / "nowhere")


def test_reporting_does_not_load_torch() -> None:
    code = "import sys, moe.diagnostics.report; assert 'torch' not in sys.modules, 'torch was imported'"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


def test_a_long_run_is_reported_in_seconds(tmp_path: Path) -> None:
    record = step_record(1)
    line = json.dumps(record.to_json())[len('{"step": 1') :]
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}{line}\n' for step in range(1, 5_001)))
    report = build_report(tmp_path)
    assert report["summary"]["steps"] == 5_000
    assert len(report["loss_curve"]) == 60
    assert report["summary"]["state"] == "unknown"
