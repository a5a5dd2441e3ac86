"""What the layer benchmarks run on: shapes, and inputs whose routing is known beforehand.

Legend: T tokens, D hidden, E experts, K picks per token, F width of an expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTINGS = ("balanced", "learned", "zipf")
"""balanced: every expert gets exactly the same load in every batch. learned: log-normal popularity (sigma 0.7), about as
routers under a balancing loss have it. zipf: the i-th expert is as popular as 1 / i, in shuffled order."""

_LEARNED_SIGMA = 0.7
_BEST_LOGIT, _LOGIT_STEP = 4.0, 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One MoE layer and the tokens of one step, over all ranks."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_experts > self.hidden_size:
            raise ValueError(
                f"{self.name}: num_experts ({self.num_experts}) must not exceed hidden_size ({self.hidden_size}): each "
                "expert's logit is one element of the input here; choose fewer experts"
            )

    def flops(self) -> float:
        """Useful work of forward and backward: three products of R = T·K rows, and twice that in backward."""
        return 18.0 * self.num_tokens * self.top_k * self.hidden_size * self.intermediate_size


def pick_experts(shape: LayerShape, routing: str, popularity: torch.Generator, generator: torch.Generator) -> Tensor:
    """Different experts for each token, best first: [T, K] int64.

    popularity: decides which experts are liked how much; generator: the tokens of one batch.
    """
    num_experts, top_k, num_tokens = shape.num_experts, shape.top_k, shape.num_tokens
    if routing == "balanced":
        order_E = torch.randperm(num_experts, generator=popularity)
        first_T = torch.randperm(num_tokens, generator=generator) * top_k
        return order_E[(first_T.unsqueeze(1) + torch.arange(top_k)) % num_experts]
    if routing == "learned":
        log_popularity_E = _LEARNED_SIGMA * torch.randn(num_experts, generator=popularity)
    else:
        rank_E = torch.randperm(num_experts, generator=popularity)
        log_popularity_E = -torch.log1p(rank_E.double()).float()
    # The K largest of log popularity + Gumbel noise: a sample without replacement.
    noise_TE = -torch.empty(num_tokens, num_experts).exponential_(generator=generator).log()
    return (log_popularity_E + noise_TE).topk(top_k, dim=1).indices


def make_input(ids_TK: Tensor, shape: LayerShape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """x [T, D] that a router with weight [I_E | 0] sends to ids_TK: its first E elements are the logits.

    The K chosen logits are distinct and exact in bf16, all others lie below 1, so every router, in any precision,
    chooses the same.
    """
    num_tokens, top_k = ids_TK.shape
    x_TD = torch.rand(num_tokens, shape.hidden_size, generator=generator) * 2 - 1
    best_TK = (_BEST_LOGIT - _LOGIT_STEP * torch.arange(top_k)).expand(num_tokens, top_k)
    x_TD[:, : shape.num_experts] = x_TD[:, : shape.num_experts].clamp(max=0.99).scatter(1, ids_TK, best_TK)
    return x_TD.to(dtype)


def router_weight(shape: LayerShape) -> Tensor:
    """[I_E | 0], [E, D] fp32."""
    return torch.eye(shape.num_experts, shape.hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Of all experts, fp32: what every contender starts from."""

    w1_EFD: Tensor
    """Gate."""
    w3_EFD: Tensor
    """Up."""
    w2_EDF: Tensor
    """Down."""

    def part(self, rank: int, num_ranks: int) -> "ExpertWeights":
        """Those of one rank of a contiguous, even placement."""
        size = self.w1_EFD.shape[0] // num_ranks
        piece = slice(rank * size, (rank + 1) * size)
        return ExpertWeights(w1_EFD=self.w1_EFD[piece], w3_EFD=self.w3_EFD[piece], w2_EDF=self.w2_EDF[piece])


def expert_weights(shape: LayerShape, generator: torch.Generator) -> ExpertWeights:
    """Normal, with 1 / sqrt(inputs) as standard deviation."""
    up_size = (shape.num_experts, shape.intermediate_size, shape.hidden_size)
    down_size = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
    return ExpertWeights(
        w1_EFD=torch.randn(up_size, generator=generator) / shape.hidden_size**0.5,
        w3_EFD=torch.randn(up_size, generator=generator) / shape.hidden_size**0.5,
        w2_EDF=torch.randn(down_size, generator=generator) / shape.intermediate_size**0.5,
    )
