"""Gates of their own, guards by other metrics, slices that must accept, Holm: golden sets that are not choices."""

import json

import numpy as np
import pytest

from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.verification.accuracy import golden_measures
from model_optimizer.verification.gates import dimension_verdicts
from model_optimizer.verification.golden import Card, GoldenSet, Item
from model_optimizer.verification.golden_answers import ItemScore
from model_optimizer.verification.golden_run import run_verdict
from model_optimizer.verification.golden_statistics import Rule, cluster_weights
from model_optimizer.verification.judging import POOLED, judge_sets

RULE = Rule(margin=0.02, alpha=0.05, power=0.8)
FACTS = {"version": "1", "description": "", "provenance": "", "licence": "", "languages": ["en"]}


def texts(num: int, name: str = "texts", num_hard: int = 0, **card: object) -> GoldenSet:
    items = tuple(
        Item(id=f"{n}", prompt="p", references=("one two three four",), slices=("hard",) if n < num_hard else ("easy",))
        for n in range(num)
    )
    return GoldenSet(Card.model_validate({"name": name, "metric": "token_f1", **FACTS, **card}), items)


def written(golden: GoldenSet, *changed: tuple[range, str], usual: str = "one two three") -> dict[tuple[str, str], ItemScore]:
    outputs = [usual] * len(golden.items)
    for places, text in changed:
        for at in places:
            outputs[at] = text
    name = golden.card.name
    return {
        (name, item.id): ItemScore(golden_set=name, item=item.id, text=text)
        for item, text in zip(golden.items, outputs, strict=True)
    }


def test_judge_sets_gives_a_primary_set_of_texts_a_gate_of_its_own() -> None:
    golden = texts(600)
    baseline = written(golden)
    for places, verdict in ((range(6), Verdict.ACCEPT), (range(36), Verdict.REJECT), (range(14), Verdict.INCONCLUSIVE)):
        (result,) = judge_sets((golden,), baseline, written(golden, (places, "")), RULE)
        assert (result.verdict, result.gates, result.num_lost) == (verdict, True, len(places))
        assert result.baseline_ratio == pytest.approx(6 / 7)
        assert result.difference == pytest.approx(-len(places) * 6 / 7 / 600)
        assert result.interval.lower < result.difference < result.interval.upper
        assert run_verdict((result,)) is verdict


def test_judge_sets_has_the_normal_intervals_width_for_a_mean_of_many_items() -> None:
    golden = texts(1000)
    candidate = written(golden, (range(100), "one"))
    (result,) = judge_sets((golden,), written(golden), candidate, RULE)
    lost_N = np.where(np.arange(1000) < 100, 2 / 5 - 6 / 7, 0.0)
    half = 1.96 * lost_N.std() / np.sqrt(1000)
    assert result.interval.upper - result.interval.lower == pytest.approx(2 * half, rel=0.1)


def test_judge_sets_takes_less_repetition_and_verbosity_for_better() -> None:
    golden = texts(300, guards={"repetition": 0.05, "verbosity": 0.05})
    same_f1 = "one two three one two three one two three one two three"
    chatty = written(golden, (range(300), same_f1))
    whole, repetition, verbosity = judge_sets((golden,), written(golden), chatty, RULE)
    assert (repetition.metric, verbosity.metric) == ("repetition", "verbosity")
    assert repetition.difference == pytest.approx(-(1 - 3 / 9)) and repetition.num_lost == 300
    assert verbosity.difference == pytest.approx(-(1 - 4 / 12))
    for guard in (repetition, verbosity):
        assert guard.verdict is Verdict.REJECT and guard.gates and guard.margin == 0.05
    measures = {measure.name: measure for measure in golden_measures((whole, repetition, verbosity))}
    assert measures["golden_texts_repetition_change"].verdict is Verdict.REJECT
    _, *guards = judge_sets((golden,), chatty, written(golden), RULE)
    assert [guard.verdict for guard in guards] == [Verdict.ACCEPT] * 2 and not any(guard.gates for guard in guards)


def test_judge_sets_rejects_by_a_guarding_slice_though_the_whole_set_accepts() -> None:
    golden = texts(2000, num_hard=100, slices={"hard": {"gates": True}, "easy": {}})
    candidate = written(golden, (range(30), ""))
    whole, hard, easy = judge_sets((golden,), written(golden), candidate, RULE)
    assert whole.verdict is Verdict.ACCEPT and whole.gates
    assert hard.verdict is Verdict.REJECT and hard.gates and hard.difference == pytest.approx(-0.3 * 6 / 7)
    assert easy.verdict is Verdict.ACCEPT and not easy.gates
    assert run_verdict((whole, hard, easy)) is Verdict.REJECT


def test_judge_sets_waits_for_a_slice_that_must_accept() -> None:
    for num_hard, verdict in ((600, Verdict.ACCEPT), (40, Verdict.INCONCLUSIVE)):
        golden = texts(700, num_hard=num_hard, slices={"hard": {"must_accept": True, "margin": 0.01}})
        results = judge_sets((golden,), written(golden), written(golden), RULE)
        assert [result.margin for result in results] == [0.02, 0.01]
        assert results[1].gates and results[1].verdict is verdict
        assert run_verdict(results) is verdict


def test_judge_sets_forgives_one_weak_alarm_among_many_guards() -> None:
    sets = tuple(
        GoldenSet(
            Card.model_validate({"name": f"s{n}", "metric": "exact_match", **FACTS}),
            tuple(Item(id=f"{at}", prompt="p", references=("yes",)) for at in range(400)),
        )
        for n in range(8)
    )
    wrong = (range(40), "no")
    baseline = {key: score for golden in sets for key, score in written(golden, wrong, usual="yes").items()}
    candidate = baseline | written(sets[0], wrong, (range(40, 54), "no"), usual="yes")
    pooled, weak, *_ = judge_sets(sets, baseline, candidate, RULE)
    assert (pooled.golden_set, pooled.num_items, pooled.verdict) == (POOLED, 3200, Verdict.ACCEPT)
    assert weak.verdict is Verdict.REJECT and not weak.gates and "Holm" in weak.reason
    alone = judge_sets(sets[:1], baseline, candidate, RULE)[1]
    assert alone.verdict is Verdict.REJECT and alone.gates


def test_judge_sets_shows_but_does_not_gate_texts_at_the_floor_or_the_ceiling() -> None:
    golden = texts(300)
    for usual, word in (("nothing", "floor"), ("one two three four", "ceiling")):
        same = written(golden, usual=usual)
        (result,) = judge_sets((golden,), same, same, RULE)
        assert not result.gates and word in result.reason
        (measure, _) = golden_measures((result,))
        assert measure.value is None and measure.verdict is Verdict.INCONCLUSIVE


def test_judge_sets_holds_a_recommender_to_its_long_tail() -> None:
    tail = tuple(f"{item}" for item in range(50, 100))
    facts = {"name": "shop", "metric": "long_tail_exposure", "guards": {"long_tail_coverage": 0.05}, "references": tail}
    golden = GoldenSet(Card.model_validate({**facts, **FACTS}), tuple(Item(id=f"{n}") for n in range(2000)))
    baseline = written(golden, *[(range(n, n + 1), json.dumps([n % 50, 50 + n % 50])) for n in range(2000)])
    narrow = written(golden, *[(range(n, n + 1), json.dumps([n % 50, 50 + n % 46])) for n in range(2000)])
    exposure, coverage = judge_sets((golden,), baseline, narrow, RULE)
    assert exposure.verdict is Verdict.ACCEPT and exposure.difference == 0
    assert (coverage.baseline_ratio, coverage.candidate_ratio) == (1.0, pytest.approx(0.92))
    assert coverage.verdict is Verdict.REJECT and coverage.gates and coverage.interval.lower == coverage.interval.upper
    assert dimension_verdicts(golden_measures((exposure, coverage)))[Dimension.ACCURACY] is Verdict.REJECT


def test_cluster_weights_draw_whole_clusters_and_keep_their_number() -> None:
    clusters = ("a", "a", "b", "c", "c", "c")
    weights_BN = np.concatenate(list(cluster_weights(clusters, seed=0, num=500)))
    assert weights_BN.shape == (500, 6)
    assert (weights_BN[:, 0] == weights_BN[:, 1]).all() and (weights_BN[:, 3] == weights_BN[:, 5]).all()
    assert (weights_BN[:, [0, 2, 3]].sum(axis=1) == 3).all()
    assert weights_BN.mean() == pytest.approx(1.0, abs=0.1)
