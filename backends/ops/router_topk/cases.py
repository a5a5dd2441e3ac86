"""What `switchyard verify ops` runs router_topk on: every score, groups, a bias, padding, all experts chosen."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backends.ops.router_topk import router_topk
from backends.ops.router_topk.spec import Choice
from backends.ops.subject import Operands, Subject

CHOICES = {
    "softmax": Choice(score="softmax", top_k=2, normalize=True),
    "softmax, weights as they are": Choice(score="softmax", top_k=3, normalize=False),
    "sigmoid with bias": Choice(score="sigmoid", top_k=4, normalize=True),
    "sqrt of softplus": Choice(score="sqrt_softplus", top_k=2, normalize=True),
    "groups": Choice(score="sigmoid", top_k=4, normalize=True, num_groups=4, topk_groups=2),
    "all experts": Choice(score="softmax", top_k=16, normalize=True),
    "one expert of one": Choice(score="softmax", top_k=1, normalize=False),
    "no tokens": Choice(score="softmax", top_k=2, normalize=True),
    "large logits": Choice(score="softmax", top_k=2, normalize=True),
    "many tokens": Choice(score="softmax", top_k=8, normalize=True),
}
"""A case's name is also how its options are found, for operands are tensors alone."""
_NAMES = tuple(CHOICES)


def _tokens(name: str, num_rows: int, length: int, num_experts: int, size: float) -> Callable[..., Operands]:
    def make(generator: torch.Generator) -> Operands:
        logits_TE = size * torch.randn(num_rows * length, num_experts, generator=generator, dtype=torch.float64)
        valid_BS = torch.ones(num_rows, length, dtype=torch.bool)
        valid_BS[::2, length // 2 :] = False
        made = {"logits": logits_TE, "valid": valid_BS, "case": torch.tensor(_NAMES.index(name))}
        if "bias" in name or name == "groups":
            made["bias"] = torch.linspace(-0.3, 0.3, num_experts)
        return made

    return make


SIZES = {
    "one expert of one": (2, 5, 1, 1.0),
    "no tokens": (2, 0, 8, 1.0),
    "large logits": (2, 16, 16, 40.0),
    "many tokens": (4, 300, 64, 2.0),
}


def _call(given: Operands, implementation: str) -> Mapping[str, Tensor]:
    choice = CHOICES[_NAMES[int(given["case"])]]
    bias_E = given.get("bias")
    routed = router_topk(
        given["logits"],
        given["valid"],
        choice,
        expert_bias_E=None if bias_E is None else bias_E.float(),
        implementation=implementation,
    )
    return {
        "ids": routed.ids_TP,
        "weights": routed.weights_TP,
        "counts": routed.tokens_per_expert_BE,
        "probs_sum": routed.probs_sum_BE,
        "z_sum": routed.z_sum,
        "entropy_sum": routed.entropy_sum,
        "margin_sum": routed.margin_sum,
        "max_logit": routed.max_logit,
    }


SUBJECT = Subject(
    cases={name: _tokens(name, *SIZES.get(name, (3, 10, 16, 3.0))) for name in CHOICES},
    call=_call,
    without_gradient=frozenset({"bias"}),
    kept_in_fp32=frozenset({"bias"}),
    factor=4.0,
    why_factor="sums over tokens may be taken in blocks, and a score's exponential may be one of another library",
)
