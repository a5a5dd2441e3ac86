"""Made-up runs for the tests of this folder."""

from pathlib import Path
from typing import Any

import numpy as np

from moe.diagnostics import load
from moe.diagnostics.record import StepRecord
from moe.diagnostics.store import LoadLayout, MetricsStore

LAYOUT = LoadLayout(layer_indices=(1, 2), num_experts=8, top_k=2)
TOKENS = 1024


def even_counts(generator: np.random.Generator) -> np.ndarray:
    """Picks of a router without preferences, [2, 8]."""
    return generator.multinomial(TOKENS * LAYOUT.top_k, [1 / 8] * 8, size=2)


def step_record(step: int, **changes: Any) -> StepRecord:
    """A plain step of a healthy run; `changes` replace fields."""
    counts_LE = changes.pop("tokens_per_expert_LE", None)
    if counts_LE is None:
        counts_LE = even_counts(np.random.default_rng(step))
    layers = load.max_vio(counts_LE)
    fields: dict[str, Any] = {
        "step": step,
        "lm_loss": 5.0 + 3.0 * 0.97**step,
        "balance_loss": 1.01,
        "z_loss": 3.0,
        "total_loss": 5.0 + 3.0 * 0.97**step + 0.0101,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "num_tokens": TOKENS - 4,
        "num_routed_tokens": TOKENS,
        "step_seconds": 0.1,
        "tokens_per_second": TOKENS / 0.1,
        "model_flops_per_second": 2e9,
        "memory_bytes": 3 * 2**30,
        "max_vio": float(layers.mean()) if len(layers) else None,
        "max_vio_layers": tuple(layers.tolist()),
        "drop_rate": 0.0,
        "drop_rate_layers": (0.0, 0.0),
        "router_entropy": 2.0,
        "tokens_per_expert_LE": counts_LE,
    }
    return StepRecord(**(fields | changes))


def write_run(run_dir: Path, records: list[StepRecord], *, max_steps: int | None = None, **options: Any) -> Path:
    """Write `records` as a run that was closed in order; without TensorBoard unless asked."""
    defaults: dict[str, Any] = {"tensorboard": False, "load_layout": LAYOUT, "resume_step": None}
    with MetricsStore(run_dir, max_steps=max_steps or records[-1].step, **(defaults | options)) as store:
        for record in records:
            store.write_step(record)
    return run_dir
