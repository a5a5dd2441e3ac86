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


class DropPolicy(Enum):
    """Which picks of an overfull expert are kept."""

    probability = "probability"
    position = "position"
    random = "random"


# In this form since `global` cannot be written as a name.
CapacityScope = Enum("CapacityScope", {"global": "global", "local": "local"})
"""Over which tokens capacity is decided."""


@dataclass(kw_only=True, slots=True)
class DispatchConfig:
    """The exchange. Never changes the mathematics, but for the settings of capacity, which say what is left out."""

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
    capacity_factor: float | None = None
    """Picks that an expert serves in training, as a multiple of its even share tokens · top_k / num_experts; what exceeds
    is dropped (the residual path goes on). null: every pick is served. Evaluation and sampling serve every pick."""
    min_capacity: int = 0
    """An expert serves at least so many picks, if there are so many tokens."""
    drop_policy: DropPolicy = DropPolicy.probability
    """Kept first: the largest combine weights, the earliest positions, or as drawn at random by (trainer.seed, step)."""
    capacity_scope: CapacityScope = CapacityScope["global"]
    """global: over the tokens of all ranks of a micro-step, the same in every layout. local: each rank over its own."""
    pad_to_capacity: bool = False
    """Send every expert exactly its capacity, filled up with zeros: shapes are static, ranks exchange no counts and the
    host waits for no device. Needs a capacity factor and scope local; padding positions count among the tokens."""
    max_rows_per_rank: int | None = None
    """Rows that a rank's experts take at once, over all its experts; what exceeds is dropped by drop_policy. Protects
    memory when everything is sent to one rank. null: no bound."""
    check: bool = False
    """Compare splits and checksums of every exchange, with buffers that begin as NaN: slow, to find a fault of a link or a
    library."""
