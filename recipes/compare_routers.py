"""Routers and balance scopes on the same text for equal tokens: one table. `python -m recipes.compare_routers`.

Each variant is an ordinary run (a folder of its own, one process), two side by side on two cores; a variant that is
finished in --folder is not run again, so a killed comparison goes on. What the columns mean stands below the table.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe.diagnostics.load import dead_experts, domain_information, max_vio, noise_floor
from moe.diagnostics.store import read_evaluations, read_load, read_load_layout, read_metrics, read_status

MODEL = [
    "parallel.nproc=1", "parallel.expert=1", "engine.kind=torch", "engine.dtype=bf16",
    "model.hidden_size=128", "model.num_layers=3", "model.num_dense_layers=1", "model.intermediate_size=384",
    "model.num_heads=4", "model.num_kv_heads=2", "moe.num_experts=16", "moe.top_k=2", "moe.moe_intermediate_size=128",
    "trainer.batch_size=16", "trainer.save_every=0", "trainer.sample_tokens=0", "trainer.eval_batches=12",
    "optim.warmup_steps=20",
]  # fmt: skip
"""What all variants share: small enough that a variant takes a minute on one core."""

VARIANTS: dict[str, list[str]] = {
    "softmax, no balancing": ["moe.load_balancing_coef=0"],
    "softmax, micro-batch": ["moe.balance_scope=micro_batch", "trainer.accumulation=4"],
    "softmax, sequence": ["moe.balance_scope=sequence"],
    "softmax, batch": ["moe.balance_scope=batch"],
    "softmax, global batch": ["moe.balance_scope=global_batch", "trainer.accumulation=4"],
    "softmax, global batch + z-loss": ["moe.balance_scope=global_batch", "moe.router_z_coef=1e-3"],
    "sigmoid, bias": ["moe.router=sigmoid", "moe.load_balancing_coef=0", "moe.expert_bias_rate=1e-3"],
    "sqrt-softplus, bias": ["moe.router=sqrt_softplus", "moe.load_balancing_coef=0", "moe.expert_bias_rate=1e-3"],
    "softmax, 2 of 4 groups": ["moe.num_groups=4", "moe.topk_groups=2"],
    "softmax top-1": ["moe.top_k=1", "moe.normalize_topk=false"],
    "sinkhorn (not causal)": ["moe.router=sinkhorn", "moe.load_balancing_coef=0"],
    "expert choice (not causal)": [
        "moe.router=expert_choice",
        "moe.load_balancing_coef=0",
        "moe.normalize_topk=false",
    ],
    "hash": ["moe.router=hash", "moe.load_balancing_coef=0"],
    "random": ["moe.router=random", "moe.load_balancing_coef=0"],
}
"""Name in the table -> settings beside MODEL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    heldout: dict[str, float]
    """Nats per token, by domain."""
    max_vio: float
    """Median over the last fifth of the steps of the mean over layers."""
    floor: float
    """The noise floor of it."""
    worst_layer: float
    """The same median of the layer that is worst."""
    dead: int
    """Experts without a pick in the last fifth, over all layers."""
    information: list[float]
    """Per MoE layer, what a pick tells of its domain on held-out text."""
    tokens: int
    seconds: float


def read_row(name: str, folder: Path) -> Row:
    """Read a finished run."""
    steps = read_metrics(folder)
    _, counts_NLE = read_load(folder)
    layout = read_load_layout(folder)
    last_NLE = counts_NLE[-max(len(counts_NLE) // 5, 1) :]
    vio_NL = max_vio(last_NLE)
    evaluations = {row["domain"]: row for row in read_evaluations(folder) if row["step"] == steps[-1]["step"]}
    counts_DLE = np.array([row["tokens_per_expert_LE"] for row in evaluations.values()])
    mean_count = float(last_NLE.sum(-1).mean()) / layout.num_experts
    return Row(
        name=name,
        heldout={domain: row["lm_loss"] for domain, row in evaluations.items()},
        max_vio=float(np.median(vio_NL.mean(1))),
        floor=float(noise_floor(mean_count, layout.num_experts, layout.top_k)),
        worst_layer=float(np.median(vio_NL, axis=0).max()),
        dead=int(dead_experts(last_NLE.sum(0)).sum()),
        information=[domain_information(counts_DLE[:, layer]) for layer in range(counts_DLE.shape[1])],
        tokens=sum(step["num_tokens"] for step in steps),
        seconds=sum(step["step_seconds"] for step in steps),
    )


def run_variant(name: str, folder: Path, overrides: Sequence[str]) -> Row:
    """Run a variant to its end, or take it as it is when it is finished. Raises RuntimeError with the end of its output."""
    if read_status(folder).get("state") != "finished":
        command = [sys.executable, "-m", "recipes.pretrain", "quickstart", *MODEL, *overrides, f"run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return read_row(name, folder)


def cell(values: Sequence[float], digits: int) -> str:
    """The mean of the seeds, and their standard deviation where there are several."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ±{statistics.stdev(values):.{digits}f}"


def table(rows: Mapping[str, Sequence[Row]], steps: int) -> str:
    """Variants and their rows, one of each seed, as a Markdown table with its legend."""
    first = next(iter(rows.values()))
    domains = list(first[0].heldout)
    head = [
        "router and balance",
        *(f"held-out {domain}" for domain in domains),
        "MaxVio",
        "/ floor",
        "worst layer",
        "dead",
    ]
    head += [f"information, layer {layer + 1}" for layer in range(len(first[0].information))]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, same in rows.items():
        cells = [name, *(cell([row.heldout[domain] for row in same], 3) for domain in domains)]
        cells += [cell([row.max_vio for row in same], 2)]
        cells += [cell([row.max_vio / row.floor for row in same], 1) if all(row.floor > 0 for row in same) else "-"]
        cells += [cell([row.worst_layer for row in same], 2), cell([row.dead for row in same], 0)]
        cells += [cell(values, 3) for values in zip(*(row.information for row in same), strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    seeds = "one seed" if len(first) == 1 else f"mean ± standard deviation of {len(first)} seeds"
    legend = (
        f"{steps} steps of {first[0].tokens // steps:,} labelled tokens, {seeds}, {datetime.date.today()}. Held-out: nats "
        "per token. MaxVio (busiest expert over mean, minus 1): median over the last fifth of the steps; over its noise "
        "floor √(2 ln E·(1−k/E)/c̄); the worst layer's. Dead: experts without a pick in that time. Information: "
        "I(domain; expert)/H(domain) of held-out picks, 0 to 1."
    )
    return "\n".join([*lines, "", legend, *specialisation(rows)])


def specialisation(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """What the rows say of a published claim: a wider pool of balance lets experts specialise more (Qiu et al. 2025)."""
    narrow, wide = (rows.get(f"softmax, {scope}") for scope in ("sequence", "global batch"))
    if not narrow or not wide:
        return []
    differences = [
        statistics.fmean(w.information) - statistics.fmean(n.information) for n, w in zip(narrow, wide, strict=True)
    ]
    above = sum(difference > 0 for difference in differences)
    return [
        "",
        f"Balance over the global batch against balance in each sequence, seed by seed: information "
        f"{'higher' if statistics.fmean(differences) > 0 else 'lower'} by {cell([abs(d) for d in differences], 3)} "
        f"(mean of the layers), higher in {above} of {len(differences)}.",
    ]


def run_folder(root: Path, name: str, seed: int, overrides: Sequence[str]) -> Path:
    """Where a variant's run lies; another folder for other settings, so that a finished run is never taken for another."""
    plain = name.replace(", ", "-").replace(" ", "-").replace("(", "").replace(")", "")
    return root / f"{plain}-seed-{seed}-{zlib.crc32(' '.join(overrides).encode()):08x}"


def main(args: Sequence[str]) -> int:
    """Run all variants and print the table; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m recipes.compare_routers", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each variant (default 200)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each variant, with trainer.seed 0, 1, ... (default 1)"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/compare-routers"), help="where the runs are kept")
    parser.add_argument("--only", nargs="*", default=[], help="names (or parts of names) of variants")
    parser.add_argument("--jobs", type=int, default=2, help="variants side by side (default 2)")
    parser.add_argument("--output", type=Path, help="also write the table here")
    parser.add_argument("overrides", nargs="*", help="settings for all variants, as moe.num_experts=8")
    arguments = parser.parse_args(args)
    if min(arguments.steps, arguments.seeds, arguments.jobs) < 1:
        parser.error("--steps, --seeds and --jobs must be at least 1")
    chosen = {n: v for n, v in VARIANTS.items() if not arguments.only or any(part in n for part in arguments.only)}
    if not chosen:
        parser.error(f"--only {arguments.only} names none of: {', '.join(VARIANTS)}")
    started = time.monotonic()

    def run(item: tuple[int, str]) -> Row:
        seed, name = item
        overrides = [
            *chosen[name],
            f"trainer.max_steps={arguments.steps}",
            f"trainer.seed={seed}",
            *arguments.overrides,
        ]
        row = run_variant(name, run_folder(arguments.folder, name, seed, [*MODEL, *overrides]), overrides)
        shown = ", ".join(f"{domain} {loss:.3f}" for domain, loss in row.heldout.items())
        where = f"{name}, seed {seed}" if arguments.seeds > 1 else name
        print(f"{time.monotonic() - started:5.0f} s  {where}: held-out {shown}; MaxVio {row.max_vio:.2f}", flush=True)
        return row

    items = [(seed, name) for seed in range(arguments.seeds) for name in chosen]
    rows: dict[str, list[Row]] = {name: [] for name in chosen}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (_, name), row in zip(items, pool.map(run, items), strict=True):
            rows[name].append(row)
    text = table(rows, arguments.steps)
    print("\n" + text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
