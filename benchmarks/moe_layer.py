"""Forward and backward of one MoE layer: this project's against those that users would pick instead.

    python -m benchmarks.moe_layer                      the whole table, about a quarter of an hour on two cores
    python -m benchmarks.moe_layer --quick              two rows, under a minute
    python -m benchmarks.moe_layer --shapes fine --routings zipf --dtypes bf16 --ranks 1

All contenders get the same inputs, weights and routing in one run and take turns (benchmarks/turns.py); medians count. Each
turn has another batch, routed with the same popularity of experts, as every step of a training run has: libraries that
prepare a kernel for every new size pay for it, as they do there. `--fixed-batch` shows the other case.

Nothing is asserted about time; that equal functions give equal results is.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.resolve import resolve_backend
from benchmarks.contenders import CONTENDERS, EQUAL_RESULTS, Absent, Layer, Setting
from benchmarks.layer_cases import ROUTINGS, LayerShape, expert_weights, make_input, pick_experts
from benchmarks.machine import describe, machine_seconds, process_seconds
from benchmarks.turns import Median, Sample, Team, take_turns

SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape(name="coarse", num_experts=8, top_k=2, hidden_size=512, intermediate_size=1024, num_tokens=4096),
        LayerShape(name="fine", num_experts=64, top_k=8, hidden_size=512, intermediate_size=256, num_tokens=4096),
        LayerShape(name="wide", num_experts=128, top_k=8, hidden_size=1024, intermediate_size=256, num_tokens=2048),
    )
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GEMM = "gemm"
"""The plain matrix product among the contenders."""
MARK = "<!-- measured -->"
"""Of the file that --write fills: above it stands what people wrote."""
_GEMM_SIZE, _GEMM_CALLS = 1024, 12
_WARM_TURNS = 3
_TOO_SLOW_S = 3.0
"""A contender whose first run takes longer is not run again: that run is its time."""
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
_RESULT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative difference (norms) of outputs and input gradients from ours above which a row stops: not the same function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    shape: LayerShape
    routing: str
    dtype: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run."""

    device: str
    turns: int
    seconds_per_row: float
    fixed_batch: bool
    keep_memory: bool
    contenders: tuple[str, ...]
    threads: int
    """Of all ranks together."""


# ------------------------------------------------------------------------------- one rank of one contender


class _Batch:
    """Input and output gradient of one rank in one turn: a pure function of the turn's number."""

    def __init__(self, row: Row, turn: int, device: torch.device, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 + turn)
        ids_TK = pick_experts(row.shape, row.routing, torch.Generator().manual_seed(7), generator)
        x_TD = make_input(ids_TK, row.shape, DTYPES[row.dtype], generator)
        grad_TD = (torch.randn(x_TD.shape, generator=generator) / row.shape.hidden_size).to(x_TD.dtype)
        self.x_TD, self.grad_TD = (
            tensor.chunk(row.num_ranks)[rank].to(device).contiguous() for tensor in (x_TD, grad_TD)
        )
        self.x_TD.requires_grad_()


class _Seat:
    """Answers the requests of `Team` for one rank of one contender: ("row", row), ("warm", turn), and those of turns."""

    def __init__(self, rank: int, name: str, options: Options) -> None:
        self._rank, self._name, self._options = rank, name, options
        self._backend = resolve_backend(options.device, rank)
        self._row: Row | None = None
        self._layer: Layer | None = None
        self._batch: _Batch | None = None
        self._matrix: Tensor | None = None
        self._y_TD: Tensor | None = None

    def __call__(self, request: tuple[str, Any]) -> Any:
        kind, value = request
        # What libraries print would end up in the table.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return getattr(self, kind)(value)

    def row(self, row: Row) -> str | None:
        """Build the layer; the reason when it cannot be built."""
        self._row, self._batch, self._layer, self._y_TD = row, None, None, None
        setting = Setting(
            shape=row.shape,
            weights=expert_weights(row.shape, torch.Generator().manual_seed(5)),
            device=self._backend.device,
            dtype=DTYPES[row.dtype],
            num_ranks=row.num_ranks,
            rank=self._rank,
        )
        if self._name == GEMM:
            self._matrix = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=setting.device).to(setting.dtype)
            return None
        try:
            self._layer = CONTENDERS[self._name](setting)
        except Absent as reason:
            return str(reason)
        return None

    def warm(self, turn: int) -> tuple[Sample, tuple[Tensor, Tensor] | None]:
        """Run a batch: its time, and (output, input gradient) in fp32."""
        self.prepare(turn)
        sample = self.turn(turn)
        if self._y_TD is None:
            return sample, None
        assert self._batch is not None
        assert self._batch.x_TD.grad is not None
        return sample, (self._y_TD.float().cpu(), self._batch.x_TD.grad.float().cpu())

    def prepare(self, turn: int) -> None:
        """Make the batch, and forget all gradients as an optimizer's zero_grad does by default."""
        assert self._row is not None
        if self._name == GEMM:
            return
        self._batch = _Batch(self._row, 0 if self._options.fixed_batch else turn, self._backend.device, self._rank)
        assert self._layer is not None
        for parameter in self._layer.parameters:
            parameter.grad = None

    def turn(self, turn: int) -> Sample:
        """The timed run."""
        assert self._row is not None
        if self._row.num_ranks > 1:
            dist.barrier()
        self._backend.synchronize()
        busy, wall = process_seconds(), time.perf_counter()
        self._y_TD = self._run()
        self._backend.synchronize()
        return Sample(wall_s=time.perf_counter() - wall, busy_s=process_seconds() - busy)

    def _run(self) -> Tensor | None:
        if self._matrix is not None:
            for _ in range(_GEMM_CALLS):
                self._matrix @ self._matrix
            return None
        assert self._layer is not None
        assert self._batch is not None
        y_TD = self._layer.forward(self._batch.x_TD)
        y_TD.backward(self._batch.grad_TD)
        return y_TD.detach()


def _serve(rank: int, argument: tuple[str, int, str, Options]) -> _Seat:
    """Start of a process: threads, process group."""
    name, num_ranks, store, options = argument
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, options.threads // num_ranks))
    seat = _Seat(rank, name, options)
    if num_ranks > 1:
        backend = resolve_backend(options.device, rank)
        # Barriers are on the CPU in any case.
        kind = "gloo" if backend.name == "cpu" else f"cpu:gloo,{backend.device.type}:{backend.collective}"
        file_store = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group(kind, store=file_store, rank=rank, world_size=num_ranks)
    return seat


# ------------------------------------------------------------------------------------------ all contenders


def run_rows(rows: Sequence[Row], num_ranks: int, options: Options) -> Iterator[dict[str, Median | str]]:
    """For each row, by contender and for GEMM: its times, or why there are none."""
    environment = {"OMP_NUM_THREADS": str(max(1, options.threads // num_ranks))}
    if options.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    if options.keep_memory:
        environment |= _KEEP_MEMORY
    teams: dict[str, Team] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, name in enumerate((GEMM, *options.contenders)):
                argument = (name, num_ranks, f"{folder}/store-{number}", options)
                teams[name] = Team(_serve, argument, num_ranks, environment)
            for row in rows:
                results: dict[str, Median | str] = {}
                for name, team in teams.items():
                    if reason := team.ask(("row", row))[0]:
                        results[name] = reason
                there = {name: team for name, team in teams.items() if name not in results}
                slow = _warm_up(there, row)
                there = {name: team for name, team in there.items() if name not in slow}
                cores = os.cpu_count() or 1
                taken = take_turns(there, turns=options.turns, seconds=options.seconds_per_row, cores=cores)
                yield results | slow | {name: turns.median() for name, turns in taken.items()}
        finally:
            for team in teams.values():
                team.close()


def _warm_up(teams: Mapping[str, Team], row: Row) -> dict[str, Median]:
    """Run a few batches and check that equal functions give equal results. Returns the times of those too slow for more."""
    slow: dict[str, Median] = {}
    for turn in range(-_WARM_TURNS, 0):
        expected: list[tuple[Tensor, Tensor]] | None = None
        for name, team in teams.items():
            if name in slow:
                continue
            samples, results = zip(*team.ask(("warm", turn)), strict=True)
            wall_s = max(sample.wall_s for sample in samples)
            if wall_s > _TOO_SLOW_S and name not in ("ours", GEMM):
                slow[name] = Median(wall_s=wall_s, busy_s=sum(sample.busy_s for sample in samples), quiet=True)
            if name == "ours":
                expected = list(results)
            elif name in EQUAL_RESULTS and expected is not None:
                _compare(name, row, expected, results)
    return slow


def _compare(
    name: str, row: Row, expected: Sequence[tuple[Tensor, Tensor]], actual: Sequence[tuple[Tensor, Tensor]]
) -> None:
    for rank, (ours, theirs) in enumerate(zip(expected, actual, strict=True)):
        for what, one, other in zip(("output", "input gradient"), ours, theirs, strict=True):
            error = float((one - other).norm() / one.norm())
            if error > _RESULT_TOLERANCE[DTYPES[row.dtype]]:
                raise RuntimeError(f"{row}: {what} of {name} on rank {rank} differs from ours by {error:.1e}")


# ------------------------------------------------------------------------------------------------ the table


def table_row(row: Row, results: Mapping[str, Median | str], options: Options) -> str:
    """One line of Markdown."""
    ours, gemm = results["ours"], results[GEMM]
    assert isinstance(ours, Median)
    assert isinstance(gemm, Median)
    quiet = all(isinstance(result, str) or result.quiet for result in results.values())
    by_wall = quiet or machine_seconds() is None
    # Seconds that the row's useful work takes at the rate of the plain product.
    ideal = gemm.clock(by_wall=by_wall) * row.shape.flops() / (row.num_ranks * _GEMM_CALLS * 2.0 * _GEMM_SIZE**3)
    clock = ours.clock(by_wall=by_wall)
    cells = [row.shape.name, row.routing, row.dtype, str(row.num_ranks) + ("" if by_wall else " (busy)")]
    cells += [f"{ours.wall_s * 1e3:.0f}", f"{ideal / clock:.0%}"]
    others = []
    for name in options.contenders[1:]:
        result = results[name]
        if isinstance(result, str):
            cells.append(f"({result})")
            continue
        ratio = result.clock(by_wall=by_wall) / clock
        other_ratio = result.clock(by_wall=not by_wall) / ours.clock(by_wall=not by_wall)
        cells.append(f"{ratio:.2f} ({other_ratio:.2f}) {ideal / result.clock(by_wall=by_wall):.0%}")
        if name in EQUAL_RESULTS:
            others.append(ratio)
    cells.append(f"{min(others):.2f}" if others else "")
    return f"| {' | '.join(cells)} |"


def table_head(options: Options) -> str:
    """Markdown: two lines."""
    titles = ["shape", "routing", "dtype", "ranks", "ours, ms", "share", *options.contenders[1:], "nearest"]
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_layer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rows and the three fastest peers")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes, each with its own experts")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS)[1:], default=list(CONTENDERS)[1:])
    parser.add_argument("--experts", type=int, help="in place of each shape's own number")
    parser.add_argument("--top-k", type=int, help="in place of each shape's own number")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together")
    parser.add_argument("--fixed-batch", action="store_true", help="the same batch in every turn")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="an allocator that gives no memory back, for all (glibc's, by environment)",
    )
    parser.add_argument("--turns", type=int, default=4, help="of each contender; more while the machine is busy")
    parser.add_argument("--seconds", type=float, default=10.0, help="per row, after which no new turn begins")
    parser.add_argument(
        "--write", type=Path, help=f"a Markdown file; what follows {MARK} in it is replaced, or it is made"
    )
    parser.add_argument("--json", type=Path, help="also write all medians there")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.routings, arguments.dtypes, arguments.ranks = (
            ["coarse", "fine"],
            ["zipf"],
            ["bf16"],
            [1],
        )
        arguments.contenders, arguments.turns, arguments.seconds = ["DS AutoEP", "DS MoE, drops", "HF grouped"], 3, 5.0
    shapes = [_changed(SHAPES[name], arguments.experts, arguments.top_k) for name in arguments.shapes]
    options = Options(
        device=arguments.device,
        turns=arguments.turns,
        fixed_batch=arguments.fixed_batch,
        keep_memory=arguments.keep_memory,
        seconds_per_row=arguments.seconds,
        contenders=("ours", *arguments.contenders),
        threads=arguments.threads,
    )
    rows = [
        Row(shape=shape, routing=routing, dtype=dtype, num_ranks=num_ranks)
        for num_ranks in arguments.ranks
        for shape in shapes
        for dtype in arguments.dtypes
        for routing in arguments.routings
    ]
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    for line in _preamble(shapes, options):
        say(line)
    say(table_head(options))
    written = []
    for num_ranks in arguments.ranks:
        of_ranks = [row for row in rows if row.num_ranks == num_ranks]
        for row, results in zip(of_ranks, run_rows(of_ranks, num_ranks, options), strict=True):
            say(table_row(row, results, options))
            # After every row: a run that is cut short leaves what it measured.
            if arguments.write:
                write_table(arguments.write, lines)
            written.append({"row": dataclasses.asdict(row), "results": {k: _plain(v) for k, v in results.items()}})
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1))


def _preamble(shapes: Sequence[LayerShape], options: Options) -> list[str]:
    """When, where, what, and how to read the table."""
    return [
        f"{datetime.date.today()}, {describe(options.device)}, {options.threads} threads over all ranks\n",
        *(
            f"- {shape.name}: E={shape.num_experts} K={shape.top_k} D={shape.hidden_size} F={shape.intermediate_size} "
            f"T={shape.num_tokens} over all ranks"
            for shape in shapes
        ),
        "\nOf peers: wall time as a multiple of ours (in brackets: of the time that all threads computed), then useful "
        f"work as a share of the rate of a plain {_GEMM_SIZE}-cubed product in the same run. share: the same of ours. "
        "nearest: the smallest multiple among those that compute the same function. (busy): others used the machine, and "
        "the time that threads computed is what is compared.\n",
    ]


def write_table(path: Path, lines: Sequence[str]) -> None:
    """Put the lines below the mark of a Markdown file; what stands above it stays."""
    above = path.read_text("utf-8").split(MARK)[0].rstrip() if path.exists() else ""
    path.write_text((above + "\n\n" if above else "") + f"{MARK}\n\n" + "\n".join(lines) + "\n", "utf-8")


def _changed(shape: LayerShape, num_experts: int | None, top_k: int | None) -> LayerShape:
    return dataclasses.replace(shape, num_experts=num_experts or shape.num_experts, top_k=top_k or shape.top_k)


def _plain(result: Median | str) -> object:
    return result if isinstance(result, str) else dataclasses.asdict(result)


if __name__ == "__main__":
    main()
