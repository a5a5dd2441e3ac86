"""How tokens move between ranks. Torch-free."""

from dataclasses import dataclass
from enum import Enum


class DispatchMode(Enum):
    """One way of moving rows to their experts and back."""

    auto = "auto"
    reference = "reference"
    local = "local"
    all_to_all = "all_to_all"


@dataclass(kw_only=True, slots=True)
class DispatchConfig:
    """The exchange. Never changes the mathematics."""

    mode: DispatchMode = DispatchMode.auto
    """auto: local with one expert rank, all_to_all otherwise. reference: slow loops, the definition."""
