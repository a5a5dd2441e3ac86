"""How evenly experts are used, from counts alone: pure numpy, no state (off both paths; trainer and report call it).

Legend: `counts` is [..., E], picks of each expert by valid tokens; leading dims (steps, layers) are kept in the result.
c_i picks of expert i, c̄ their mean over the E experts, p_i = c_i / Σ c the share of an expert, K picks per token.

A row without any picks was not routed unevenly: its shares are taken as even (MaxVio 0, evenness 1, no dead experts),
so nothing here yields NaN or a warning.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

STARVING_SHARE = 0.1
"""An expert that gets less than this share of the mean load is starving."""


def max_vio(counts: ArrayLike) -> FloatArray:
    """Return how far the busiest expert is above its ideal load: max_i c_i / c̄ − 1. 0 = even, E/K − 1 at most.

    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (MaxVio).
    """
    return load_ratio(counts).max(axis=-1) - 1.0


def min_vio(counts: ArrayLike) -> FloatArray:
    """Return how far the idlest expert is below its ideal load: 1 − min_i c_i / c̄, in [0, 1]. 1 = one got nothing."""
    return 1.0 - load_ratio(counts).min(axis=-1)


def load_ratio(counts: ArrayLike) -> FloatArray:
    """Return c_i / c̄ of every expert, in the shape of `counts`; 1 = ideal. Ones where a row has no picks."""
    counts_E = np.asarray(counts, dtype=np.float64)
    mean = counts_E.mean(axis=-1, keepdims=True)
    return np.divide(counts_E, mean, out=np.ones_like(counts_E), where=mean > 0)


def noise_floor(mean_count: ArrayLike, num_experts: int, top_k: int) -> FloatArray:
    """Return the MaxVio that chance alone gives a router without any preference: sqrt(2 ln E · (1 − K/E) / c̄).

    mean_count: c̄, picks per expert in the batch that MaxVio was taken over; infinite floor where it is 0.

    The maximum of E normal variables with the binomial's variance. An upper estimate: for E = 64, K = 8 it gives 0.34
    at 512 tokens, where uniform routing measures 0.23. MaxVio tells of the router only when well above it.
    """
    mean = np.asarray(mean_count, dtype=np.float64)
    variance = 2.0 * np.log(num_experts) * (1.0 - top_k / num_experts)
    return np.sqrt(np.divide(variance, mean, out=np.full_like(mean, np.inf), where=mean > 0))


def max_vio_over_floor(counts: ArrayLike, top_k: int) -> FloatArray:
    """Return MaxVio in units of its noise floor; about 1 or less = no more than chance. 0 where MaxVio is 0."""
    counts_E = np.asarray(counts, dtype=np.float64)
    vio = max_vio(counts_E)
    floor = noise_floor(counts_E.mean(axis=-1), counts_E.shape[-1], top_k)
    # The floor is 0 when every token takes every expert; then MaxVio is 0 too.
    return np.divide(vio, floor, out=np.zeros_like(vio), where=floor > 0)


def entropy(counts: ArrayLike) -> FloatArray:
    """Return the entropy of the load −Σ p_i ln p_i, nats: ln E = even, 0 = one expert takes all."""
    shares_E = _shares(counts)
    logs_E = np.log(shares_E, out=np.zeros_like(shares_E), where=shares_E > 0)
    return np.abs((shares_E * logs_E).sum(axis=-1))  # abs: −0.0 would print as such


def evenness(counts: ArrayLike) -> FloatArray:
    """Return entropy / ln E, in [0, 1]; 1 for a single expert."""
    value = entropy(counts)
    num_experts = np.shape(counts)[-1]
    return value / np.log(num_experts) if num_experts > 1 else np.ones_like(value)


def effective_experts(counts: ArrayLike) -> FloatArray:
    """Return exp(entropy): how many evenly used experts would have this entropy, in [1, E]."""
    return np.exp(entropy(counts))


def coefficient_of_variation(counts: ArrayLike) -> FloatArray:
    """Return the population standard deviation of the load over its mean; 0 = even, sqrt(E − 1) at most."""
    return load_ratio(counts).std(axis=-1)


def gini(counts: ArrayLike) -> FloatArray:
    """Return the Gini coefficient of the load: 0 = even, 1 − 1/E = one expert takes all."""
    ratio_E = np.sort(load_ratio(counts), axis=-1)
    num_experts = ratio_E.shape[-1]
    rank_E = 2.0 * np.arange(1, num_experts + 1) - num_experts - 1
    return (ratio_E * rank_E).sum(axis=-1) / num_experts**2


def dead_experts(window_counts: ArrayLike) -> NDArray[np.bool_]:
    """Return which experts got nothing while their layer got something.

    window_counts: [..., E], summed over a window of steps: one step says little about an expert.
    """
    counts_E = np.asarray(window_counts)
    return (counts_E == 0) & (counts_E.sum(axis=-1, keepdims=True) > 0)


def starving_experts(window_counts: ArrayLike) -> NDArray[np.bool_]:
    """Return which experts got something, but less than a tenth of the mean load. window_counts: as `dead_experts`."""
    counts_E = np.asarray(window_counts)
    return (counts_E > 0) & (load_ratio(counts_E) < STARVING_SHARE)


def rank_loads(counts: ArrayLike, rank_of_expert: Sequence[int]) -> FloatArray:
    """Return picks per expert-parallel rank, [..., P]. rank_of_expert: for each of the E experts, its rank from 0."""
    ranks_E = np.asarray(rank_of_expert)
    one_hot_EP = (ranks_E[:, None] == np.arange(ranks_E.max() + 1)).astype(np.float64)
    return np.asarray(counts, dtype=np.float64) @ one_hot_EP


def rank_imbalance(counts: ArrayLike, rank_of_expert: Sequence[int]) -> FloatArray:
    """Return the busiest rank's load over the mean of ranks, in [1, P]: the ranks wait for the busiest one."""
    return load_ratio(rank_loads(counts, rank_of_expert)).max(axis=-1)


def rank_waste(counts: ArrayLike, rank_of_expert: Sequence[int]) -> FloatArray:
    """Return the share of the expert compute that ranks spend waiting: 1 − 1 / imbalance, in [0, 1 − 1/P]."""
    return 1.0 - 1.0 / rank_imbalance(counts, rank_of_expert)


def drop_rate(dropped: ArrayLike, picks: ArrayLike) -> FloatArray:
    """Return dropped / picks (both before combining); 0 where there were no picks."""
    picks_f = np.asarray(picks, dtype=np.float64)
    return np.divide(np.asarray(dropped, dtype=np.float64), picks_f, out=np.zeros_like(picks_f), where=picks_f > 0)


def _shares(counts: ArrayLike) -> FloatArray:
    """Return p_i, even where there are no picks."""
    ratio_E = load_ratio(counts)
    return ratio_E / ratio_E.shape[-1]


def domain_information(counts_DE: ArrayLike) -> float:
    """Return how much a pick's expert tells of the domain its token came from: I(domain; expert) / H(domain), 0 to 1.

    counts_DE: picks of each expert for each domain's text; every domain with picks weighs the same, however long its
    text. 0 = all domains use the experts alike (or there is one domain), 1 = no expert serves two domains.
    """
    counts = np.asarray(counts_DE, dtype=np.float64)
    totals_D = counts.sum(axis=1, keepdims=True)
    counts, totals_D = counts[totals_D[:, 0] > 0], totals_D[totals_D[:, 0] > 0]
    num_domains = counts.shape[0]
    if num_domains < 2:
        return 0.0
    joint_DE = counts / totals_D / num_domains
    independent_DE = joint_DE.sum(axis=0, keepdims=True) / num_domains
    ratio_DE = np.divide(joint_DE, independent_DE, out=np.ones_like(joint_DE), where=joint_DE > 0)
    return max(float((joint_DE * np.log(ratio_DE)).sum() / np.log(num_domains)), 0.0)
