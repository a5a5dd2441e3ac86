"""What is wrong with a run, each with its number and a way out. One small function a finding. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe.diagnostics.facts import RunFacts
from moe.diagnostics.progress import short_number
from moe.diagnostics.store import read_guard

MAX_VIO_WATCH, MAX_VIO_ACT, MIN_OVER_FLOOR = 1.0, 2.0, 2.0
"""Imbalance counts when the busiest expert gets twice (thrice) its share, and at least twice what chance explains."""
DROP_WATCH, DROP_ACT = 0.01, 0.1
"""Share of picks that are dropped."""
WASTE_WATCH = 0.3
"""Share of the expert compute that ranks spend waiting for the busiest."""
SLOWER_WATCH = 0.3
"""Loss of tokens per second in the last third against the steps before."""
LOSS_MUST_FALL, LOSS_MAY_RISE = 0.01, 0.05
"""Shares of the loss: less of a fall is none; more of a rise is one."""

LEVELS = ("act", "watch")
"""The worse first."""
BALANCE_ADVICE = (
    "raise moe.load_balancing_coef (say, twice), or balance by bias: moe.router=sigmoid moe.expert_bias_rate=0.001"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    level: str
    """act or watch."""
    kind: str
    """A stable name, for scripts: non_finite, unfinished, loss, dead_experts, imbalance, drops, rank_waste,
    starving_experts, guard or speed."""
    text: str
    """The fact: layer, experts, steps, number."""
    change: str
    """What to do about it."""
    value: float
    """The number that made it a finding, in the unit the text names."""
    steps: tuple[int, int]
    """First and last step it was seen in."""
    layer: int | None = None
    """Block number of the (worst) layer."""
    experts: tuple[int, ...] = ()
    """Experts of that layer."""


def find(facts: RunFacts) -> list[Finding]:
    """Return all findings about a run, the worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _check_non_finite(facts: RunFacts) -> list[Finding]:
    steps = facts.steps
    values = [(row["step"], row.get(name)) for row in facts.rows for name in ("lm_loss", "grad_norm")]
    bad = sorted({step for step, value in values if value is not None and not np.isfinite(value)})
    if not bad:
        return []
    recent = bad[-1] >= facts.window[0] or len(bad) > 0.01 * len(steps)
    return [
        Finding(
            level="act" if recent else "watch",
            kind="non_finite",
            text=f"loss or gradient norm not finite in {len(bad)} of {len(steps)} steps ({_some(bad, 'step')})",
            change="lower optim.lr, raise optim.warmup_steps, or try engine.dtype=fp32 to see whether it is precision",
            value=float(len(bad)),
            steps=(bad[0], bad[-1]),
        )
    ]


def _check_loss(facts: RunFacts) -> list[Finding]:
    loss, steps = facts.column("lm_loss"), facts.steps
    loss, steps = loss[np.isfinite(loss)], steps[np.isfinite(loss)]
    if len(loss) < 20:
        return []  # too short to tell
    block = max(5, len(loss) // 10)
    medians = [float(np.median(loss[end - block : end])) for end in range(len(loss), block - 1, -block)][::-1]
    first, last, best = float(np.median(loss[:block])), medians[-1], min(medians)
    best_end = len(loss) - block * (len(medians) - 1 - medians.index(best))
    advice = "lower optim.lr or raise optim.warmup_steps"
    span = (int(steps[0]), int(steps[-1]))
    if last > first * (1 + LOSS_MAY_RISE):
        text = f"lm_loss rose from {first:.3f} to {last:.3f} nats over {_steps(span)}"
        return [Finding(level="act", kind="loss", text=text, change=advice, value=last - first, steps=span)]
    if last > first * (1 - LOSS_MUST_FALL):
        text = (
            f"lm_loss did not fall: {first:.3f} nats at first, {last:.3f} over {_steps((int(steps[-block]), span[1]))}"
        )
        change = "raise optim.lr if it is very low, else lower it; see whether the data is what you expect"
        return [Finding(level="act", kind="loss", text=text, change=change, value=last - first, steps=span)]
    if last > best * (1 + LOSS_MAY_RISE):
        span = (int(steps[best_end - 1]), span[1])
        text = f"lm_loss rose again from {best:.3f} nats (up to step {span[0]}) to {last:.3f} (step {span[1]})"
        return [Finding(level="watch", kind="loss", text=text, change=advice, value=last - best, steps=span)]
    return []


def _check_dead(facts: RunFacts) -> list[Finding]:
    return _expert_finding(facts, "dead_experts", "act", "got no token", [(x.layer, x.dead) for x in facts.layers])


def _check_starving(facts: RunFacts) -> list[Finding]:
    text = "got less than a tenth of its share"
    return _expert_finding(facts, "starving_experts", "watch", text, [(x.layer, x.starving) for x in facts.layers])


def _expert_finding(
    facts: RunFacts, kind: str, level: str, what: str, experts_of_layer: list[tuple[int, tuple[int, ...]]]
) -> list[Finding]:
    """One finding for all layers: it names the worst one, and how many more experts there are in others."""
    total = sum(len(experts) for _, experts in experts_of_layer)
    if not total:
        return []
    layer, experts = max(experts_of_layer, key=lambda pair: len(pair[1]))
    more = total - len(experts)
    elsewhere = f"; {more} more in other layers" if more else ""
    num_experts = len(facts.layers[0].load_over_ideal)
    return [
        Finding(
            level=level,
            kind=kind,
            text=f"layer {layer}: {_some(experts, 'expert')} of {num_experts} {what} in "
            f"{_steps(facts.window)}{elsewhere}",
            change=BALANCE_ADVICE,
            value=float(total),
            steps=facts.window,
            layer=layer,
            experts=experts,
        )
    ]


def _check_imbalance(facts: RunFacts) -> list[Finding]:
    beyond = [x for x in facts.layers if x.max_vio >= MAX_VIO_WATCH and x.max_vio_over_floor >= MIN_OVER_FLOOR]
    if not beyond:
        return []
    worst = max(beyond, key=lambda layer: layer.max_vio)
    ratio = worst.load_over_ideal[worst.busiest]
    elsewhere = f"; {len(beyond) - 1} more layers above {MAX_VIO_WATCH:.1f}" if len(beyond) > 1 else ""
    return [
        Finding(
            level="act" if worst.max_vio >= MAX_VIO_ACT else "watch",
            kind="imbalance",
            text=f"layer {worst.layer}: MaxVio {worst.max_vio:.2f}, {worst.max_vio_over_floor:.1f} x its noise floor, "
            f"in {_steps(facts.window)}; expert {worst.busiest} got {ratio:.1f} times its share{elsewhere}",
            change=BALANCE_ADVICE,
            value=worst.max_vio,
            steps=facts.window,
            layer=worst.layer,
            experts=(worst.busiest,),
        )
    ]


def _check_rank_waste(facts: RunFacts) -> list[Finding]:
    with_ranks = [(x.rank_waste, x) for x in facts.layers if x.rank_waste is not None]
    if not with_ranks:
        return []
    waste, worst = max(with_ranks, key=lambda pair: pair[0])
    if waste < WASTE_WATCH:
        return []
    return [
        Finding(
            level="watch",
            kind="rank_waste",
            text=f"layer {worst.layer}: ranks wait {100 * waste:.0f} % of the expert compute for the busiest one in "
            f"{_steps(facts.window)}; expert {worst.busiest} is the busiest",
            change=BALANCE_ADVICE + "; a smaller parallel.expert puts more experts, and so their mean, on a rank",
            value=waste,
            steps=facts.window,
            layer=worst.layer,
            experts=(worst.busiest,),
        )
    ]


def _check_guard(facts: RunFacts) -> list[Finding]:
    passed = read_guard(facts.run_dir)
    if not passed:
        return []
    kinds = ", ".join(sorted({str(row.get("kind")) for row in passed}))
    steps = [int(row.get("step", 0)) + 1 for row in passed]
    return [
        Finding(
            level="watch",
            kind="guard",
            text=f"the step guard passed over {len(passed)} batches ({kinds}); the last: {passed[-1].get('text')}",
            change="look at that data; if it is sound, lower optim.lr, raise optim.warmup_steps or guard.z_score",
            value=float(len(passed)),
            steps=(min(steps), max(steps)),
        )
    ]


def _check_drops(facts: RunFacts) -> list[Finding]:
    rates = facts.column("drop_rate")[facts.steps >= facts.window[0]]
    rates = rates[np.isfinite(rates)]
    if not len(rates) or rates.mean() <= DROP_WATCH:
        return []
    rate = float(rates.mean())
    with_drops = [(x.drop_rate, x) for x in facts.layers if x.drop_rate is not None]
    where, worst = "", None
    if with_drops:
        highest, worst = max(with_drops, key=lambda pair: pair[0])
        where = f"; most in layer {worst.layer} ({100 * highest:.1f} %), whose busiest expert is {worst.busiest}"
    return [
        Finding(
            level="act" if rate > DROP_ACT else "watch",
            kind="drops",
            text=f"{100 * rate:.1f} % of the picks were dropped in {_steps(facts.window)}{where}",
            change="raise dispatch.capacity_factor, or leave it out to drop nothing; and see the balance of that layer",
            value=rate,
            steps=facts.window,
            layer=None if worst is None else worst.layer,
            experts=() if worst is None else (worst.busiest,),
        )
    ]


def _check_speed(facts: RunFacts) -> list[Finding]:
    speed, steps = facts.column("tokens_per_second"), facts.steps
    third = len(speed) // 3
    if third < 10:
        return []  # too short to tell
    before, after = float(np.median(speed[:-third])), float(np.median(speed[-third:]))
    if not after < before * (1 - SLOWER_WATCH):
        return []
    span = (int(steps[-third]), int(steps[-1]))
    return [
        Finding(
            level="watch",
            kind="speed",
            text=f"{short_number(after)} tokens/s in {_steps(span)}, {100 * (1 - after / before):.0f} % below "
            f"the {short_number(before)} before",
            change="see what else runs on the machine, and its temperature; a load that grew uneven slows ranks too",
            value=1 - after / before,
            steps=span,
        )
    ]


def _check_unfinished(facts: RunFacts) -> list[Finding]:
    if facts.state not in ("stopped", "killed"):
        return []
    crash = facts.run_dir / "crash"
    crashed = crash.is_dir() and any(crash.iterdir())
    how = "was stopped" if facts.state == "stopped" else "ended without a word (killed, or the machine went down)"
    why = f"; {crash} says why" if crashed else ""
    return [
        Finding(
            level="act" if crashed or facts.state == "killed" else "watch",
            kind="unfinished",
            text=f"the run {how} after step {facts.last_step} of {facts.status['max_steps']}{why}",
            change=f"go on from its newest checkpoint, or anew without one: {resume_command(facts)}",
            value=float(facts.status["max_steps"] - facts.last_step),
            steps=(facts.last_step, facts.last_step),
        )
    ]


CHECKS: tuple[Callable[[RunFacts], list[Finding]], ...] = (
    _check_non_finite,
    _check_unfinished,
    _check_loss,
    _check_dead,
    _check_imbalance,
    _check_guard,
    _check_drops,
    _check_rank_waste,
    _check_starving,
    _check_speed,
)
"""In the order in which findings of one level are shown."""


def resume_command(facts: RunFacts) -> str:
    """Return the command that goes on with the run."""
    own = facts.status.get("resume_command")
    return (
        str(own) if own else f"switchyard run RECIPE run.dir={facts.run_dir} (with the recipe and overrides of the run)"
    )


def _some(numbers: Sequence[int], noun: str) -> str:
    """'experts 1, 2, 3' or, of many, 'experts 1, 2, 3, 4, 5, 6 ... (56)'."""
    shown = ", ".join(str(number) for number in numbers[:6])
    more = f" ... ({len(numbers)})" if len(numbers) > 6 else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _steps(span: tuple[int, int]) -> str:
    return f"steps {span[0]} to {span[1]}"
