"""What the user sees while a run trains (on the data path, at the end of a step; rank 0 alone). Torch-free.

On a terminal one line that renews itself; otherwise (SLURM logs, pipes) plain lines at a measured pace.
"""

import time
import unicodedata
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moe.diagnostics.record import StepRecord

LINES_PER_RUN = 50
"""Plain lines: one for each so many-th part of the run (2 %) …"""
MIN_SECONDS_BETWEEN_LINES = 5.0
"""… but not nearer to each other than this …"""
MAX_SECONDS_BETWEEN_LINES = 60.0
"""… and not further apart (a run of days is seen to be alive). The first and the last step always have one."""

AVERAGED_STEPS = 50
"""Time left is reckoned from the wall time of so many last steps, evaluations and checkpoints between them included."""


class Progress:
    """Shows steps as they end: `update` per step, `message` for anything else, `close` at the end or after an error."""

    def __init__(
        self, max_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """max_steps: steps of the whole run. console: standard output by default. clock: seconds, for tests."""
        self._max_steps = max_steps
        self._console = console or Console()
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=AVERAGED_STEPS + 1)
        self._unprinted: StepRecord | None = None
        self._printed_step: int | None = None
        self._printed_time = 0.0
        self._live: Live | None = None
        if self._console.is_terminal:
            # Renewed by `update` alone: no thread beside the training process.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self, record: StepRecord) -> None:
        """Show a step that has just ended."""
        now = self._clock()
        self._marks.append((record.step, now))
        if self._live is not None:
            line = Text(self._line(record), no_wrap=True, overflow="ellipsis")
            self._live.update(line, refresh=True)
        elif self._is_due(record.step, now):
            self._print(record, now)
        else:
            self._unprinted = record

    def message(self, text: str) -> None:
        """Print `text` as it stands; on a terminal above the live line."""
        print_plain(self._console, text)

    def close(self) -> None:
        """Leave the last step's line standing. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._unprinted is not None:
            self._print(self._unprinted, self._clock())

    def _is_due(self, step: int, now: float) -> bool:
        if self._printed_step is None or step >= self._max_steps:
            return True
        seconds = now - self._printed_time
        steps = step - self._printed_step
        if seconds >= MAX_SECONDS_BETWEEN_LINES:
            return True
        return steps * LINES_PER_RUN >= self._max_steps and seconds >= MIN_SECONDS_BETWEEN_LINES

    def _print(self, record: StepRecord, now: float) -> None:
        self.message(self._line(record))
        self._printed_step, self._printed_time, self._unprinted = record.step, now, None

    def _line(self, record: StepRecord) -> str:
        parts = [
            f"step {record.step:>{len(str(self._max_steps))}}/{self._max_steps}",
            f"loss {record.lm_loss:.3f}",
            f"{short_number(record.tokens_per_second)} tokens/s",
        ]
        if record.max_vio is not None:
            parts.append(f"MaxVio {record.max_vio:.2f}")
        if record.drop_rate is not None:
            parts.append(f"drop {100 * record.drop_rate:.1f} %")
        if not record.applied:
            parts.append("update refused: gradient not finite")
        left = self._seconds_left(record)
        if left:
            parts.append(f"{short_time(left)} left")
        return "  ".join(parts)

    def _seconds_left(self, record: StepRecord) -> float:
        first_step, first_time = self._marks[0]
        last_step, last_time = self._marks[-1]
        if last_step > first_step:
            seconds_per_step = (last_time - first_time) / (last_step - first_step)
        else:
            seconds_per_step = record.step_seconds
        return seconds_per_step * max(0, self._max_steps - record.step)


def print_plain(console: Console, text: str, style: str = "") -> None:
    """Print `text` on lines as long as it needs, whatever is in it.

    What the console's encoding lacks becomes a question mark, and control characters (a model may generate them) a dot:
    a line of text must neither end a run nor rule the terminal.
    """
    text = "".join("." if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    text = text.encode(console.encoding, errors="replace").decode(console.encoding)
    console.print(Text(text, style=style), soft_wrap=True)


def short_number(value: float) -> str:
    """Return `value` in at most five characters: 12345 → 12.3k."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """Return a duration in its two largest units: 3723 → 1h 02m."""
    whole = max(1, round(seconds))
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // small:02d}{small_unit}"
    return f"{whole}s"
