"""Laws and hand-worked values of the load formulas."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moe.diagnostics import load

F1 = [4, 3, 1, 0]
COLLAPSED = [100] * 8 + [0] * 56

counts_strategy = st.integers(1, 40).flatmap(
    lambda num_experts: arrays(np.int64, num_experts, elements=st.integers(0, 10_000))
)
one_row_functions = [
    load.max_vio,
    load.min_vio,
    load.entropy,
    load.evenness,
    load.effective_experts,
    load.coefficient_of_variation,
    load.gini,
]


def test_values_on_the_shared_fixture() -> None:
    """F1 of the reported faults: counts 4, 3, 1, 0; mean 2, shares 1/2, 3/8, 1/8, 0."""
    assert load.coefficient_of_variation(F1) == pytest.approx(0.790569, abs=1e-6)
    assert load.max_vio(F1) == pytest.approx(1.0)
    assert load.entropy(F1) == pytest.approx(0.974315, abs=1e-6)
    assert load.min_vio(F1) == pytest.approx(1.0)
    assert load.effective_experts(F1) == pytest.approx(math.exp(0.974315), rel=1e-6)
    # Mean absolute difference of all ordered pairs over twice the mean: (2·(1+3+4+2+3+1)/16) / (2·2) = 28/64.
    assert load.gini(F1) == pytest.approx(28 / 64)
    assert load.dead_experts(F1).tolist() == [False, False, False, True]


def test_values_of_a_router_collapsed_to_8_of_64() -> None:
    assert load.max_vio(COLLAPSED) == pytest.approx(7.0)
    assert load.evenness(COLLAPSED) == pytest.approx(0.5)
    assert load.effective_experts(COLLAPSED) == pytest.approx(8.0)
    assert load.dead_experts(COLLAPSED).sum() == 56


@pytest.mark.parametrize("num_experts", [1, 2, 64])
def test_values_of_a_uniform_router(num_experts: int) -> None:
    counts = [7] * num_experts
    for function in (load.max_vio, load.min_vio, load.coefficient_of_variation, load.gini):
        assert function(counts) == pytest.approx(0.0, abs=1e-12)
    assert load.entropy(counts) == pytest.approx(math.log(num_experts), abs=1e-12)
    assert load.evenness(counts) == pytest.approx(1.0)
    assert load.effective_experts(counts) == pytest.approx(num_experts)
    assert not load.dead_experts(counts).any()
    assert not load.starving_experts(counts).any()


@pytest.mark.parametrize("num_experts", [1, 4])
def test_no_picks_give_the_values_of_an_even_load(num_experts: int) -> None:
    zeros, ones = np.zeros(num_experts, dtype=np.int64), np.ones(num_experts, dtype=np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in one_row_functions:
            assert function(zeros) == pytest.approx(function(ones), abs=1e-12)
        assert not load.dead_experts(zeros).any()
        assert not load.starving_experts(zeros).any()
        assert load.max_vio_over_floor(zeros, 1) == 0.0
        assert load.noise_floor(0, 4, 1) == math.inf
        assert load.rank_imbalance(zeros, list(range(num_experts))) == 1.0
        assert load.drop_rate(0, 0) == 0.0


@given(counts_strategy)
@settings(max_examples=60, deadline=None)
def test_formulas_stay_in_their_ranges(counts: np.ndarray) -> None:
    num_experts = len(counts)
    tiny = 1e-9
    assert -tiny <= load.max_vio(counts) <= num_experts - 1 + tiny
    assert -tiny <= load.min_vio(counts) <= 1
    assert 0 <= load.entropy(counts) <= math.log(num_experts) + tiny
    assert 0 <= load.evenness(counts) <= 1 + tiny
    assert 1 - tiny <= load.effective_experts(counts) <= num_experts + tiny
    assert 0 <= load.coefficient_of_variation(counts) <= math.sqrt(num_experts - 1) + tiny
    assert -tiny <= load.gini(counts) <= 1 - 1 / num_experts + tiny


@given(counts_strategy, st.integers(2, 50), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_formulas_see_neither_scale_nor_order(counts: np.ndarray, factor: int, random: object) -> None:
    shuffled = counts.tolist()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for function in one_row_functions:
        assert function(counts * factor) == pytest.approx(function(counts), rel=1e-9, abs=1e-9)
        assert function(shuffled) == pytest.approx(function(counts), rel=1e-9, abs=1e-9)


@given(counts_strategy)
@settings(max_examples=30, deadline=None)
def test_gini_is_the_mean_absolute_difference(counts: np.ndarray) -> None:
    if counts.sum() == 0:
        return
    pairs = np.abs(counts[:, None] - counts[None, :]).mean()
    assert load.gini(counts) == pytest.approx(pairs / (2 * counts.mean()), abs=1e-9)


@pytest.mark.parametrize("function", [*one_row_functions, load.load_ratio, load.dead_experts, load.starving_experts])
def test_leading_dims_are_kept_apart(function: Callable[[np.ndarray], np.ndarray]) -> None:
    rows = np.array([[[4, 3, 1, 0], [2, 2, 2, 2]], [[0, 0, 0, 0], [100, 0, 1, 99]]])
    whole = function(rows)
    assert whole.shape[:2] == (2, 2)
    for place in np.ndindex(2, 2):
        assert np.array_equal(whole[place], function(rows[place]))


@pytest.mark.parametrize(("num_tokens", "formula"), [(512, 0.34), (4096, 0.12), (65536, 0.03)])
def test_noise_floor_of_64_experts_top_8(num_tokens: int, formula: float) -> None:
    assert load.noise_floor(num_tokens * 8 / 64, 64, 8) == pytest.approx(formula, abs=0.005)


def test_noise_floor_covers_what_uniform_routing_measures() -> None:
    """8 distinct experts of 64 for each of 512 tokens, by chance alone: about two thirds of the floor."""
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        picks_TE = generator.random((512, 64)).argsort(axis=1) < 8
        ratios.append(load.max_vio_over_floor(picks_TE.sum(axis=0), 8))
    assert 0.5 < np.mean(ratios) < 0.9
    assert np.max(ratios) < 1.4


def test_every_token_to_every_expert_has_no_noise() -> None:
    assert load.noise_floor(100, 4, 4) == 0.0
    assert load.max_vio_over_floor([100] * 4, 4) == 0.0


def test_starving_means_less_than_a_tenth_of_the_mean_but_not_dead() -> None:
    counts = [0, 1, 2, 10, 87]  # mean 20: a tenth is 2
    assert load.starving_experts(counts).tolist() == [False, True, False, False, False]
    assert load.dead_experts(counts).tolist() == [True, False, False, False, False]


def test_rank_imbalance_and_waste_by_hand() -> None:
    """Ranks hold experts {0, 1} and {2, 3}: loads 7 and 1, mean 4, so the other rank waits 3/7 of the time."""
    assert load.rank_loads(F1, [0, 0, 1, 1]).tolist() == [7.0, 1.0]
    assert load.rank_imbalance(F1, [0, 0, 1, 1]) == pytest.approx(7 / 4)
    assert load.rank_waste(F1, [0, 0, 1, 1]) == pytest.approx(3 / 7)
    # Placed otherwise, the same experts wait less: {0, 3} and {1, 2} hold 4 and 4.
    assert load.rank_waste(F1, [0, 1, 1, 0]) == pytest.approx(0.0)


def test_drop_rate_by_hand() -> None:
    """A19: five picks, two kept."""
    assert load.drop_rate(3, 5) == pytest.approx(0.6)
    assert load.drop_rate([3, 0], [5, 0]).tolist() == pytest.approx([0.6, 0.0])


def test_domain_information_is_what_a_pick_tells_of_its_domain() -> None:
    """0 when domains use experts alike, 1 when they share none; a domain's length does not matter. Half shared, by hand:
    domains (2, 2, 0), (0, 2, 2): I = 2 · 1/4 · ln 2 = ½ ln 2, over ln 2."""
    assert load.domain_information([[3, 5], [30, 50]]) == pytest.approx(0.0, abs=1e-12)
    assert load.domain_information([[4, 0], [0, 1]]) == pytest.approx(1.0)
    assert load.domain_information([[2, 2, 0], [0, 2, 2]]) == pytest.approx(0.5)
    assert load.domain_information([[20, 20, 0], [0, 2, 2]]) == pytest.approx(0.5)
    assert load.domain_information([[4, 1]]) == 0.0
    assert load.domain_information([[4, 1], [0, 0]]) == 0.0
