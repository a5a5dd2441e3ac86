"""The card of a comparison: a page that can be kept beside the recipe."""

import datetime
import math
from collections.abc import Sequence

import torch

from moe.verify.layout import Comparison, Difference, Trace
from moe.verify.shrink import Change

WORST = 10


def layout_card(
    recipe: str,
    overrides: Sequence[str],
    changes: Sequence[Change],
    reference: Trace,
    candidate: Trace,
    found: Comparison,
) -> str:
    """Markdown: verdict, what was compared, every step's figures on both sides, the worst gradients, the first departure."""
    first = found.first
    verdict = "EQUAL" if first is None else "DEPARTS"
    lines = [
        f"# {verdict}: {recipe} on its layout against one process",
        "",
        f"- layout: {candidate.layout}",
        f"- oracle: {reference.layout}",
        f"- asked with: {' '.join(overrides) or 'no overrides'}",
        f"- {datetime.date.today()}, torch {torch.__version__}",
        f"- shrunk: {'; '.join(map(str, changes)) or 'nothing'}",
        "",
    ]
    if first is not None:
        bad = sum(difference.bad for difference in found.differences)
        lines += [f"**First departure** ({bad} of {len(found.differences)} quantities depart): {first}", ""]
    lines += [
        "| step | lm_loss | balance loss | z-loss | clip norm | counts | dropped | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, (expected, seen) in enumerate(zip(reference.steps, candidate.steps, strict=True), start=1):
        cells = [str(number)]
        for field in ("lm_loss", "balance_loss", "z_loss", "grad_norm"):
            cells.append(_pair(getattr(expected, field), getattr(seen, field)))
        for field in ("tokens_per_expert_LE", "dropped_per_expert_LE", "expert_bias_LE"):
            equal = torch.equal(getattr(expected, field), getattr(seen, field))
            total = getattr(seen, field).sum().item()
            shown = f"sum {total}" if isinstance(total, int) else ("moved" if getattr(seen, field).any() else "none")
            cells.append(f"{shown}, {'equal' if equal else '**differ**'}")
        lines.append(f"| {' | '.join(cells)} |")
    for title, word in (("Worst gradients", "gradient of"), ("Worst weights after the last step", "weight ")):
        ranked = sorted((d for d in found.differences if word in d.what), key=_rank, reverse=True)[:WORST]
        lines += ["", f"{title} (max |a - b| / max |b|; tolerance {ranked[0].tolerance:.0e}):", ""] if ranked else []
        lines += [f"- {'**' if d.bad else ''}{d.what}{'**' if d.bad else ''}: {d.error:.2e}; {d.where}" for d in ranked]
    return "\n".join(lines) + "\n"


def _rank(difference: Difference) -> float:
    return math.inf if math.isnan(difference.error) else difference.error


def _pair(expected: float | None, seen: float | None) -> str:
    if expected is None or seen is None:
        return "-"
    gap = abs(seen - expected) / abs(expected) if expected else abs(seen)
    return f"{seen:.7g} ({gap:.1e})"
