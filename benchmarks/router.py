"""How much of a sparse layer is deciding where tokens go: router, top-k, counts and the order of rows.

    python -m benchmarks.router            prints a table; about three minutes on one core
    python -m benchmarks.router --quick    two rows, a few seconds
    python -m benchmarks.router --write docs/benchmarks/router.md

Forward and backward of one layer on one process, one thread on a CPU, against the same of its parts alone; all take turns
in changing order, so that whatever slows the machine slows all of them, and the median share of the turns is printed. On a
CPU the clock is the process's own computing time, elsewhere the wall's, device synchronised.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch.permute import sort_picks
from moe.model.config import MoEConfig, RouterKind
from moe.model.layer import MoELayer

MARK = "<!-- measured -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    dtype: torch.dtype
    router: RouterKind = RouterKind.softmax
    num_tokens: int = 4096
    rows: int = 8


def cases(*, quick: bool) -> list[Case]:
    """E up to 512; small and middle widths; both dtypes where it matters."""
    if quick:
        return [
            Case(num_experts=num_experts, top_k=2, hidden=128, width=64, num_tokens=512, dtype=torch.float32)
            for num_experts in (8, 64)
        ]
    picked: list[Case] = []
    for hidden, width in ((512, 256), (1024, 512)):
        for num_experts, top_k in ((8, 2), (64, 8), (128, 8), (256, 8), (512, 8)):
            for dtype in (torch.bfloat16, torch.float32):
                case = Case(num_experts=num_experts, top_k=top_k, hidden=hidden, width=width, dtype=dtype)
                # Bytes of weights and their gradients, with a copy of each: as much as a small machine has to spare.
                if num_experts * hidden * width * 3 * 4 <= 2 * 2**30 and (hidden == 512 or dtype == torch.bfloat16):
                    picked.append(case)
    picked.append(
        Case(num_experts=256, top_k=8, hidden=512, width=256, dtype=torch.bfloat16, router=RouterKind.sigmoid)
    )
    return picked


def parts(case: Case, device: torch.device) -> dict[str, Callable[[], object]]:
    """What takes turns, by name: forward and backward of the layer, of its router, of the products in it, the order."""
    torch.manual_seed(0)
    moe = MoEConfig(
        num_experts=case.num_experts, top_k=case.top_k, moe_intermediate_size=case.width, router=case.router
    )
    layer = MoELayer(case.hidden, moe, layer_index=0).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=case.hidden**-0.5)
    layer.experts.to(case.dtype)
    x_BSD = torch.randn(case.rows, case.num_tokens // case.rows, case.hidden, device=device, dtype=case.dtype)
    x_BSD.requires_grad_()
    valid_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool, device=device)
    grad_y_BSD = torch.randn_like(x_BSD)
    routing = layer.router(x_BSD, valid_BS)
    grad_weights_TK = torch.randn_like(routing.topk_weights_TK)
    grad_probs_BE = torch.randn_like(routing.stats.router_probs_sum_BE)
    grad_z = torch.tensor(1e-3, device=device)
    grad_logits_TE = torch.randn(case.num_tokens, case.num_experts, device=device)
    ids_TK = routing.topk_expert_ids_TK

    def backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
        layer.zero_grad(set_to_none=True)
        x_BSD.grad = None
        torch.autograd.backward(outputs, gradients)

    def whole() -> None:
        y_BSD, stats = layer(x_BSD, valid_BS)
        backward([y_BSD, stats.router_probs_sum_BE, stats.z_sum], [grad_y_BSD, grad_probs_BE, grad_z])

    def routed(implementation: str) -> None:
        layer.router.implementation = implementation
        found = layer.router(x_BSD, valid_BS)
        outputs = [found.topk_weights_TK, found.stats.router_probs_sum_BE, found.stats.z_sum]
        backward(outputs, [grad_weights_TK, grad_probs_BE, grad_z])
        layer.router.implementation = "auto"

    def products() -> None:
        backward([F.linear(x_BSD.flatten(0, 1).float(), layer.router.weight)], [grad_logits_TE])

    return {
        "layer": whole,
        "router": lambda: routed("auto"),
        "reference": lambda: routed("reference"),
        "products": products,
        "order": lambda: sort_picks(ids_TK, case.num_experts),
    }


def shares(case: Case, device: torch.device, turns: int) -> dict[str, float]:
    """Each part's median share of the layer's time in the same turn."""
    of_part = parts(case, device)

    def clock() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.get_device_module(device).synchronize()
        return time.perf_counter()

    taken: dict[str, list[float]] = {name: [] for name in of_part}
    # In a new order each time: whatever comes after the layer finds its memory given back and its caches full of others.
    shuffled = random.Random(0)
    for turn in range(turns + 1):
        for name in shuffled.sample(list(of_part), len(of_part)):
            started = clock()
            of_part[name]()
            if turn:
                taken[name].append(clock() - started)
    return {
        name: statistics.median(part / whole for part, whole in zip(of, taken["layer"], strict=True))
        for name, of in taken.items()
    }


def machine(device: torch.device) -> str:
    """What was measured on, without names or paths."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    model = "a CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"one thread of {model}, torch {torch.__version__}"


def table(rows: Sequence[tuple[Case, dict[str, float]]], device: torch.device) -> str:
    """Markdown."""
    lines = [
        "| router | E | K | D | F | dtype | products | choice, weights, sums | order of rows | together | plain formula |",
        "|" + "---|" * 11,
    ]
    for case, share in rows:
        rest = share["router"] - share["products"]
        cells: list[object] = [case.router.name, case.num_experts, case.top_k, case.hidden, case.width]
        cells += [str(case.dtype).removeprefix("torch.")]
        figures = [share["products"], rest, share["order"], share["router"] + share["order"]]
        figures += [share["reference"] + share["order"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {' | '.join(f'{100 * figure:.1f} %' for figure in figures)} |")
    legend = (
        f"{date.today()}, {machine(device)}, {rows[0][0].num_tokens:,} tokens. Share of forward and backward of one layer "
        "(experts included). Products: logits and their two gradients, in fp32. Plain formula: "
        "together, with `backend.ops.router_topk=reference`."
    )
    return "\n".join([*lines, "", legend])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small rows")
    parser.add_argument("--turns", type=int, default=15, help="measured turns, after one that is left out")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    parser.add_argument(
        "--write", type=Path, help=f"a Markdown file; what follows {MARK} in it is replaced, or it is made"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(1)
    rows = []
    started = time.monotonic()
    chosen = cases(quick=options.quick)
    for number, case in enumerate(chosen, 1):
        rows.append((case, shares(case, device, options.turns)))
        print(f"{time.monotonic() - started:4.0f} s  {number} of {len(chosen)}", file=sys.stderr, flush=True)
    text = table(rows, device)
    print(text)
    if options.write:
        before = options.write.read_text("utf-8").split(MARK)[0] if options.write.exists() else ""
        options.write.write_text(f"{before}{MARK}\n\n{text}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
