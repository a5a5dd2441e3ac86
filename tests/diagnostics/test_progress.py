"""The progress line: live on a terminal, sparse plain lines elsewhere."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from moe.diagnostics.progress import Progress, short_number, short_time
from tests.diagnostics.runs import step_record


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(max_steps: int, seconds_per_step: float, *, terminal: bool = False, last: int | None = None) -> list[str]:
    """Lines printed by a run."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(max_steps, console=Console(file=out, force_terminal=terminal, width=70), clock=clock)
    for step in range(1, (last or max_steps) + 1):
        clock.now += seconds_per_step
        progress.update(step_record(step, lm_loss=8.0 - step / max_steps, step_seconds=seconds_per_step))
    progress.close()
    progress.close()
    return out.getvalue().splitlines()


def test_plain_lines_name_step_loss_speed_balance_drops_and_time_left() -> None:
    lines = run(4, 10.0)
    assert lines[0].startswith("step 1/4  loss 7.750  10.2k tokens/s  MaxVio ")
    assert lines[0].endswith("drop 0.0 %  30s left")
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert "left" not in lines[-1]


@pytest.mark.parametrize(
    ("max_steps", "seconds", "expected"),
    [
        (1000, 1.0, 51),  # a line each 2 %
        (1000, 0.01, 3),  # never nearer than 5 seconds: at 0, 5 and the end (10 s)
        (200, 45.0, 101),  # the minute is over at each second step
    ],
)
def test_plain_lines_come_at_a_measured_pace(max_steps: int, seconds: float, expected: int) -> None:
    lines = run(max_steps, seconds)
    assert len(lines) == expected
    assert lines[0].split("/")[0].split() == ["step", "1"]
    assert f"step {max_steps}/{max_steps}" in lines[-1]


def test_a_run_that_stops_early_shows_its_last_step() -> None:
    assert run(1000, 0.01, last=37)[-1].startswith("step   37/1000")


def test_time_left_follows_recent_steps() -> None:
    """Ten slow steps at first (10 s), then 1 s each: after the window of 50 only the fast ones count."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(200, console=Console(file=out, width=70), clock=clock)
    for step in range(1, 101):
        clock.now += 10.0 if step <= 10 else 1.0
        progress.update(step_record(step))
    progress.close()
    assert out.getvalue().splitlines()[-1].endswith("1m 40s left")


def test_a_terminal_gets_one_live_line_with_messages_above() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(3, console=Console(file=out, force_terminal=True, width=100, color_system=None), clock=clock)
    for step in (1, 2, 3):
        clock.now += 1.0
        progress.update(step_record(step))
        progress.message(f"[saved] step-{step}")
    progress.close()
    text = out.getvalue()
    assert "[saved] step-2" in text  # as it stands, without markup
    assert text.count("\x1b[2K") >= 3  # the line is erased and written again
    assert text.rindex("step 3/3") > text.rindex("[saved] step-3")


def test_a_message_can_neither_end_the_run_nor_rule_the_terminal() -> None:
    """A generated sample may hold anything: letters the console lacks, escapes, lone surrogates."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(3, console=Console(file=file, width=70))
    progress.message("a[b]\x1b[2J路\ud800\n\tc\x07" + "long " * 30)
    file.flush()
    assert raw.getvalue().decode("ascii") == "a[b].[2J??\n        c." + "long " * 30 + "\n"


def test_a_refused_update_is_shown() -> None:
    out = io.StringIO()
    progress = Progress(3, console=Console(file=out, width=70))
    progress.update(step_record(1, applied=False, grad_norm=float("inf")))
    assert "update refused" in out.getvalue()


def test_a_model_without_experts_shows_neither_balance_nor_drops() -> None:
    out = io.StringIO()
    Progress(3, console=Console(file=out, width=70)).update(step_record(1, max_vio=None, drop_rate=None))
    assert "MaxVio" not in out.getvalue()
    assert "drop" not in out.getvalue()


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (short_number, 0.0, "0"),
        (short_number, 999.0, "999"),
        (short_number, 12345.0, "12.3k"),
        (short_number, 234567.0, "235k"),
        (short_number, 2.5e12, "2.5T"),
        (short_time, 0.2, "1s"),
        (short_time, 59.4, "59s"),
        (short_time, 92.0, "1m 32s"),
        (short_time, 3723.0, "1h 02m"),
        (short_time, 2 * 86400 + 3 * 3600.0, "2d 03h"),
    ],
)
def test_short_forms(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text
