"""The parity harness: every small layout against the plain engine on one process. `python -m moe.verify.parity`.

The tests run a part of the cross (tests/distributed/test_parity.py), the command all of it, and prints a table.
Each case runs three optimizer steps; loss, every gradient, clip norm, counts, bias and weights are compared.

To add an axis: one more field of `Case`, set in `config`, and a list of cases where it could go wrong.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backends.resolve import resolve_backend
from dispatch.config import DispatchMode, DropPolicy
from moe.launch import job_environment, run_local
from moe.model.config import BalanceScope, RouterKind
from moe.schema import RunConfig
from moe.train.config import Checkpointing, DType, EngineKind, Offload, OffloadAdam
from moe.train.mesh import process_group
from moe.verify.layout import Comparison, compare_traces, one_process, record_trace
from moe.verify.trace_file import load_trace, save_trace

TOLERANCE = 1e-5
"""Largest departure in units of a tensor's largest value; counts, drops and bias must be equal to the last bit."""
_FOLDER = "SWITCHYARD_PARITY_FOLDER"
"""Set for the ranks that this command starts: where they leave their traces."""


def small(router: RouterKind = RouterKind.softmax, scope: BalanceScope = BalanceScope.sequence) -> RunConfig:
    """A model with every part that a layout could get wrong: dense and MoE blocks, shared expert, z-loss, bias, clipping."""
    config = RunConfig(recipe="parity")
    return replace(
        config,
        model=replace(
            config.model, vocab_size=512, hidden_size=32, num_layers=3, num_dense_layers=1, intermediate_size=48,
            num_heads=4, num_kv_heads=2, tie_embeddings=True,
        ),
        moe=replace(
            config.moe, num_experts=8, top_k=2, moe_intermediate_size=16, num_shared_experts=1, router=router,
            load_balancing_coef=0.02, balance_scope=scope, router_z_coef=1e-3,
            expert_bias_rate=1e-3 if router is RouterKind.sigmoid else 0.0,
        ),
        data=replace(config.data, seq_len=24),
        trainer=replace(config.trainer, batch_size=8, accumulation=1, max_steps=3, seed=3),
        # Adam's first steps are g / (|g| + eps): with eps near the rounding of g, an element whose gradient is nothing
        # but rounding moves by a visible share of lr. A larger eps makes the update as smooth as the gradients are.
        optim=replace(config.optim, lr=3e-3, warmup_steps=1, clip_norm=0.5, eps=1e-4),
        engine=replace(config.engine, dtype=DType.fp32, zero_stage=1),
        backend=replace(config.backend),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One layout of `small`."""

    world_size: int
    expert: int
    zero_stage: int
    accumulation: int = 1
    checkpointing: Checkpointing = Checkpointing.none
    engine: EngineKind = EngineKind.deepspeed
    router: RouterKind = RouterKind.softmax
    scope: BalanceScope = BalanceScope.sequence
    mode: DispatchMode = DispatchMode.auto
    ranks_per_node: int | None = None
    chunks: int = 1
    overlap: bool = True
    capacity: float | None = None
    drop: DropPolicy = DropPolicy.probability
    placement: tuple[int, ...] | None = None
    offload: OffloadAdam | None = None
    sequence: int = 1
    seq_len: int = 24

    def __str__(self) -> str:
        return (
            f"{self.engine.value}-zero{self.zero_stage}-ep{self.expert}x{self.world_size // self.expert}"
            f"-acc{self.accumulation}-ckpt_{self.checkpointing.value}-{self.router.value}-{self.scope.value}"
            f"-{self.mode.value}"
            + (f"-nodes_of_{self.ranks_per_node}" if self.ranks_per_node else "")
            + (f"-chunks{self.chunks}" if self.chunks > 1 else "")
            + ("" if self.overlap else "-in_turn")
            + (f"-capacity{self.capacity}_{self.drop.value}" if self.capacity else "")
            + (f"-offload_{self.offload.value}" if self.offload else "")
            + (f"-sequence{self.sequence}_of_{self.seq_len}" if self.sequence > 1 else "")
            + (f"-placed{''.join(map(str, self.placement))}" if self.placement else "")
        )

    def config(self) -> RunConfig:
        """`small` on this layout."""
        base = small(self.router, self.scope)
        return replace(
            base,
            parallel=replace(
                base.parallel,
                nproc=self.world_size,
                expert=self.expert,
                sequence=self.sequence,
                ranks_per_node=self.ranks_per_node,
                expert_placement=None if self.placement is None else list(self.placement),
            ),
            dispatch=replace(
                base.dispatch,
                mode=self.mode,
                chunks=self.chunks,
                overlap_forward=self.overlap,
                overlap_backward=self.overlap,
                overlap_shared=self.overlap,
                capacity_factor=self.capacity,
                drop_policy=self.drop,
            ),
            engine=replace(
                base.engine,
                kind=self.engine,
                zero_stage=self.zero_stage,
                activation_checkpointing=self.checkpointing,
                offload_optimizer=Offload.cpu if self.offload else Offload.none,
                offload_adam=self.offload or OffloadAdam.torch,
            ),
            data=replace(base.data, seq_len=self.seq_len),
            trainer=replace(base.trainer, accumulation=self.accumulation),
        )


LAYOUTS = ((2, 1), (2, 2), (4, 2), (4, 4))
"""(processes, expert-parallel size) of the cross."""


def cross(chunks: Sequence[int] = (1, 2)) -> Iterator[Case]:
    """Stage x expert x expert-data parallel x accumulation x checkpointing x chunks; chunks where rows travel."""
    for world_size, expert in LAYOUTS:
        for zero_stage in (0, 1, 2, 3):
            for accumulation in (1, 2):
                for checkpointing in Checkpointing:
                    for number in chunks if expert > 1 else (1,):
                        yield Case(world_size, expert, zero_stage, accumulation, checkpointing, chunks=number)


OTHERS = [
    Case(2, 2, 1, 2, router=RouterKind.sigmoid),
    Case(4, 2, 2, 2, Checkpointing.full, router=RouterKind.sigmoid, scope=BalanceScope.batch),
    Case(4, 2, 1, 1, scope=BalanceScope.batch),
    Case(4, 4, 0, 2, scope=BalanceScope.batch),
    Case(2, 1, 0, 1, engine=EngineKind.torch),
    Case(2, 2, 0, 2, engine=EngineKind.torch),
    Case(4, 2, 0, 2, Checkpointing.full, engine=EngineKind.torch, scope=BalanceScope.batch),
    Case(1, 1, 1, 2),
    Case(4, 1, 1, 1),
    Case(2, 2, 1, 1, mode=DispatchMode.all_gather),
    Case(4, 2, 1, 2, Checkpointing.full, mode=DispatchMode.all_gather, ranks_per_node=1, chunks=2),
    Case(2, 2, 2, 1, mode=DispatchMode.two_hop, ranks_per_node=1),
    Case(4, 4, 1, 1, mode=DispatchMode.two_hop, ranks_per_node=2),
    Case(4, 4, 0, 2, Checkpointing.full, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=4),
    Case(2, 2, 1, 1, placement=(1, 0, 0, 1, 0, 1, 1, 0)),
    Case(2, 2, 0, 2, mode=DispatchMode.two_hop, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(4, 2, 0, 1, engine=EngineKind.torch, placement=(0, 0, 1, 0, 0, 0, 0, 1)),
    Case(2, 2, 1, 2, Checkpointing.full, chunks=3),
    Case(2, 2, 1, 1, chunks=3, overlap=False),
    Case(4, 4, 0, 1, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2, overlap=False),
    Case(2, 2, 1, 1, capacity=0.75),
    Case(4, 2, 2, 1, Checkpointing.full, capacity=0.5, drop=DropPolicy.position, mode=DispatchMode.all_gather),
    Case(4, 4, 0, 1, capacity=0.75, drop=DropPolicy.random, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2),
    Case(2, 2, 1, 2, capacity=0.75, drop=DropPolicy.position, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(2, 2, 2, 2, offload=OffloadAdam.torch),
    Case(2, 2, 3, 2, offload=OffloadAdam.torch),
    Case(4, 2, 2, 2, Checkpointing.full, offload=OffloadAdam.torch),
    Case(4, 2, 3, 1, offload=OffloadAdam.torch),
    Case(2, 2, 3, 2, placement=(1, 0, 0, 1, 1, 1, 1, 1)),
    Case(4, 2, 3, 2, Checkpointing.full, placement=(1, 0, 0, 1, 1, 1, 1, 1), chunks=2),
    Case(4, 2, 3, 1, Checkpointing.full, router=RouterKind.sigmoid, scope=BalanceScope.batch, chunks=2),
    Case(4, 4, 3, 2, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2),
    *(Case(2, 2, zero_stage, 2, sequence=2) for zero_stage in (0, 1, 2, 3)),
    *(Case(4, 2, zero_stage, 1, Checkpointing.full, chunks=2, sequence=2) for zero_stage in (0, 1, 2, 3)),
    *(Case(4, 1, zero_stage, 1, sequence=4, seq_len=27) for zero_stage in (1, 3)),
    Case(2, 1, 0, 2, engine=EngineKind.torch, sequence=2, seq_len=25),
    Case(4, 4, 0, 2, Checkpointing.full, engine=EngineKind.torch, sequence=2, seq_len=25),
    Case(4, 4, 1, 1, mode=DispatchMode.two_hop, ranks_per_node=2, chunks=2, sequence=4, seq_len=27),
    Case(4, 2, 1, 2, router=RouterKind.sigmoid, scope=BalanceScope.batch, sequence=2),
    Case(2, 1, 1, 2, router=RouterKind.sigmoid, scope=BalanceScope.global_batch, sequence=2, seq_len=25),
    Case(2, 2, 1, 1, scope=BalanceScope.micro_batch, sequence=2),
    Case(4, 2, 1, 1, router=RouterKind.sinkhorn, sequence=2, seq_len=25),
    Case(2, 2, 2, 1, router=RouterKind.expert_choice, sequence=2),
    Case(4, 2, 1, 1, router=RouterKind.balanced, sequence=4),
    Case(4, 2, 1, 1, router=RouterKind.random, sequence=2),
    Case(4, 2, 1, 1, capacity=0.75, sequence=2, seq_len=25),
    Case(4, 2, 2, 1, capacity=0.5, drop=DropPolicy.position, sequence=2),
    Case(2, 2, 0, 1, Checkpointing.full, capacity=0.75, drop=DropPolicy.random, sequence=2),
]
"""The other axes, each on the layouts where they could go wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case and how far it is from one process."""

    case: Case
    comparison: Comparison

    @property
    def worst_error(self) -> float:
        """Of the quantities that have a tolerance above 0."""
        return max((d.error for d in self.comparison.differences if d.tolerance), default=0.0)


def record_all(cases: Sequence[Case], folder: Path) -> None:
    """Record the cases on the default process group, in their order (collective); rank 0 writes a file for each."""
    rank = torch.distributed.get_rank()
    backend = resolve_backend("cpu", rank)
    for case in cases:
        trace = record_trace(case.config(), backend=backend)
        if rank == 0:
            save_trace(trace, folder / f"{case}.safetensors")


def run_cases(cases: Sequence[Case], folder: Path) -> list[Outcome]:
    """Start the processes of the cases, and compare each case with one process.

    Raises RuntimeError when the ranks of a case fail; their logs are in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {str(case): case for case in cases}
    assert len(names) == len(cases), "two cases of one name"
    environ = os.environ | {_FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    for world_size in sorted({case.world_size for case in cases}):
        (folder / "names").write_text("\n".join(name for name, case in names.items() if case.world_size == world_size))
        code = run_local([sys.executable, "-m", "moe.verify.parity"], world_size, folder, environ)
        if code:
            raise RuntimeError(f"the cases on {world_size} processes ended with exit code {code}; see {folder}")
    outcomes = []
    oracles: dict[str, Path] = {}
    with process_group(collective="gloo", rank=0, world_size=1):
        for name, case in names.items():
            alone = one_process(case.config())
            if str(alone) not in oracles:
                oracles[str(alone)] = folder / f"oracle-{len(oracles)}.safetensors"
                save_trace(record_trace(alone, backend=resolve_backend("cpu", 0)), oracles[str(alone)])
            expected, found = load_trace(oracles[str(alone)]), load_trace(folder / f"{name}.safetensors")
            comparison = compare_traces(expected, found, tolerance=TOLERANCE)
            outcomes.append(Outcome(case=case, comparison=comparison))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: the cross by layout and stage, worst over the other axes; then the single cases."""
    lines = [
        "| processes | expert × expert-data | stage | cases | worst relative error | where | |",
        "|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[int, int, int], list[Outcome]] = {}
    crossed = set(cross())
    for outcome in outcomes:
        if outcome.case in crossed:
            rows.setdefault((outcome.case.world_size, outcome.case.expert, outcome.case.zero_stage), []).append(outcome)
    for (world_size, expert, stage), group in rows.items():
        worst = max(group, key=lambda outcome: outcome.worst_error)
        lines.append(
            f"| {world_size} | {expert} × {world_size // expert} | {stage} | {len(group)} | {worst.worst_error:.1e} "
            f"| {_where(worst)} | {_verdict(group)} |"
        )
    lines += ["", "| other axes | worst relative error | where | |", "|---|---|---|---|"]
    for outcome in outcomes:
        if outcome.case not in crossed:
            lines.append(f"| {outcome.case} | {outcome.worst_error:.1e} | {_where(outcome)} | {_verdict([outcome])} |")
    return "\n".join(lines)


def _where(outcome: Outcome) -> str:
    return max((d for d in outcome.comparison.differences if d.tolerance), key=lambda d: d.error).what


def _verdict(outcomes: Sequence[Outcome]) -> str:
    return "equal" if all(outcome.comparison.first is None for outcome in outcomes) else "DEPARTS"


def main(args: Sequence[str]) -> int:
    """Run everything and print the table; returns 0 when every case is equal, 5 when one departs."""
    if folder := os.environ.get(_FOLDER):
        job = job_environment(os.environ)
        assert job is not None
        with process_group(collective="gloo", rank=job.rank, world_size=job.world_size):
            known = {str(case): case for case in [*cross(), *OTHERS]}
            record_all([known[name] for name in (Path(folder) / "names").read_text().splitlines()], Path(folder))
        return 0
    parser = argparse.ArgumentParser(prog="python -m moe.verify.parity", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4], help="only cases on so many")
    parser.add_argument("--card", type=Path, help="also write the table (Markdown) here")
    arguments = parser.parse_args(args)
    cases = [case for case in [*cross(), *OTHERS] if case.world_size in arguments.processes]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="switchyard-parity-") as folder:
        outcomes = run_cases(cases, Path(folder))
    text = (
        f"{len(outcomes)} layouts against one process, three steps each, fp32, tolerance {TOLERANCE:.0e}; "
        f"{time.perf_counter() - started:.0f} s on {platform.machine()} with {os.cpu_count()} cores, "
        f"torch {torch.__version__}\n\n{table(outcomes)}\n"
    )
    print(text)
    if arguments.card is not None:
        arguments.card.parent.mkdir(parents=True, exist_ok=True)
        arguments.card.write_text(f"# Every layout against one process\n\n`python -m moe.verify.parity`: {text}")
    return 0 if all(outcome.comparison.first is None for outcome in outcomes) else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
