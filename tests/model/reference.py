"""The decoder once more, in float64 and loops: slow, obvious, and the definition that the fast model is held against.

One token, one head, one expert at a time. Weights are a dict by global parameter name, so that gradients can be
compared by name. Nothing of `moe.model` runs here but its configuration.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe.model.config import BalanceScope, ModelConfig, MoEConfig, RouterKind

Weights = dict[str, Tensor]


class ReferenceOutput(NamedTuple):
    """Sums over the batch; lists hold one entry per MoE layer."""

    logits_BSV: Tensor
    lm_loss_sum: Tensor
    tokens_per_expert: list[list[list[int]]]
    """Layer, row, expert."""
    balance_sum: list[Tensor]
    z_sum: list[Tensor]
    entropy_sum: list[Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of one vector."""
    mean_square = sum(value * value for value in x) / len(x)
    return x / (mean_square + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn the pairs (i, i + d/2) of one head."""
    half = len(x) // 2
    first, second = [], []
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        first.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        second.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(first + second)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Of one vector; matrices are out × in."""
    inner = gate @ x
    return down @ (inner * inner.sigmoid() * (up @ x))


def attention(
    xs: list[Tensor], positions: list[int], documents: list[int], weights: Weights, prefix: str, model: ModelConfig
) -> list[Tensor]:
    """Of one row. A padding token (document −1) sees itself alone."""
    width = weights[f"{prefix}.q_proj.weight"].shape[0] // model.num_heads
    queries_a_key = model.num_heads // model.num_kv_heads

    def heads(name: str, x: Tensor, position: int | None) -> list[Tensor]:
        parts = list((weights[f"{prefix}.{name}_proj.weight"] @ x).split(width))
        if position is None:
            return parts
        if model.qk_norm:
            parts = [rms_norm(part, weights[f"{prefix}.{name}_norm.weight"], model.norm_eps) for part in parts]
        return [rotate(part, position, model.rope_theta) for part in parts]

    queries = [heads("q", x, position) for x, position in zip(xs, positions, strict=True)]
    keys = [heads("k", x, position) for x, position in zip(xs, positions, strict=True)]
    values = [heads("v", x, None) for x in xs]
    outputs = []
    for q in range(len(xs)):
        seen = [k for k in range(q + 1) if documents[k] == documents[q] and (documents[q] != -1 or k == q)]
        parts = []
        for head in range(model.num_heads):
            group = head // queries_a_key
            scores = torch.stack([queries[q][head] @ keys[k][group] / math.sqrt(width) for k in seen])
            shares = scores.exp() / scores.exp().sum()
            parts.append(sum(share * values[k][group] for share, k in zip(shares, seen, strict=True)))
        outputs.append(weights[f"{prefix}.o_proj.weight"] @ torch.cat(parts))
    return outputs


def route(logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[list[int], list[Tensor], Tensor]:
    """Of one token: chosen ids (best first, lower id first among equals), combine weights, balance probabilities."""
    if moe.router is RouterKind.softmax:
        scores = logits.exp() / logits.exp().sum()
    else:
        scores = 1 / (1 + (-logits).exp())
    ranked = [float(score.detach()) + (float(bias[i]) if bias is not None else 0.0) for i, score in enumerate(scores)]
    ids = sorted(range(len(ranked)), key=lambda i: (-ranked[i], i))[: moe.top_k]
    chosen = [scores[i] for i in ids]
    if moe.normalize_topk:
        total = sum(chosen)
        chosen = [score / total for score in chosen]
    return ids, [score * moe.routed_scale for score in chosen], scores / scores.sum()


def transformer(
    weights: Weights,
    biases: dict[int, Tensor],
    model: ModelConfig,
    moe: MoEConfig,
    ids: list[list[int]],
    labels: list[list[int]],
    positions: list[list[int]],
    documents: list[list[int]],
) -> ReferenceOutput:
    """The whole decoder. biases: layer index -> expert bias."""
    eps = model.norm_eps
    num_sparse = model.num_layers - model.num_dense_layers
    rows = range(len(ids))
    streams = [[weights["embed.weight"][token] for token in row] for row in ids]
    zero = torch.zeros((), dtype=torch.float64)
    counts = [[[0] * moe.num_experts for _ in rows] for _ in range(num_sparse)]
    probs_sums = [[torch.zeros(moe.num_experts, dtype=torch.float64) for _ in rows] for _ in range(num_sparse)]
    z_sums, entropy_sums = [zero] * num_sparse, [zero] * num_sparse
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}"
        sparse = layer - model.num_dense_layers
        for b in rows:
            normed = [rms_norm(x, weights[f"{prefix}.attention_norm.weight"], eps) for x in streams[b]]
            attended = attention(normed, positions[b], documents[b], weights, f"{prefix}.attention", model)
            streams[b] = [x + y for x, y in zip(streams[b], attended, strict=True)]
            for s, x in enumerate(streams[b]):
                inner = rms_norm(x, weights[f"{prefix}.ffn_norm.weight"], eps)
                if sparse < 0:
                    names = [f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
                    streams[b][s] = x + swiglu(inner, *(weights[name] for name in names))
                    continue
                out = x
                if moe.num_shared_experts:
                    names = [f"{prefix}.moe.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
                    out = out + swiglu(inner, *(weights[name] for name in names))
                if documents[b][s] != -1:
                    logits = weights[f"{prefix}.moe.router.weight"] @ inner
                    chosen, shares, probs = route(logits, biases.get(layer), moe)
                    for expert, share in zip(chosen, shares, strict=True):
                        w1, w3, w2 = (weights[f"{prefix}.moe.experts.{name}"][expert] for name in ("w1", "w3", "w2"))
                        out = out + share * swiglu(inner, w1, w3, w2)
                        counts[sparse][b][expert] += 1
                    probs_sums[sparse][b] = probs_sums[sparse][b] + probs
                    z_sums[sparse] = z_sums[sparse] + logits.exp().sum().log() ** 2
                    entropy_sums[sparse] = entropy_sums[sparse] - sum(p * p.log() for p in probs)
                streams[b][s] = out
    head = weights["embed.weight"] if model.tie_embeddings else weights["head.weight"]
    logits_BSV = torch.stack(
        [torch.stack([head @ rms_norm(x, weights["norm.weight"], eps) for x in stream]) for stream in streams]
    )
    loss = zero
    for b in rows:
        for s, label in enumerate(labels[b]):
            if label != -100:
                loss = loss + logits_BSV[b, s].exp().sum().log() - logits_BSV[b, s, label]
    return ReferenceOutput(
        logits_BSV=logits_BSV,
        lm_loss_sum=loss,
        tokens_per_expert=counts,
        balance_sum=[balance_sum(c, p, moe) for c, p in zip(counts, probs_sums, strict=True)],
        z_sum=z_sums,
        entropy_sum=entropy_sums,
    )


def balance_sum(counts: list[list[int]], probs_sums: list[Tensor], moe: MoEConfig) -> Tensor:
    """Of one layer, over rows: mean loss times tokens, by the formula with fractions f and mean probabilities P."""
    # One micro-step is the whole step here, so global_batch is batch.
    if moe.balance_scope is not BalanceScope.sequence:
        counts = [[sum(row[i] for row in counts) for i in range(moe.num_experts)]]
        probs_sums = [torch.stack(probs_sums).sum(0)]
    total = torch.zeros((), dtype=torch.float64)
    for row, probs_sum in zip(counts, probs_sums, strict=True):
        tokens = sum(row) / moe.top_k
        if tokens:
            loss = moe.num_experts * sum(
                c / (moe.top_k * tokens) * p / tokens for c, p in zip(row, probs_sum, strict=True)
            )
            total = total + tokens * loss
    return total
