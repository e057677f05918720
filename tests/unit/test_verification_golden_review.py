"""Replay and blinded review: what is shown, what is hidden, and what reviewers' choices come to."""

import json
import re
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.reporting.review_sheet import render_review_sheet
from model_optimizer.reporting.side_by_side import render_side_by_side
from model_optimizer.verification.golden import Card, GoldenSet, Item
from model_optimizer.verification.golden_answers import ItemScore
from model_optimizer.verification.golden_review import (
    CRITERIA,
    PairedAnswer,
    Review,
    ReviewKey,
    blind,
    paired_answers,
    read_reviews,
    sample_answers,
    summarise_reviews,
)

NAMES = ("baseline-model", "candidate-model")


def some_answers(num: int) -> tuple[PairedAnswer, ...]:
    return tuple(
        PairedAnswer(
            item=f"s/{n}",
            prompt=f"<b>prompt {n}</b>",
            references=("right",),
            baseline=f"left text {n}",
            candidate=f"left text {n}" if n % 2 else f"other text {n}",
            metric_difference=None if n % 2 else 1.0,
        )
        for n in range(num)
    )


def test_paired_answers_take_the_likeliest_choice_and_point_differences_to_the_better() -> None:
    facts = {"version": "1", "description": "", "provenance": "", "licence": "", "languages": ["en"]}
    quiz = GoldenSet(Card.model_validate({"name": "quiz", **facts}), (Item(id="a", prompt="p", choices=(" x", " y"), answer=1),))

    def scored(*log_probs: float) -> dict[tuple[str, str], ItemScore]:
        return {("quiz", "a"): ItemScore(golden_set="quiz", item="a", log_probs=log_probs)}

    (found,) = paired_answers(quiz, scored(-1, -2), scored(-2, -1))
    assert (found.item, found.baseline, found.candidate) == ("quiz/a", " x", " y")
    assert (found.references, found.metric_difference) == ((" y",), 1.0)
    talk = GoldenSet(Card.model_validate({"name": "talk", "metric": "repetition", **facts}), (Item(id="a", prompt="p"),))
    texts = [{("talk", "a"): ItemScore(golden_set="talk", item="a", text=text)} for text in ("a b c d e", "a b c d a b c d")]
    assert paired_answers(talk, texts[0], texts[1])[0].metric_difference == pytest.approx(-1 / 5)


def test_sample_answers_is_seeded_and_puts_changed_ones_first_on_request() -> None:
    answers = some_answers(20)
    plain, changed = (sample_answers(answers, 12, 3, changed_first=first) for first in (False, True))
    assert plain == sample_answers(answers, 12, 3, changed_first=False) != sample_answers(answers, 12, 4, changed_first=False)
    assert [it.baseline != it.candidate for it in changed] == [True] * 10 + [False] * 2


def test_render_side_by_side_escapes_and_counts_changes() -> None:
    page = render_side_by_side(some_answers(8), NAMES, 50, 0).decode()
    assert "8 of 8 items" in page and "4 of all 8 answers differ" in page
    assert "&lt;b&gt;prompt 3&lt;/b&gt;" in page and "<b>prompt" not in page
    assert page.count("better by the metric") == 4 and page.count("same answer") == 4
    assert not re.search(r"(src|href)=", page)


def test_render_review_sheet_hides_who_is_who_and_puts_each_on_both_sides() -> None:
    answers = some_answers(40)
    key = blind(answers, NAMES, seed=5)
    page = render_review_sheet(answers, key).decode()
    assert not any(name in page.split("</style>")[1] for name in (*NAMES, "candidate", "baseline"))
    assert page.count("<fieldset") == 40 * len(CRITERIA) and key.sheet in page
    sides = list(key.candidate_side.values())
    assert 10 < sides.count("left") < 30
    first = page.index('data-item="s/0"')
    left, right = page.index("other text 0", first), page.index("left text 0", first)
    assert (left < right) == (key.candidate_side["s/0"] == "left")
    assert blind(answers, NAMES, seed=5) == key != blind(answers, NAMES, seed=6)
    assert not re.search(r'(src|href)="', page)


def review(key: ReviewKey, reviewer: str, likes: str) -> Review:
    """Return choices for the items in order: c candidate, b baseline, = neither."""
    other = {"left": "right", "right": "left"}
    said = {}
    for item, like in zip(key.candidate_side, likes, strict=False):
        side = key.candidate_side[item]
        said[item] = {"overall": "same" if like == "=" else side if like == "c" else other[side]}
    return Review.model_validate({"sheet": key.sheet, "reviewer": reviewer, "answers": said})


def test_summarise_reviews_unblinds_and_measures_agreement() -> None:
    key = blind(some_answers(10), NAMES, seed=1)
    one, two = review(key, "one", "cccccccc=b"), review(key, "two", "ccccccbb==")
    alone = summarise_reviews(key, (one,))
    overall = alone.preferences[0]
    assert (overall.num_candidate, overall.num_baseline, overall.num_same) == (8, 1, 1)
    assert overall.candidate_ratio == pytest.approx(8 / 9) and overall.sign_p == pytest.approx(20 / 512)
    assert overall.interval is not None and overall.interval.lower == pytest.approx(0.565, abs=1e-3)
    assert alone.agreement_ratio is None and alone.kappa is None and alone.num_in_sheet == 10
    assert alone.metric_agreement_ratio == pytest.approx(1.0)  # items 0, 2, 4, 6 have a metric, all for the candidate
    both = summarise_reviews(key, (one, two))
    assert both.num_reviewers == 2 and both.agreement_ratio == pytest.approx(7 / 10)
    sides = [[it.answers[item]["overall"] for item in key.candidate_side] for it in (one, two)]
    chance = sum(sides[0].count(name) * sides[1].count(name) for name in ("left", "right", "same")) / 100
    assert both.kappa == pytest.approx((0.7 - chance) / (1 - chance))
    assert both.preferences[1].candidate_ratio is None


def test_read_reviews_refuses_other_sheets_unknown_items_and_second_votes(tmp_path: Path) -> None:
    key = blind(some_answers(4), NAMES, seed=1)
    paths = []
    for name, found in (("a", review(key, "one", "cc")), ("b", review(key, "one", "bb"))):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(found.model_dump_json())
    assert len(read_reviews(key, paths[:1])) == 1
    with pytest.raises(ConfigError, match="a second review by 'one'"):
        read_reviews(key, paths)
    with pytest.raises(ConfigError, match="belongs to sheet"):
        read_reviews(blind(some_answers(4), NAMES, seed=2), paths[:1])
    wrong = json.loads(paths[0].read_text())
    for change, message in (
        ({"answers": {"s/9": {"overall": "left"}}}, "'s/9', which is not in the sheet"),
        ({"answers": {"s/1": {"overall": "middle"}}}, "is no saved review"),
        ({"answers": {"s/1": {"beauty": "left"}}}, "'beauty', which is not in the sheet"),
    ):
        paths[0].write_text(json.dumps(wrong | change))
        with pytest.raises(ConfigError, match=message):
            read_reviews(key, paths[:1])
