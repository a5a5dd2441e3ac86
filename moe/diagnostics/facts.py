"""What a run folder holds, read and boiled down for findings and report. Torch-free."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.diagnostics import load
from moe.diagnostics.store import (
    LOAD,
    METRICS,
    read_evaluations,
    read_load,
    read_load_layout,
    read_metrics,
    read_status,
)

WINDOW_SHARE, WINDOW_MIN, WINDOW_MAX = 0.2, 10, 200
"""What is said about experts is of the last fifth of the steps, but of 10 to 200 of them."""
MIN_EXPECTED_PICKS = 20.0
"""An expert is called dead or starving only if an even router would have given it so many picks in the window: then
chance does it to fewer than one in a million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One MoE layer over the last window."""

    layer: int
    max_vio: float
    """Median of the batch MaxVio."""
    noise_floor: float
    """At the mean load of the window's steps."""
    max_vio_over_floor: float
    evenness: float
    effective_experts: float
    dead: tuple[int, ...]
    starving: tuple[int, ...]
    busiest: int
    """Expert with the largest sum over the window."""
    drop_rate: float | None
    rank_waste: float | None
    load_over_ideal: tuple[float, ...]
    """Sum over the window, per expert; 1 = ideal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run folder, read."""

    run_dir: Path
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    status: dict[str, Any]
    state: str
    """finished, running, stopped, killed, or unknown."""
    layers: list[LayerFacts]
    window: tuple[int, int]
    """First and last step of the window."""

    def column(self, name: str) -> NDArray[np.float64]:
        """One field of every step; NaN where it is missing."""
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], dtype=np.float64)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Step number of every row."""
        return np.array([row["step"] for row in self.rows], dtype=np.int64)

    @property
    def last_step(self) -> int:
        """The newest step on record."""
        return int(self.rows[-1]["step"])


def read_facts(run_dir: Path) -> RunFacts:
    rows = read_metrics(run_dir)
    status = read_status(run_dir)
    size = int(np.clip(WINDOW_SHARE * len(rows), WINDOW_MIN, WINDOW_MAX))
    window = (int(rows[-size:][0]["step"]), int(rows[-1]["step"]))
    return RunFacts(
        run_dir=run_dir,
        rows=rows,
        evaluations=read_evaluations(run_dir),
        status=status,
        state=_state(run_dir, status, rows),
        layers=_read_layers(run_dir, rows, window),
        window=window,
    )


def _state(run_dir: Path, status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """How the run stands. A killed run could not say so: its metrics just ceased to grow."""
    if not status:
        return "unknown"
    if rows[-1]["step"] >= status.get("max_steps", 0):
        return "finished"
    if status.get("state") != "running":
        return "stopped"
    patience = 60.0 + 20.0 * float(np.median([row.get("step_seconds", 0.0) for row in rows]))
    return "running" if time.time() - (run_dir / METRICS).stat().st_mtime < patience else "killed"


def _read_layers(run_dir: Path, rows: list[dict[str, Any]], window: tuple[int, int]) -> list[LayerFacts]:
    if not (run_dir / LOAD).is_dir():
        return []  # a model without MoE layers
    layout = read_load_layout(run_dir)
    steps, counts_NLE = read_load(run_dir)
    counts_WLE = counts_NLE[(steps >= window[0]) & (steps <= window[1])].astype(np.int64)
    if not len(counts_WLE):
        return []
    drops = [row["drop_rate_layers"] for row in rows if row["step"] >= window[0] and row.get("drop_rate_layers")]
    drops_L = np.mean(drops, axis=0) if drops else None
    waste_L = None
    if layout.rank_of_expert is not None and max(layout.rank_of_expert) > 0:
        waste_L = load.rank_waste(counts_WLE, layout.rank_of_expert).mean(axis=0)
    layers = []
    for place, index in enumerate(layout.layer_indices):
        counts_WE = counts_WLE[:, place]
        window_E = counts_WE.sum(axis=0)
        enough = window_E.mean() >= MIN_EXPECTED_PICKS
        layers.append(
            LayerFacts(
                layer=index,
                max_vio=float(np.median(load.max_vio(counts_WE))),
                noise_floor=float(load.noise_floor(counts_WE.mean(), layout.num_experts, layout.top_k)),
                max_vio_over_floor=float(np.median(load.max_vio_over_floor(counts_WE, layout.top_k))),
                evenness=float(load.evenness(window_E)),
                effective_experts=float(load.effective_experts(window_E)),
                dead=_indices(load.dead_experts(window_E) & enough),
                starving=_indices(load.starving_experts(window_E) & enough),
                busiest=int(window_E.argmax()),
                drop_rate=None if drops_L is None else float(drops_L[place]),
                rank_waste=None if waste_L is None else float(waste_L[place]),
                load_over_ideal=tuple(float(ratio) for ratio in load.load_ratio(window_E)),
            )
        )
    return layers


def _indices(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(mask))
