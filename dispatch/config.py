"""How tokens move between ranks. Torch-free."""

from dataclasses import dataclass
from enum import Enum


class DispatchMode(Enum):
    """One way of moving rows to their experts and back."""

    auto = "auto"
    reference = "reference"
    local = "local"
    all_gather = "all_gather"
    all_to_all = "all_to_all"
    two_hop = "two_hop"


@dataclass(kw_only=True, slots=True)
class DispatchConfig:
    """The exchange. Never changes the mathematics."""

    mode: DispatchMode = DispatchMode.auto
    """auto: local with one expert rank; over several nodes all_to_all or two_hop, by bandwidths that the start of the run
    measures (dispatch/choose.py); else all_to_all. local: no exchange. all_gather: every token visits every
    rank. all_to_all: rows go straight to their experts. two_hop: to each node once, then inside it. reference: slow
    loops, the definition. docs/dispatch.md says when each pays."""
    chunks: int = 1
    """Pieces that a rank's tokens are cut into, so that the exchange of one runs while the experts work on another. More
    hide more of the exchange, up to a share of 1 − 1/chunks, and make smaller matrix products: 2 to 4, as a rule."""
    overlap_forward: bool = True
    """Whether chunks overlap in forward; if not, every exchange is waited for where it starts."""
    overlap_backward: bool = True
    """The same of backward."""
    overlap_shared: bool = True
    """Whether shared experts work while the first exchange is under way, also with one chunk."""
    save_memory: bool = False
    """Keep neither the experts' input nor their output for backward: the first is exchanged again, the second not needed
    (dispatch/memory.py). Useless with activation checkpointing, which keeps neither anyhow."""
