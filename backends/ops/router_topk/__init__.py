"""router_topk: from logits to chosen experts, their weights and the sums that balancing needs. Inside the router.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, P picks per token (top_k, or the width of given picks).
"""

from typing import Protocol

import torch
from torch import Tensor

from backends.ops.router_topk import chunked, reference
from backends.ops.router_topk.spec import Choice, Picks, Routed, RouterShape
from backends.ops.table import Implementation, always, choose


class RouterTopk(Protocol):
    """The op, without the choice of implementation."""

    def __call__(
        self, logits_TE: Tensor, valid_BS: Tensor, expert_bias_E: Tensor | None, choice: Choice, picks: Picks | None
    ) -> Routed:
        """See `router_topk`."""
        ...


IMPLEMENTATIONS: dict[str, Implementation[RouterTopk, RouterShape]] = {
    "chunked": Implementation(
        name="chunked",
        function=chunked.router_topk,
        devices=("cpu",),
        dtypes=(torch.float32, torch.float64),
        why_not=always,
        cost="none, it is the fastest",
    ),
    "reference": Implementation(
        name="reference",
        function=reference.router_topk,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.float64),
        why_not=always,
        cost="on a CPU 1.4 to 1.8 times the time of chunked for softmax over 64 to 512 experts, about even below (2026-12-01)",
    ),
}
"""Best first; `auto` takes the first that can run."""


def router_topk(
    logits_TE: Tensor,
    valid_BS: Tensor,
    choice: Choice,
    *,
    expert_bias_E: Tensor | None = None,
    picks: Picks | None = None,
    implementation: str = "auto",
) -> Routed:
    """Choose experts, weigh them, and add up what balancing and diagnostics read; gradients for the logits.

    logits_TE: fp32 or fp64, finite. valid_BS: bool, False for padding, which gets no expert and counts nowhere.
    expert_bias_E: fp32, moves the choice but not the weights. picks: what somebody else has chosen (ids int64 [T, P]);
    then choice.top_k, the groups and the bias have no effect. Of equal scores the lower id is taken first.

    The gradient flows through weights_TP, probs_sum_BE and z_sum, once (there is no second derivative in `chunked`).

    Raises ValueError when the shapes disagree, or a named implementation cannot run on these operands.
    """
    if logits_TE.shape[0] != valid_BS.numel():
        raise ValueError(
            f"router_topk got logits of {logits_TE.shape[0]} tokens, but valid_BS is {list(valid_BS.shape)}; give both "
            "of the same micro-batch"
        )
    shape = RouterShape(logits_TE.shape[1], choice.top_k)
    chosen = choose("router_topk", IMPLEMENTATIONS, implementation, logits_TE.device.type, logits_TE.dtype, shape)
    return chosen.function(logits_TE, valid_BS, expert_bias_E, choice, picks)
