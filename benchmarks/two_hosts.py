"""Does crossing to a node once, and exchanging in chunks, pay on a slow link? Measured between two hosts on one machine.

    python -m benchmarks.two_hosts            as root; three to five minutes; prints tables
    python -m benchmarks.two_hosts --quick    half a minute
    python -m benchmarks.two_hosts --write docs/benchmarks/two-hosts.md

Two namespaces with two ranks each (benchmarks/namespaces.py), gloo between them. Exits with 6, and says why, where
namespaces cannot be made. A step is forward and backward of one layer; times are of the slowest rank, the median of some.
Nothing here asserts on time: `Finding` lines say whether what was expected was seen.
"""

import argparse
import json
import os
import platform
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.namespaces import ADDRESSES, INTERFACE, CannotBuildError, TwoHosts, two_hosts

RANKS_PER_HOST = 2
NUM_RANKS = 2 * RANKS_PER_HOST
ANSWER_SECONDS = 180.0
ENVIRONMENT_EXIT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time on all ranks; fp32."""

    mode: str
    """A dispatch mode, or `alone`: the same experts on as many rows that are already here."""
    top_k: int = 4
    num_experts: int = 16
    num_tokens: int = 64
    """Tokens of each rank. Few: with messages above a quarter of a MiB gloo leaves such a link idle a quarter of the time,
    which plain sockets in its place do not, and that would hide half of what fewer messages gain."""
    hidden: int = 512
    width: int = 0
    """Intermediate width of an expert; 0: experts that only scale, so that a step is all communication."""
    shared_width: int = 0
    """The same of shared experts; 0: none."""
    chunks: int = 1
    overlap: bool = True
    """Whether anything runs beside an exchange."""
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What all ranks together say of a case."""

    seconds: float
    """A step, median."""
    bytes_across: float
    """Sent to the other host in a step, over all ranks."""
    counted_hidden: float
    """Hidden fraction by the dispatcher's own counters, all ranks and steps together."""
    wire_ratio: float
    """Bytes on the link as the kernel counts them, over those that the dispatchers count."""


class Ranks:
    """The four ranks, which do case after case; a rate may change in between."""

    def __init__(self, hosts: TwoHosts) -> None:
        self._hosts = hosts
        env = {
            **os.environ,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29700",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "WORLD_SIZE": str(NUM_RANKS),
            "OMP_NUM_THREADS": "1",
        }
        self._processes = [
            hosts.start(
                rank // RANKS_PER_HOST,
                [sys.executable, "-m", "benchmarks.two_hosts", "--rank"],
                {**env, "RANK": str(rank)},
                stdin=-1,
                stdout=-1,
                start_new_session=True,
            )
            for rank in range(NUM_RANKS)
        ]
        self._lines: list[queue.Queue[str]] = [queue.Queue() for _ in self._processes]
        for process, lines in zip(self._processes, self._lines, strict=True):
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()

    def ask(self, request: dict[str, Any]) -> list[Any]:
        """Each rank's answer.

        Raises RuntimeError when a rank fails or takes too long.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        deadline = time.monotonic() + ANSWER_SECONDS
        answers = []
        for rank, lines in enumerate(self._lines):
            try:
                line = lines.get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                raise RuntimeError(f"rank {rank} did not answer {request} within {ANSWER_SECONDS:.0f} s") from None
            if not line:
                raise RuntimeError(f"rank {rank} ended during {request}; its message is above")
            answers.append(json.loads(line))
        return answers

    def time(self, case: Case) -> Result:
        """Run a case."""
        before = self._hosts.sent_bytes()
        answers = self.ask({"case": asdict(case)})
        on_the_wire = self._hosts.sent_bytes() - before
        counted = sum(answer["bytes_across"] for answer in answers)
        seconds = sum(answer["seconds"] for answer in answers)
        exposed = sum(answer["exposed"] for answer in answers)
        return Result(
            seconds=statistics.median(map(max, zip(*(answer["times"] for answer in answers), strict=True))),
            bytes_across=counted / (case.repeats + 1),
            counted_hidden=1 - exposed / seconds if seconds else 0.0,
            wire_ratio=on_the_wire / counted if counted else 0.0,
        )

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(20)


@contextmanager
def running_ranks(hosts: TwoHosts) -> Iterator[Ranks]:
    """The ranks of a benchmark, for the length of the block; killed with their namespace if the block fails."""
    ranks = Ranks(hosts)
    yield ranks
    ranks.close()


def _read(stream: Any, lines: "queue.Queue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


# --- the tables


class Report:
    """Lines that are printed as they come, and kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str = "") -> None:
        """Print and keep."""
        print(line, flush=True)
        self.lines.append(line)

    def row(self, *cells: object) -> None:
        """A row of a table."""
        self.say("| " + " | ".join(str(cell) for cell in cells) + " |")

    def header(self, *cells: str) -> None:
        """The first two rows of a table."""
        self.row(*cells)
        self.say("|" + "---|" * len(cells))

    def finding(self, holds: bool, text: str) -> None:
        """Whether an expectation was met."""
        self.say(f"- Finding: {'as expected' if holds else 'NOT as expected'}: {text}")


def compare_modes(
    ranks: Ranks, hosts: TwoHosts, report: Report, rates: Sequence[int | None], picks: Sequence[int], base: Case
) -> None:
    """Modes with experts that only scale, at each rate; what auto would choose there."""
    report.say("## Modes: a step of communication alone")
    report.say()
    report.say(f"{base.num_experts} experts, {base.num_tokens} tokens a rank, D = {base.hidden}.")
    report.say()
    report.header("link", "k", "mode", "step, ms", "cross-host MiB", "wire / counted", "auto")
    findings: list[tuple[bool, str]] = []
    for rate in rates:
        hosts.set_rate(rate)
        link = f"{rate} Mbit/s" if rate else "not limited"
        choices = ranks.ask({"choose": list(picks), "base": asdict(base)})[0]
        for top_k in picks:
            results = {
                mode: ranks.time(replace(base, mode=mode, top_k=top_k))
                for mode in ("all_to_all", "two_hop", "all_gather")
            }
            chosen = choices["modes"][str(top_k)]
            for mode, result in results.items():
                mib = f"{result.bytes_across / 2**20:.2f}"
                mark = "chosen" if mode == chosen else ""
                report.row(link, top_k, mode, f"{result.seconds * 1e3:.0f}", mib, f"{result.wire_ratio:.2f}", mark)
            flat, hops = results["all_to_all"], results["two_hop"]
            gain, fewer = flat.seconds / hops.seconds, flat.bytes_across / hops.bytes_across
            if rate == min(r for r in rates if r) and top_k > 1:
                text = f"{link}, k = {top_k}: two_hop is {gain:.2f} × as fast as all_to_all, with bytes {fewer:.2f} × fewer"
                findings.append((gain >= 0.9 * fewer, text + f" (expected at least {0.9 * fewer:.2f} ×)"))
            # Within a twentieth it is a tie, and either is right.
            winners = [mode for mode, wins in (("two_hop", gain > 0.95), ("all_to_all", gain < 1.05)) if wins]
            text = f"{link}, k = {top_k}: auto took {chosen}; two_hop / all_to_all speed was {gain:.2f}"
            findings.append((chosen in winners, text + f", node / across bandwidth {choices['ratio']:.1f}"))
    report.say()
    for holds, text in findings:
        report.finding(holds, text)
    report.say()


def compare_chunks(
    ranks: Ranks,
    hosts: TwoHosts,
    report: Report,
    rates: Sequence[int],
    modes: Sequence[str],
    chunk_counts: Sequence[int],
    base: Case,
) -> None:
    """Chunks with SwiGLU experts that take as long as the communication; then with shared experts beside it."""
    report.say("## Chunks: what is hidden where experts take as long as communication")
    report.say()
    report.say(f"{base.num_experts} experts, k = {base.top_k}, {base.num_tokens} tokens a rank, D = {base.hidden}.")
    report.say(
        "Experts alone: the same rows in as many chunks, without any exchange. Hidden: 1 − (step − experts alone) /"
    )
    report.say("(step of one chunk without overlap − its experts alone); at most 1 − 1/C without shared experts.")
    report.say()
    header = ("link", "mode", "C", "shared", "experts alone, ms", "no overlap, ms", "step, ms", "hidden", "by counters")
    report.header(*header)
    findings: list[tuple[bool, str]] = []
    for rate in rates:
        hosts.set_rate(rate)
        for mode in modes:
            communication = ranks.time(replace(base, mode=mode)).seconds
            probe = ranks.time(replace(base, mode="alone", width=256)).seconds
            width = max(16, round(256 * communication / probe / 16) * 16)
            hidden: dict[tuple[int, bool], float] = {}
            for shared_width in (0, width):
                case = replace(base, mode=mode, width=width, shared_width=shared_width)
                serial = ranks.time(replace(case, overlap=False)).seconds
                exchanges = serial - ranks.time(replace(case, mode="alone")).seconds
                for chunks in chunk_counts:
                    alone = ranks.time(replace(case, mode="alone", chunks=chunks)).seconds
                    result = ranks.time(replace(case, chunks=chunks))
                    share = 1 - (result.seconds - alone) / exchanges
                    hidden[chunks, shared_width > 0] = share
                    report.row(
                        f"{rate} Mbit/s",
                        mode,
                        chunks,
                        "yes" if shared_width else "no",
                        *(f"{seconds * 1e3:.0f}" for seconds in (alone, serial, result.seconds)),
                        f"{share:.2f}",
                        f"{result.counted_hidden:.2f}",
                    )
            for chunks in chunk_counts:
                plain, shared = hidden[chunks, False], hidden[chunks, True]
                where, goal = f"{rate} Mbit/s, {mode}, C = {chunks}", 0.8 * (1 - 1 / chunks)
                if chunks > 1:
                    findings.append((plain >= goal, f"{where}: {plain:.2f} hidden (expected at least {goal:.2f})"))
                findings.append((shared > plain, f"{where}: {shared:.2f} with shared experts, {plain:.2f} without"))
    report.say()
    for holds, text in findings:
        report.finding(holds, text)
    report.say()


def machine() -> str:
    """What was measured on, without names or paths."""
    import torch

    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return (
        f"{date.today()}, {cores} cores of {model}, Linux {platform.release().split('-')[0]}, torch {torch.__version__}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate, few cases")
    parser.add_argument("--rates", type=int, nargs="+", default=[25, 100], help="Mbit/s of the link")
    parser.add_argument("--chunk-rates", type=int, nargs="+", default=[100], help="the same for the second table")
    parser.add_argument("--repeats", type=int, default=7, help="steps per case, after one that is left out")
    parser.add_argument("--write", type=Path, help="a Markdown file for the tables")
    parser.add_argument("--only", choices=("modes", "chunks"), help="one table alone")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        return work()
    report = Report()
    started = time.monotonic()
    try:
        with two_hosts() as hosts, running_ranks(hosts) as ranks:
            measure(ranks, hosts, report, options)
    except CannotBuildError as error:
        print(f"two hosts cannot be made here: {error}", file=sys.stderr)
        return ENVIRONMENT_EXIT
    print(f"took {time.monotonic() - started:.0f} s")
    if options.write:
        options.write.write_text("\n".join(report.lines).rstrip() + "\n", "utf-8")
    return 0


def measure(ranks: Ranks, hosts: TwoHosts, report: Report, options: argparse.Namespace) -> None:
    """The tables that were asked for."""
    base = Case(mode="all_to_all", repeats=options.repeats)
    # Few experts with many rows each, so that a chunk is still a matrix product worth the name.
    wide = replace(base, num_experts=8, top_k=2, num_tokens=1024, hidden=256)
    report.say("# Two hosts on one machine")
    report.say()
    report.say(f"{machine()}; command: `python -m benchmarks.two_hosts{' --quick' if options.quick else ''}`.")
    report.say(
        f"Two namespaces, {RANKS_PER_HOST} ranks each, one thread a rank, gloo, fp32; a step is forward and backward "
        "of one layer; times are of the slowest rank, the median of some steps."
    )
    report.say()
    if options.quick:
        compare_modes(ranks, hosts, report, [100], [4], replace(base, repeats=2))
        narrow = replace(wide, num_tokens=512, repeats=2)
        compare_chunks(ranks, hosts, report, [100], ["all_to_all"], [1, 4], narrow)
        return
    if options.only != "chunks":
        compare_modes(ranks, hosts, report, [*options.rates, None], [1, 2, 4, 8], base)
    if options.only != "modes":
        compare_chunks(ranks, hosts, report, options.chunk_rates, ["all_to_all", "two_hop"], [1, 2, 4, 8], wide)


# --- one rank


def work() -> int:
    """Answer requests, one line each, until they end."""
    import torch
    import torch.distributed as dist

    from dispatch.topology import build_topology

    # Whatever else this machine does must not pass for the cost of an exchange. Linux weighs sessions first, then
    # processes, and this one leads its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    topology = build_topology(dist.group.WORLD, RANKS_PER_HOST)
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            answer = run_case(Case(**request["case"]), topology)
        else:
            answer = choose(request["choose"], Case(**request["base"]), topology)
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()
    return 0


def choose(picks: Sequence[int], base: Case, topology: Any) -> dict[str, Any]:
    """What auto becomes for each k, and the ratio of bandwidths it was decided by."""
    import torch
    import torch.distributed as dist

    from dispatch.choose import StepSize, measure_bandwidths, resolve_auto
    from dispatch.config import DispatchConfig

    assert dist.group.WORLD is not None
    device = torch.device("cpu")
    bandwidths = measure_bandwidths(topology, device)
    modes = {}
    for top_k in picks:
        config = resolve_auto(
            DispatchConfig(),
            num_experts=base.num_experts,
            top_k=top_k,
            group=dist.group.WORLD,
            topology=topology,
            device=device,
            size=StepSize(base.num_tokens, base.hidden, torch.float32),
        )
        modes[str(top_k)] = config.mode.value
    return {"ratio": bandwidths.node / bandwidths.across, "modes": modes}


def run_case(case: Case, topology: Any) -> dict[str, Any]:
    """Time the case on this rank, together with the others."""
    import torch
    import torch.distributed as dist

    from dispatch.traffic import Link

    generator = torch.Generator().manual_seed(dist.get_rank())
    step, traffic = make_step(case, topology, generator)
    times, record = [], []
    for _ in range(case.repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
        if traffic is not None:
            record.append(traffic.collect())
    return {
        "times": times[1:],
        "bytes_across": sum(one.bytes_over(Link.across) for one in record),
        "seconds": sum(one.total_seconds for one in record[1:]),
        "exposed": sum(one.total_exposed_seconds for one in record[1:]),
    }


def make_step(case: Case, topology: Any, generator: Any) -> tuple[Callable[[], None], Any]:
    """Forward and backward of the case's layer, and the counters of its dispatcher (None when alone)."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from dispatch.build import build_dispatcher
    from dispatch.config import DispatchConfig, DispatchMode
    from dispatch.local import LocalDispatcher
    from dispatch.overlap import chunk_sizes
    from moe.model.experts import Experts, SwiGLU

    x_TD = torch.randn(case.num_tokens, case.hidden, generator=generator, requires_grad=True)
    ids_TK = torch.rand(case.num_tokens, case.num_experts, generator=generator).topk(case.top_k, 1).indices
    weights_TK = torch.rand(case.num_tokens, case.top_k, generator=generator, requires_grad=True)
    num_local = case.num_experts // NUM_RANKS
    scale_D = torch.ones(case.hidden, requires_grad=True)
    experts: Callable[..., Tensor] = lambda rows_RD, _: rows_RD * scale_D  # noqa: E731
    if case.width:
        experts = Experts(num_local, case.hidden, case.width)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    shared = SwiGLU(case.hidden, case.shared_width) if case.shared_width else None
    beside = None if shared is None else lambda: shared(x_TD)
    if case.mode == "alone":
        alone = LocalDispatcher(num_local)

        def step_alone() -> None:
            sizes = chunk_sizes(case.num_tokens, case.chunks)
            parts = zip(x_TD.split(sizes), (ids_TK % num_local).split(sizes), weights_TK.split(sizes), strict=True)
            y_TD = torch.cat([alone.run(*part, experts) for part in parts])
            (y_TD if beside is None else y_TD + beside()).sum().backward()

        return step_alone, None
    config = DispatchConfig(
        mode=DispatchMode[case.mode],
        chunks=case.chunks,
        overlap_forward=case.overlap,
        overlap_backward=case.overlap,
        overlap_shared=case.overlap,
    )
    dispatcher = build_dispatcher(config, num_experts=case.num_experts, group=dist.group.WORLD, topology=topology)

    def step() -> None:
        dispatcher.run(x_TD, ids_TK, weights_TK, experts, beside=beside).sum().backward()

    return step, dispatcher.traffic


if __name__ == "__main__":
    sys.exit(main())
