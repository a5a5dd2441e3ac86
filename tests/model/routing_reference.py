"""Every router once more, in float64 and loops, one token and one expert at a time: the definition of docs/routers.md.

Random rules are computed in Python's integers. Nothing of `moe.model.routers` runs here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe.model.config import MoEConfig, RouterKind

MASK = (1 << 64) - 1


class Row(NamedTuple):
    """What a rule may look at: one row of tokens."""

    logits: list[list[float]]
    valid: list[bool]
    bias: list[float]
    """Of each expert; zeros for a rule without one."""
    keys: list[int]
    """Name of each token in what is random, before seed and layer."""
    ids: list[int]
    """Token ids."""
    layer_index: int


def split_mix(value: int) -> int:
    """One step of SplitMix64 from a state, as an unsigned 64-bit integer."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def fold(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = split_mix((state + number) & MASK)
    return state


def uniform(key: int, place: int) -> float:
    return ((split_mix((key + place * 0x9E3779B97F4A7C15) & MASK) >> 41) + 0.5) / 2**23


def best(scores: list[float], count: int) -> list[int]:
    """Of equal scores the lower id first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    total = sum(math.exp(value - top) for value in values)
    return [math.exp(value - top) / total for value in values]


def limited(scores: list[float], group_scores: list[float], moe: MoEConfig) -> list[int]:
    """The best experts of the best groups."""
    size = moe.num_experts // moe.num_groups
    groups = [list(range(g * size, g * size + size)) for g in range(moe.num_groups)]
    sums = [sum(sorted((group_scores[i] for i in group), reverse=True)[:2]) for group in groups]
    allowed = [i for g in sorted(best(sums, moe.topk_groups)) for i in groups[g]]
    return [allowed[place] for place in best([scores[i] for i in allowed], moe.top_k)]


def select_softmax(row: Row, moe: MoEConfig) -> list[list[int]]:
    return [limited(logits, softmax(logits), moe) for logits in row.logits]


def select_sigmoid(row: Row, moe: MoEConfig) -> list[list[int]]:
    biased = [[1 / (1 + math.exp(-x)) + b for x, b in zip(logits, row.bias, strict=True)] for logits in row.logits]
    return [limited(scores, scores, moe) for scores in biased]


def select_sqrt_softplus(row: Row, moe: MoEConfig) -> list[list[int]]:
    biased = [[math.log1p(math.exp(x)) ** 0.5 + b for x, b in zip(ls, row.bias, strict=True)] for ls in row.logits]
    return [limited(scores, scores, moe) for scores in biased]


def select_sinkhorn(row: Row, moe: MoEConfig) -> list[list[int]]:
    """Scale rows to 1 and columns to tokens / E in turn, twenty times; then the best of each token."""
    real = [logits for logits, valid in zip(row.logits, row.valid, strict=True) if valid]
    factors = [1.0] * moe.num_experts
    for _ in range(20):
        shares = []
        for logits in real:
            scaled = [math.exp(x) * f for x, f in zip(logits, factors, strict=True)]
            shares.append([math.exp(x) / sum(scaled) for x in logits])
        for e in range(moe.num_experts):
            total = sum(share[e] for share in shares)
            factors[e] = len(real) / moe.num_experts / total if real else 1.0
    return [best([math.exp(x) * f for x, f in zip(ls, factors, strict=True)], moe.top_k) for ls in row.logits]


def select_expert_choice(row: Row, moe: MoEConfig) -> list[list[int]]:
    """Each expert sorts the valid tokens by its probability, and takes floor(tokens · K / E) of them."""
    probs = [softmax(logits) for logits in row.logits]
    real = [t for t, valid in enumerate(row.valid) if valid]
    taken: list[list[int]] = [[] for _ in row.logits]
    for e in range(moe.num_experts):
        for t in sorted(real, key=lambda t: (-probs[t][e], t))[: len(real) * moe.top_k // moe.num_experts]:
            taken[t].append(e)
    return taken


def select_hash(row: Row, moe: MoEConfig) -> list[list[int]]:
    keys = [split_mix((token & MASK) ^ fold(moe.router_seed, row.layer_index)) for token in row.ids]
    return [best([uniform(key, e) for e in range(moe.num_experts)], moe.top_k) for key in keys]


def route_key(row: Row, token: int, moe: MoEConfig) -> int:
    return split_mix((row.keys[token] & MASK) ^ fold(moe.router_seed, row.layer_index, 0))


def select_random(row: Row, moe: MoEConfig) -> list[list[int]]:
    keys = [route_key(row, t, moe) for t in range(len(row.logits))]
    return [best([uniform(key, e) for e in range(moe.num_experts)], moe.top_k) for key in keys]


def select_skewed(row: Row, moe: MoEConfig) -> list[list[int]]:
    result = []
    for t in range(len(row.logits)):
        draws = [uniform(route_key(row, t, moe), e) for e in range(moe.num_experts)]
        scores = [-moe.forced_skew * math.log(e + 1) - math.log(-math.log(u)) for e, u in enumerate(draws)]
        result.append(best(scores, moe.top_k))
    return result


def select_balanced(row: Row, moe: MoEConfig) -> list[list[int]]:
    result, number = [], 0
    for valid in row.valid:
        first = number * moe.top_k + row.layer_index + moe.router_seed
        result.append([(first + k) % moe.num_experts for k in range(moe.top_k)])
        number += valid
    return result


SELECT = {
    RouterKind.softmax: select_softmax,
    RouterKind.sigmoid: select_sigmoid,
    RouterKind.sqrt_softplus: select_sqrt_softplus,
    RouterKind.sinkhorn: select_sinkhorn,
    RouterKind.expert_choice: select_expert_choice,
    RouterKind.hash: select_hash,
    RouterKind.random: select_random,
    RouterKind.balanced: select_balanced,
    RouterKind.skewed: select_skewed,
}


def scores_of(logits: Tensor, kind: RouterKind) -> Tensor:
    """Of one token, [E] float64, differentiable."""
    if kind is RouterKind.sigmoid:
        return 1 / (1 + (-logits).exp())
    if kind is RouterKind.sqrt_softplus:
        return (1 + logits.exp()).log().sqrt()
    return logits.exp() / logits.exp().sum()


def weights_of(logits: Tensor, ids: list[int], moe: MoEConfig) -> tuple[list[Tensor], Tensor]:
    """Combine weights of the chosen experts, and the balance probabilities, of one token."""
    scores = scores_of(logits, moe.router)
    chosen = [scores[i] for i in ids]
    if moe.normalize_topk and chosen:
        total = torch.stack(chosen).sum()
        chosen = [score / total for score in chosen]
    return [score * moe.routed_scale for score in chosen], scores / scores.sum()
