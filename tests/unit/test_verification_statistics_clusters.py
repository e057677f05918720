"""Ratio scores by cluster: values, errors, coverage, verdicts; Holm over slices."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import Flips, cluster_bootstrap, decide
from model_optimizer.verification.statistics_clusters import (
    ClusterSums,
    compare_clusters,
    judge_change,
    perplexity_ratio,
    standard_error,
    sum_by_cluster,
)
from model_optimizer.verification.statistics_plan import Plan
from model_optimizer.verification.statistics_slices import holm, judge_slices

PLAN = Plan(margin=0.02)


def test_scores_are_the_corpus_figures() -> None:
    clusters = ["b", "a", "b", "c"]
    assert sum_by_cluster(np.array([1.0, 2, 3, 4]), clusters).tolist() == [2, 4, 4]
    assert ClusterSums.of_means(np.array([1.0, 0.5, 0, 0.25]), clusters).score == pytest.approx(1.75 / 4)
    true, predicted, expected = np.array([2.0, 1, 0, 3]), np.array([3.0, 1, 1, 4]), np.array([2.0, 2, 1, 3])
    precision, recall = 6 / 9, 6 / 8
    f1 = ClusterSums.of_f1(true, predicted, expected, clusters).score
    assert f1 == pytest.approx(2 * precision * recall / (precision + recall))


def documents(num: int, seed: int, gain: float) -> tuple[ClusterSums, ClusterSums]:
    """Return two engines over `num` documents of unequal length, the second better by `gain` on average."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 30, num).astype(np.float64)
    level = generator.normal(0.6, 0.1, num)
    first = sizes * (level + generator.normal(0, 0.03, num))
    second = sizes * (level + gain + generator.normal(0, 0.03, num))
    return ClusterSums(first, sizes), ClusterSums(second, sizes)


def test_standard_error_is_the_paired_t_test_for_clusters_of_one() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(50)
    second = first + generator.normal(0.01, 0.05, 50)
    sums = [ClusterSums(values, np.ones(50)) for values in (first, second)]
    assert (second - first).mean() / standard_error(*sums) == pytest.approx(ttest_rel(second, first).statistic, rel=1e-9)


@pytest.mark.parametrize("num", [120, 700])
def test_compare_clusters_agrees_with_linearisation_and_is_paired(num: int) -> None:
    first, second = documents(num, 1, 0.01)
    found = compare_clusters(first, second, PLAN, seed=0)
    assert found.difference == pytest.approx(second.score - first.score)
    assert (found.interval.upper - found.interval.lower) / 3.92 == pytest.approx(found.standard_error, rel=0.08)
    assert found.interval.lower < found.lower < found.difference < found.upper < found.interval.upper
    unpaired = math.hypot(*(standard_error(ClusterSums(0 * s.numerators_C, s.denominators_C), s) for s in (first, second)))
    assert found.standard_error < unpaired / 2
    assert found == compare_clusters(first, second, PLAN, seed=0)


def test_compare_clusters_covers_the_true_change() -> None:
    hits = 0
    for seed in range(40):
        interval = compare_clusters(*documents(60, 100 + seed, 0.01), PLAN, seed=seed).interval
        hits += interval.lower <= 0.01 <= interval.upper
    assert hits >= 34  # 38 expected; fewer than 34 has a chance of 1 in 70


def test_perplexity_ratio_equals_the_standing_bootstrap() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.integers(50, 400, 600).astype(np.float64)
    base = tokens * generator.normal(2.5, 0.3, 600)
    worse = base + tokens * generator.normal(0.01, 0.02, 600)
    change = compare_clusters(ClusterSums(base, tokens), ClusterSums(worse, tokens), Plan(margin=0.03), seed=0)
    ratio, interval = perplexity_ratio(change)
    assert ratio == pytest.approx(math.exp(worse.sum() / tokens.sum()) / math.exp(base.sum() / tokens.sum()))
    standing = cluster_bootstrap(worse - base, tokens, seed=0)
    assert (math.log(interval.lower), math.log(interval.upper)) == pytest.approx((standing.lower, standing.upper), abs=3e-4)
    assert judge_change(change, Plan(margin=0.03), higher_is_better=False).verdict is Verdict.ACCEPT
    assert judge_change(change, Plan(margin=0.005), higher_is_better=False).verdict is Verdict.REJECT
    assert judge_change(change, Plan(margin=0.005)).verdict is Verdict.ACCEPT  # as a score the same change is a gain


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, Verdict.ACCEPT), (-0.05, Verdict.REJECT), (-0.02, Verdict.INCONCLUSIVE)])
def test_judge_change_answers_by_the_side_of_the_margin(gain: float, verdict: Verdict) -> None:
    found = judge_change(compare_clusters(*documents(100, 5, gain), PLAN, seed=0), PLAN)
    assert found.verdict is verdict
    assert (found.samples_needed > 0) == (verdict is Verdict.INCONCLUSIVE)


def test_judge_change_plans_the_clusters_that_decide() -> None:
    plan = Plan(margin=0.01)
    few = judge_change(compare_clusters(*documents(24, 2, 0.0), plan, seed=0), plan)
    assert few.verdict is Verdict.INCONCLUSIVE
    again = [
        judge_change(compare_clusters(*documents(24 + few.samples_needed, seed, 0.0), plan, seed=0), plan).verdict
        for seed in range(20, 24)
    ]
    assert again.count(Verdict.ACCEPT) >= 3


def test_judge_change_needs_clusters_even_where_nothing_changed() -> None:
    for num, verdict in ((10, Verdict.INCONCLUSIVE), (100, Verdict.INCONCLUSIVE), (200, Verdict.ACCEPT)):
        same = ClusterSums(np.full(num, 3.0), np.full(num, 4.0))
        found = judge_change(compare_clusters(same, same, PLAN, seed=0), PLAN)
        assert found.verdict is verdict and found.difference == 0
    assert found.lower == pytest.approx(-(1 - 0.05 ** (1 / 200)))


def test_cluster_scores_refuse_what_does_not_pair() -> None:
    one, two = ClusterSums(np.ones(3), np.ones(3)), ClusterSums(np.ones(4), np.ones(4))
    with pytest.raises(ConfigError, match="same two or more clusters"):
        compare_clusters(one, two, PLAN, seed=0)
    with pytest.raises(ConfigError, match="none negative"):
        ClusterSums(np.ones(2), np.zeros(2))
    with pytest.raises(ConfigError, match="3 items, 2 clusters"):
        sum_by_cluster(np.ones(3), ["a", "b"])


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    p_values = np.random.default_rng(4).random(5) ** 3
    subsets = [np.array(chosen) for size in range(1, 6) for chosen in itertools.combinations(range(5), size)]
    closed = [max(min(1.0, s.size * p_values[s].min()) for s in subsets if index in s) for index in range(5)]
    assert holm(p_values.tolist()) == pytest.approx(closed)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == () and holm([0.7, 0.9]) == (1.0, 1.0)
    with pytest.raises(ConfigError, match=r"lie in \[0, 1\]"):
        holm([1.2])


def test_holm_keeps_the_family_error() -> None:
    p_values = np.random.default_rng(0).random((4000, 8))
    assert np.mean([min(holm(row)) < 0.05 for row in p_values.tolist()]) == pytest.approx(0.05, abs=0.012)


def test_judge_slices_names_the_harmed_slice_only_when_it_stands_out_of_all() -> None:
    weak = Flips(400, 2, 19)  # loses 4.25 points: beyond 2 at alpha alone
    assert decide(weak, 0.02, alpha=0.05, power=0.8).verdict is Verdict.REJECT
    alone = judge_slices({"hard": weak}, PLAN)["hard"]
    assert alone.verdict is Verdict.REJECT and alone.p_harmed < 0.05
    many = judge_slices({"hard": weak, **{f"s{index}": Flips(2000, 20, 20) for index in range(9)}}, PLAN)
    assert many["hard"].verdict is Verdict.INCONCLUSIVE and many["hard"].p_harmed == pytest.approx(10 * alone.p_harmed)
    assert {many[f"s{index}"].verdict for index in range(9)} == {Verdict.ACCEPT}
    with pytest.raises(ConfigError, match="without any: none"):
        judge_slices({"none": Flips(0, 0, 0)}, PLAN)
