"""What a run folder says about its run: a verdict, at most five findings with a way out, and the figures. Torch-free.

`build_report` reads the folder and returns plain data (the JSON form); `render_report` shows the same on a terminal.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from moe.diagnostics.facts import RunFacts, read_facts
from moe.diagnostics.findings import find, resume_command
from moe.diagnostics.progress import print_plain, short_number, short_time
from moe.diagnostics.store import EVENTS

MAX_FINDINGS = 5
CURVE_POINTS = 60
HEAT_COLUMNS = 64


def build_report(run_dir: Path) -> dict[str, Any]:
    """Return what is known about the run in `run_dir`, as strict JSON data (no NaN, null where something is unknown).

    Keys: format, run_dir, verdict (healthy, watch, act), findings (see `Finding`; the worst first), findings_left_out,
    summary, held_out (per domain), window, layers (per MoE layer over the window), loss_curve, next_command.

    Raises DataError when the folder is missing, is no run folder, or holds no readable step. Torn lines are skipped.
    """
    facts = read_facts(run_dir)
    found = find(facts)
    return _strict(
        {
            "format": 1,
            "run_dir": str(run_dir),
            "verdict": found[0].level if found else "healthy",
            "findings": [asdict(finding) for finding in found[:MAX_FINDINGS]],
            "findings_left_out": max(0, len(found) - MAX_FINDINGS),
            "summary": _summary(facts),
            "held_out": _held_out(facts),
            "window": facts.window,
            "layers": [asdict(layer) for layer in facts.layers],
            "loss_curve": _curve(facts.steps, facts.column("lm_loss")),
            "next_command": _next_command(facts),
        }
    )


def render_report(report: dict[str, Any], console: Console) -> None:
    """Print a report of `build_report`; in ASCII where the console cannot show block characters."""
    blocks = not console.options.ascii_only
    colour = {"healthy": "green", "watch": "yellow", "act": "red"}
    verdict = report["verdict"]
    print_plain(console, f"{verdict.upper()}  {report['run_dir']}", style=f"bold {colour[verdict]}")
    for finding in report["findings"]:
        print_plain(console, f"  {finding['level']}: {finding['text']}", style=colour[finding["level"]])
        print_plain(console, f"       {finding['change']}")
    if report["findings_left_out"]:
        print_plain(console, f"  and {report['findings_left_out']} lesser findings, shown when these are gone")
    print_plain(console, "")
    for name, value in _summary_lines(report):
        print_plain(console, f"{name:<12} {value}")
    if report["loss_curve"]:
        losses = [point["lm_loss"] for point in report["loss_curve"]]
        print_plain(console, f"{'loss curve':<12} {_sparkline(losses, blocks)}")
    if report["layers"]:
        print_plain(console, "")
        for line in _layer_lines(report):
            print_plain(console, line)
        for layer in report["layers"]:
            print_plain(console, f"layer {layer['layer']:>3} |{_heat_strip(layer['load_over_ideal'], blocks)}|")
        print_plain(console, _heat_legend(blocks))
    print_plain(console, "")
    print_plain(console, f"next: {report['next_command']}", style="bold")


def _summary(facts: RunFacts) -> dict[str, Any]:
    loss = facts.column("lm_loss")
    best = int(np.nanargmin(loss)) if np.isfinite(loss).any() else None
    last = facts.rows[-1]
    in_window = facts.steps >= facts.window[0]
    return {
        "state": facts.state,
        "steps": facts.last_step,
        "max_steps": facts.status.get("max_steps"),
        "tokens": _total(facts.column("num_routed_tokens")),
        "labelled_tokens": _total(facts.column("num_tokens")),
        "step_seconds_total": float(np.nansum(facts.column("step_seconds"))),
        "lm_loss_first": loss[0],
        "lm_loss_last": loss[-1],
        "lm_loss_best": None if best is None else loss[best],
        "lm_loss_best_step": None if best is None else int(facts.steps[best]),
        "balance_loss_last": last.get("balance_loss"),
        "z_loss_last": last.get("z_loss"),
        "total_loss_last": last.get("total_loss"),
        "grad_norm_median": _median(facts.column("grad_norm")),
        "tokens_per_second_median": _median(facts.column("tokens_per_second")),
        "model_flops_per_second_median": _median(facts.column("model_flops_per_second")),
        "memory_bytes_max": _largest(facts.column("memory_bytes")),
        "max_vio_window_median": _median(facts.column("max_vio")[in_window]),
        "drop_rate_window_mean": _mean(facts.column("drop_rate")[in_window]),
    }


def _held_out(facts: RunFacts) -> list[dict[str, Any]]:
    """First and newest held-out loss of each domain."""
    domains: dict[str, dict[str, Any]] = {}
    for row in facts.evaluations:
        entry = domains.setdefault(row["domain"], {"domain": row["domain"], "lm_loss_first": row["lm_loss"]})
        entry |= {"lm_loss": row["lm_loss"], "step": row["step"], "num_tokens": row["num_tokens"]}
    return list(domains.values())


def _curve(steps: NDArray[np.int64], values: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Means of at most CURVE_POINTS equal stretches of the run; stretches without a finite value are left out."""
    parts = np.array_split(np.arange(len(values)), min(CURVE_POINTS, len(values)))
    return [
        {"step": int(steps[part[-1]]), "lm_loss": float(np.mean(values[part][np.isfinite(values[part])]))}
        for part in parts
        if np.isfinite(values[part]).any()
    ]


def _next_command(facts: RunFacts) -> str:
    if facts.state in ("stopped", "killed"):
        return resume_command(facts)
    if (facts.run_dir / EVENTS).is_dir():
        return f"tensorboard --logdir {facts.run_dir / EVENTS}"
    return f"switchyard report {facts.run_dir} --json"


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _median(values: NDArray[np.float64]) -> float | None:
    finite = _finite(values)
    return float(np.median(finite)) if len(finite) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else None


def _largest(values: NDArray[np.float64]) -> int | None:
    finite = _finite(values)
    return int(finite.max()) if len(finite) else None


def _total(values: NDArray[np.float64]) -> int:
    return int(np.nansum(values))


def _strict(value: Any) -> Any:
    """`value` fit for strict JSON: tuples as lists, numpy numbers as Python's, null for what is not finite."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _summary_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    summary = report["summary"]
    of = f" of {summary['max_steps']}" if summary["max_steps"] is not None else ""
    lines = [
        ("steps", f"{summary['steps']}{of} ({summary['state']}), {short_time(summary['step_seconds_total'])} in steps"),
        (
            "tokens",
            f"{short_number(summary['tokens'])}, of them {short_number(summary['labelled_tokens'])} with a label",
        ),
        (
            "lm_loss",
            f"{_shown(summary['lm_loss_first'])} to {_shown(summary['lm_loss_last'])} nats per token, "
            f"best {_shown(summary['lm_loss_best'])} at step {summary['lm_loss_best_step']}",
        ),
    ]
    if summary["balance_loss_last"] is not None:
        lines.append(
            (
                "objective",
                f"{_shown(summary['total_loss_last'])} with router losses; raw balance "
                f"{_shown(summary['balance_loss_last'])} (1 = even), raw z {_shown(summary['z_loss_last'])}",
            )
        )
    lines += [
        (
            "held out" if place == 0 else "",
            f"{entry['domain']}: {_shown(entry['lm_loss'])} nats over {short_number(entry['num_tokens'])} tokens "
            f"after step {entry['step']}",
        )
        for place, entry in enumerate(report["held_out"])
    ]
    speed = [f"{short_number(summary['tokens_per_second_median'] or 0)} tokens/s"]
    if summary["model_flops_per_second_median"] is not None:
        speed.append(f"{short_number(summary['model_flops_per_second_median'])} FLOP/s of the model")
    if summary["memory_bytes_max"] is not None:
        speed.append(f"{summary['memory_bytes_max'] / 2**30:.2f} GiB in the fullest process")
    lines.append(("speed", ", ".join(speed)))
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _layer_lines(report: dict[str, Any]) -> list[str]:
    """The table of layers as lines of 70 columns, which fit a plain log too."""
    names = ("layer", "MaxVio", "/ floor", "evenness", "effective", "dead", "starving", "drop", "waiting")
    widths = (5, 7, 8, 9, 10, 6, 9, 8, 8)
    rows = [names]
    for layer in report["layers"]:
        rows.append(
            (
                str(layer["layer"]),
                f"{layer['max_vio']:.2f}",
                f"{layer['max_vio_over_floor']:.1f}",
                f"{layer['evenness']:.3f}",
                f"{layer['effective_experts']:.1f}/{len(layer['load_over_ideal'])}",
                str(len(layer["dead"])),
                str(len(layer["starving"])),
                "-" if layer["drop_rate"] is None else f"{100 * layer['drop_rate']:.1f} %",
                "-" if layer["rank_waste"] is None else f"{100 * layer['rank_waste']:.0f} %",
            )
        )
    title = f"expert load in steps {report['window'][0]} to {report['window'][1]}"
    return [title, *("".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]


HEAT_BOUNDS = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0, 3.0)
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


def _heat_strip(ratios: list[float], blocks: bool) -> str:
    """One character an expert; with more experts than columns, one for the most telling of each neighbourhood."""
    characters = BLOCKS if blocks else ASCII_BLOCKS
    parts = np.array_split(np.asarray(ratios), min(HEAT_COLUMNS, len(ratios)))
    strip = ""
    for part in parts:
        # No load at all is what must not be lost by pooling, then the highest load.
        ratio = 0.0 if (part == 0).any() else float(part.max())
        strip += "!" if ratio == 0 else characters[int(np.searchsorted(HEAT_BOUNDS, ratio, side="right"))]
    return strip


def _heat_legend(blocks: bool) -> str:
    marks = BLOCKS if blocks else ASCII_BLOCKS
    return f"load of each expert over its ideal: ! none, {marks[0]} below 1/4, {marks[3]} about 1, {marks[7]} above 3"


def _sparkline(values: list[float], blocks: bool) -> str:
    characters = BLOCKS if blocks else ASCII_BLOCKS
    low, high = min(values), max(values)
    scale = (len(characters) - 1) / (high - low) if high > low else 0.0
    return "".join(characters[round((value - low) * scale)] for value in values)
