"""Pooled gate, guards, slices, limits, dimensions."""

import numpy as np
import pytest

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Verdict
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.verification.accuracy import accuracy_measures
from model_optimizer.verification.gates import combine, dimension_verdicts
from model_optimizer.verification.golden import Card, GoldenSet, Item, Slice
from model_optimizer.verification.golden_answers import ItemScore
from model_optimizer.verification.golden_statistics import Rule
from model_optimizer.verification.held_out import TextScore
from model_optimizer.verification.judging import POOLED, judge_sets
from model_optimizer.verification.latency import check_limit
from model_optimizer.verification.robustness import robustness_measures, soak_measure
from model_optimizer.verification.speed import above
from model_optimizer.verification.statistics import Flips, tango_interval

RULE = Rule(margin=0.02, alpha=0.05, power=0.8)
RIGHT, WRONG = (-1.0, -2.0), (-2.0, -1.0)


def golden_set(name: str, num: int, *, clusters: int | None = None, **card: object) -> GoldenSet:
    fields = {"name": name, "version": "1", "description": "", "provenance": "", "licence": "", "languages": ["en"], **card}
    items = tuple(
        Item(
            id=f"{n}",
            prompt="p",
            choices=("a", "b"),
            answer=0,
            slices=("hard",) if n < num // 4 else (),
            cluster=None if clusters is None else str(n % clusters),
        )
        for n in range(num)
    )
    return GoldenSet(Card.model_validate(fields), items)


def scores(golden: GoldenSet, wrong: set[int]) -> dict[tuple[str, str], ItemScore]:
    name = golden.card.name
    return {
        (name, item.id): ItemScore(golden_set=name, item=item.id, log_probs=WRONG if int(item.id) in wrong else RIGHT)
        for item in golden.items
    }


def test_judge_sets_pools_primary_sets_and_counts_flips() -> None:
    one, two = golden_set("one", 300), golden_set("two", 300)
    baseline = scores(one, set(range(30))) | scores(two, set(range(60)))
    candidate = scores(one, set(range(3, 32))) | scores(two, set(range(60)))
    pooled, first, second = judge_sets((one, two), baseline, candidate, RULE)
    assert (pooled.golden_set, pooled.num_items, pooled.num_gained, pooled.num_lost) == (POOLED, 600, 3, 2)
    assert pooled.baseline_ratio == pytest.approx(510 / 600) and pooled.candidate_ratio == pytest.approx(511 / 600)
    assert pooled.difference == pytest.approx(1 / 600)
    assert pooled.gates and pooled.verdict is Verdict.ACCEPT
    assert not first.gates and not second.gates


def test_judge_sets_lets_one_bad_set_reject_though_the_pool_is_large() -> None:
    good, bad = golden_set("good", 3000), golden_set("bad", 300)
    baseline = scores(good, set(range(300))) | scores(bad, set(range(30)))
    candidate = scores(good, set(range(300))) | scores(bad, set(range(54)))
    pooled, _, guard = judge_sets((good, bad), baseline, candidate, RULE)
    assert pooled.verdict is Verdict.ACCEPT
    assert guard.verdict is Verdict.REJECT and guard.gates
    measures = accuracy_measures((pooled, guard), TEXTS, seed=0)
    assert dimension_verdicts(measures)[Dimension.ACCURACY] is Verdict.REJECT


def test_judge_sets_shows_but_does_not_gate_a_set_at_the_floor() -> None:
    floor = golden_set("floor", 300)
    guessing = scores(floor, set(range(150)))
    (result,) = judge_sets((floor,), guessing, guessing, RULE)
    assert not result.gates and "below the floor 0.550" in result.reason
    measure = accuracy_measures((result,), TEXTS, seed=0)[0]
    assert measure.verdict is Verdict.INCONCLUSIVE and measure.value is None


def test_judge_sets_takes_the_tighter_margin_of_a_card_and_never_a_wider_one() -> None:
    for stated, used in ((0.01, 0.01), (0.5, 0.02), (None, 0.02)):
        golden = golden_set("one", 100, margin=stated, slices={"hard": Slice(gates=True)}, ceiling_ratio=1.0)
        found = judge_sets((golden,), scores(golden, set()), scores(golden, set()), RULE)
        assert [result.margin for result in found] == [used] * 3
        assert found[2].slice == "hard" and found[2].num_items == 25


def test_judge_sets_widens_the_interval_for_clusters() -> None:
    golden = golden_set("one", 400, clusters=40, ceiling_ratio=1.0)
    wrong = {n for n in range(400) if n % 40 in (3, 4)}  # two whole clusters of ten are lost
    found = judge_sets((golden,), scores(golden, set()), scores(golden, wrong), RULE)[0]
    assert (found.num_items, found.num_lost) == (400, 20)
    expected = tango_interval(Flips(40, 0, 2))  # as if only the 40 clusters had been asked
    assert (found.interval.lower, found.interval.upper) == pytest.approx((expected.lower, expected.upper), abs=1e-9)
    assert "clustering shrinks the sample by 10.00" in found.reason


TEXTS = (
    TextScore(text=0, num_tokens=100, baseline_log_prob=-200.0, candidate_log_prob=-210.0, kl_nats=2.0, num_flips=5),
    TextScore(text=1, num_tokens=300, baseline_log_prob=-600.0, candidate_log_prob=-630.0, kl_nats=6.0, num_flips=15),
)


def test_accuracy_measures_weigh_texts_by_their_tokens() -> None:
    golden = golden_set("one", 300)
    found = judge_sets((golden,), scores(golden, {1, 200}), scores(golden, {1, 200}), RULE)
    by_name = {measure.name: measure for measure in accuracy_measures(found, TEXTS, seed=0)}
    assert by_name["held_out_perplexity"].value == pytest.approx(np.exp(840 / 400))
    assert by_name["held_out_perplexity"].baseline == pytest.approx(np.exp(2.0))
    assert by_name["held_out_perplexity_ratio"].value == pytest.approx(np.exp(0.1))
    assert by_name["held_out_kl"].value == pytest.approx(0.02) and by_name["held_out_top1_flips"].value == pytest.approx(0.05)
    assert by_name["golden_change"].metric == "accuracy/golden_change_ratio"


@pytest.mark.parametrize(
    ("samples_ms", "verdict"),
    [
        (np.full(59, 90.0), Verdict.ACCEPT),
        (np.full(58, 90.0), Verdict.INCONCLUSIVE),
        (np.full(59, 110.0), Verdict.REJECT),
        (np.r_[np.full(56, 90.0), np.full(4, 110.0)], Verdict.INCONCLUSIVE),
        (np.r_[np.full(52, 90.0), np.full(8, 110.0)], Verdict.REJECT),
        (np.array([]), Verdict.REJECT),
    ],
)
def test_check_limit_needs_the_bound_on_one_side(samples_ms: np.ndarray, verdict: Verdict) -> None:
    found = check_limit(samples_ms, 0.95, 100.0, alpha=0.05)
    assert found.verdict is verdict
    assert (found.samples_needed > 0) == (verdict is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("lower", "upper", "verdict"),
    [(0.96, 1.4, Verdict.ACCEPT), (0.5, 0.94, Verdict.REJECT), (0.9, 1.1, Verdict.INCONCLUSIVE)],
)
def test_above_answers_by_the_whole_interval(lower: float, upper: float, verdict: Verdict) -> None:
    assert above(Interval(lower=lower, upper=upper), 0.95) is verdict


def test_combine_lets_reject_dominate_and_nothing_is_no_pass() -> None:
    accept, reject, unclear = Verdict.ACCEPT, Verdict.REJECT, Verdict.INCONCLUSIVE
    assert combine((accept, accept)) is accept
    assert combine((accept, unclear)) is unclear
    assert combine((accept, unclear, reject)) is reject
    assert combine(()) is unclear


def test_dimension_verdicts_ignore_what_does_not_gate() -> None:
    shown = Measure(name="a", dimension=Dimension.SPEED, unit="ms", value=1.0)
    gate = Measure(name="b", dimension=Dimension.RESOURCE, unit="bytes", value=1.0, verdict=Verdict.ACCEPT)
    found = dimension_verdicts((shown, gate))
    assert found[Dimension.SPEED] is Verdict.INCONCLUSIVE and found[Dimension.RESOURCE] is Verdict.ACCEPT


def soak(ran_s: float, **changes: object) -> SoakResult:
    fields: dict[str, object] = {
        "requested_s": 60, "ran_s": ran_s, "num_segments": 1, "num_requests": 100, "num_failed": 0, "num_non_finite": 0,
        "num_wrong_canaries": 0, "memory_slope_bytes_per_hour": 0.0, "memory_slope_interval": {"lower": -1e6, "upper": 1e6},
        "p50_first_ms": 10.0, "p50_last_ms": 11.0, "num_canaries": 8,
    }  # fmt: skip
    return SoakResult.model_validate(fields | changes)


@pytest.mark.parametrize("fault", ["num_failed", "num_non_finite", "num_wrong_canaries"])
def test_robustness_rejects_a_single_fault(fault: str) -> None:
    fine = robustness_measures(soak(60), 0, 0, 2**30)
    assert dimension_verdicts(fine)[Dimension.ROBUSTNESS] is Verdict.ACCEPT
    bad = robustness_measures(soak(60, **{fault: 1}), 0, 0, 2**30)
    assert dimension_verdicts(bad)[Dimension.ROBUSTNESS] is Verdict.REJECT


@pytest.mark.parametrize(
    ("ran_s", "slope", "verdict"),
    [(60, 1e9, None), (7200, 1e9, Verdict.REJECT), (7200, 0.0, Verdict.INCONCLUSIVE), (7200, -2e6, Verdict.ACCEPT)],
)
def test_memory_slope_gates_only_a_long_soak(ran_s: float, slope: float, verdict: Verdict | None) -> None:
    interval = {"lower": slope - 1e6, "upper": slope + 1e6}
    found = robustness_measures(soak(ran_s, memory_slope_bytes_per_hour=slope, memory_slope_interval=interval), 0, 0, 2**30)
    assert next(measure for measure in found if measure.name == "memory_slope").verdict is verdict


def test_soak_measure_says_provisional_when_the_soak_was_short() -> None:
    short, long = soak_measure(soak(60), 86400), soak_measure(soak(86400), 86400)
    assert (short.value, short.limit, short.verdict) == (60, 86400, None)
    assert "provisional" in short.reason and "provisional" not in long.reason
