"""Every router there is. What each can do is in `moe.model.config.ROUTER_TRAITS`; its formula in docs/routers.md."""

from moe.model.config import RouterKind
from moe.model.routers.forced import BALANCED, HASH, RANDOM, SKEWED
from moe.model.routers.per_row import EXPERT_CHOICE, SINKHORN
from moe.model.routers.rule import RouterRule
from moe.model.routers.topk import SIGMOID_TOPK, SOFTMAX_TOPK, SQRT_SOFTPLUS_TOPK

ROUTERS: dict[RouterKind, RouterRule] = {
    RouterKind.softmax: SOFTMAX_TOPK,
    RouterKind.sigmoid: SIGMOID_TOPK,
    RouterKind.sqrt_softplus: SQRT_SOFTPLUS_TOPK,
    RouterKind.sinkhorn: SINKHORN,
    RouterKind.expert_choice: EXPERT_CHOICE,
    RouterKind.hash: HASH,
    RouterKind.random: RANDOM,
    RouterKind.balanced: BALANCED,
    RouterKind.skewed: SKEWED,
}
"""The laws of tests/model/test_router_conformance.py run on each of these."""
