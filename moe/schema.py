"""The whole of a run's settings as one typed record, and what is said when a setting is refused. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.config import BackendConfig
from dispatch.config import DispatchConfig
from moe.data.config import DataConfig
from moe.errors import ExitCode, SwitchyardError
from moe.model.config import ModelConfig, MoEConfig
from moe.train.config import EngineConfig, GuardConfig, OptimConfig, ParallelConfig, RunSection, TrainerConfig


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything a run depends on; treated as constant once `moe.config` has made it."""

    recipe: str
    """Name of the recipe this began from; names the run folder."""
    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One refused setting. Reads as a sentence: path (value) rule; way out."""

    path: str
    """Dotted path of the setting, or the file and line."""
    value: object
    """What stood there."""
    rule: str
    """What it breaks, beginning with "must" or "is"."""
    way_out: str
    """What to write in its place."""
    involves: tuple[str, ...] = ()
    """Other settings that the rule reads."""
    origin: str = ""
    """File the value came from, when it was not the command line."""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" ({_shortened(self.value)})"
        origin = f" [{self.origin}]" if self.origin else ""
        return f"{self.path}{shown} {self.rule}; {self.way_out}{origin}"


class ConfigError(SwitchyardError):
    """All problems of a configuration at once."""

    exit_code = ExitCode.bad_config

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {problem}" for problem in self.problems)]))


def _shortened(value: object) -> str:
    text = str(value)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:200])
    return text if len(text) <= 80 else text[:77] + "..."
