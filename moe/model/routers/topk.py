"""Token choice: each token takes the experts of its K best scores, which the op router_topk does by itself."""

from moe.model.routers.rule import RouterRule

SOFTMAX_TOPK = RouterRule(score="softmax")
"""Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers"."""
SIGMOID_TOPK = RouterRule(score="sigmoid")
"""Source: DeepSeek-V3 technical report, equations 12 to 16; Wang et al. 2024 for the bias."""
SQRT_SOFTPLUS_TOPK = RouterRule(score="sqrt_softplus")
"""Source: DeepSeek-V4's published configuration (scoring_func sqrtsoftplus, with the bias of V3)."""
