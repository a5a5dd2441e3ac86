"""What a routing rule is: on the token path, between logits and chosen experts.

A rule is a way of choosing and a way of scoring. Choosing gives ids and has no gradient; scoring gives each expert a
number whose logarithm is a smooth function of the logits, and from it come the combine weights of whatever was chosen
and the probabilities of the load-balancing loss. So replayed, forced and hashed choices learn as chosen ones do.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, P picks per token (top_k, or E where a rule's number varies).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from backends.ops.router_topk.spec import Picks
from moe.model.config import MoEConfig


class TokenContext(NamedTuple):
    """What some rules need to know of a token beside its hidden state; made once a forward, from the batch alone."""

    input_ids_BS: Tensor
    """int64."""
    keys_BS: Tensor
    """int64: a token's name in all that is random, from `moe.model.routers.randomness.token_keys`."""
    valid_rows_BC: Tensor | None = None
    """bool, False for padding, of whole rows; None when the rows above are whole."""
    places_BS: Tensor | None = None
    """int64: a token's place in the micro-step of all ranks; None when that is the order of ranks, then of tokens."""


class RouterInput(NamedTuple):
    """What a rule chooses by. Nothing here carries a gradient."""

    logits_TE: Tensor
    """fp32 or fp64, finite."""
    valid_BS: Tensor
    """bool, False for padding: rules that look at a whole row leave it out; elsewhere it is taken out afterwards."""
    expert_bias_E: Tensor | None
    """fp32, for the rules that have one."""
    keys_T: Tensor
    """int64, already different in every layer and under every moe.router_seed."""
    input_ids_T: Tensor | None
    """int64; None when a layer runs outside a model."""
    layer_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """One way of routing."""

    score: str
    """A key of `backends.ops.router_topk.scores.SCORES`."""
    select: Callable[[RouterInput, MoEConfig], Picks] | None = None
    """None: the K best scores of each token, which the op `router_topk` chooses itself."""
    needs_rows: bool = False
    """Whether a token's experts depend on the other tokens of its row, from which only logits and padding are taken."""
