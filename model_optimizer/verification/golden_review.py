"""Blinded human review of two engines' answers: who sees what, and what the reviewers' choices say once they are unblinded."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Interval
from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import Embedder
from model_optimizer.store import canonical_json, write_atomically
from model_optimizer.verification.golden import GoldenSet, Item
from model_optimizer.verification.golden_answers import ItemScore, Scores
from model_optimizer.verification.judging import golden_statistic

CRITERIA = {
    "overall": "Which answer is better?",
    "readability": "Which reads better?",
    "factuality": "Which is truer, and keeps more of the key facts?",
    "instruction": "Which does more of what was asked?",
}
Side = Literal["left", "right"]
Choice = Literal["left", "right", "same"]
OVERALL = "overall"


class PairedAnswer(Frozen):
    """One item with both answers as text."""

    item: str
    """`set/id`."""
    prompt: str
    references: tuple[str, ...]
    baseline: str
    candidate: str
    metric_difference: float | None
    """Candidate - baseline by the set's metric, better is positive; None where an item alone has none."""


_ANSWERS = TypeAdapter(list[PairedAnswer])


class ReviewKey(Frozen):
    """What reviewers must not see. The sheet's id is its digest, so that results of another sheet are refused."""

    baseline: str
    candidate: str
    seed: int
    candidate_side: dict[str, Side]
    metric_difference: dict[str, float | None]

    @property
    def sheet(self) -> str:
        return hashlib.sha256(canonical_json(self)).hexdigest()[:16]


class Review(Frozen):
    """What one reviewer saved."""

    sheet: str
    reviewer: str
    answers: dict[str, dict[str, Choice]]
    """Item -> criterion -> choice; what was left open is absent."""


class Preference(Frozen):
    """What all reviewers said of one criterion."""

    criterion: str
    num_candidate: int
    num_baseline: int
    num_same: int
    candidate_ratio: float | None
    """Of the answers that prefer one; None where none does."""
    interval: Interval | None
    """95 %, Wilson."""
    sign_p: float
    """Exact two-sided sign test; a description, not a gate."""


class ReviewSummary(Frozen):
    """Unblinded reviews."""

    num_reviewers: int
    num_items: int
    """Judged by one reviewer at least."""
    num_in_sheet: int
    preferences: tuple[Preference, ...]
    agreement_ratio: float | None
    """Share of (pair of reviewers, item) with the same overall choice; None with one reviewer."""
    kappa: float | None
    """Mean of Cohen's kappa over pairs of reviewers: agreement beyond chance."""
    metric_agreement_ratio: float | None
    """Share of items whose metric and whose reviewers prefer one engine that prefer the same."""


def paired_answers(
    golden: GoldenSet, baseline: Scores, candidate: Scores, embed: Embedder | None = None
) -> tuple[PairedAnswer, ...]:
    """Return both engines' answers to every item of a set."""
    sign = 1.0 if golden.higher_is_better else -1.0
    one, other = (
        golden_statistic(golden, golden.items, golden.card.metric, scores, embed).per_item_N for scores in (baseline, candidate)
    )
    name = golden.card.name
    return tuple(
        PairedAnswer(
            item=f"{name}/{item.id}",
            prompt=item.prompt,
            references=item.right_texts or golden.card.references,
            baseline=answer_text(item, baseline[name, item.id]),
            candidate=answer_text(item, candidate[name, item.id]),
            metric_difference=float(sign * difference) if np.isfinite(difference) else None,
        )
        for item, difference in zip(golden.items, other - one, strict=True)
    )


def write_answers_file(path: Path, answers: Sequence[PairedAnswer]) -> None:
    """Write paired answers as one JSON list."""
    write_atomically(path, _ANSWERS.dump_json(list(answers)))


def read_answers_file(path: Path) -> tuple[PairedAnswer, ...]:
    """Return what `write_answers_file` wrote."""
    return tuple(_ANSWERS.validate_json(path.read_bytes()))


def answer_text(item: Item, score: ItemScore) -> str:
    """Return what was written, or the choice that was found likeliest."""
    if not item.choices:
        return score.text
    values = np.nan_to_num(np.array(score.log_probs), nan=-np.inf)
    return item.choices[int(values.argmax())]


def sample_answers(answers: Sequence[PairedAnswer], num: int, seed: int, *, changed_first: bool) -> tuple[PairedAnswer, ...]:
    """Return `num` answers drawn at random; with `changed_first` those whose texts differ before those that do not."""
    order = random.Random(seed).sample(list(answers), len(answers))
    if changed_first:
        order.sort(key=lambda answer: answer.baseline == answer.candidate)
    return tuple(order[:num])


def blind(answers: Sequence[PairedAnswer], names: tuple[str, str], seed: int) -> ReviewKey:
    """Return which side the candidate stands on, item by item; `names` are the baseline's and the candidate's."""
    generator = random.Random(seed)
    sides: list[Side] = ["left", "right"]
    return ReviewKey(
        baseline=names[0],
        candidate=names[1],
        seed=seed,
        candidate_side={answer.item: generator.choice(sides) for answer in answers},
        metric_difference={answer.item: answer.metric_difference for answer in answers},
    )


def read_reviews(key: ReviewKey, paths: Sequence[Path]) -> tuple[Review, ...]:
    """Return saved reviews.

    Raises:
        ConfigError: a file is no review, or belongs to another sheet, or two are of one reviewer.
    """
    reviews = list[Review]()
    for path in paths:
        try:
            review = Review.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path} is no saved review ({where}: {first['msg']}); use the sheet's own button") from error
        if review.sheet != key.sheet:
            raise ConfigError(f"{path} belongs to sheet {review.sheet}, the key to sheet {key.sheet}; give the key of that sheet")
        unknown = sorted({item for item in review.answers if item not in key.candidate_side})
        unknown += sorted({name for said in review.answers.values() for name in said if name not in CRITERIA})
        if unknown:
            raise ConfigError(f"{path} judges {unknown[0]!r}, which is not in the sheet")
        if review.reviewer in [other.reviewer for other in reviews]:
            raise ConfigError(f"{path}: a second review by {review.reviewer!r}; a reviewer counts once")
        reviews.append(review)
    return tuple(reviews)


def summarise_reviews(key: ReviewKey, reviews: Sequence[Review]) -> ReviewSummary:
    """Unblind and count."""
    from itertools import combinations

    pairs = [_agreement(one, other) for one, other in combinations(reviews, 2)]
    shared = [pair for pair in pairs if pair is not None]
    judged = {item for review in reviews for item, said in review.answers.items() if said}
    return ReviewSummary(
        num_reviewers=len(reviews),
        num_items=len(judged),
        num_in_sheet=len(key.candidate_side),
        preferences=tuple(_preference(name, key, reviews) for name in CRITERIA),
        agreement_ratio=float(np.average([it[0] for it in shared], weights=[it[2] for it in shared])) if shared else None,
        kappa=float(np.mean([it[1] for it in shared])) if shared else None,
        metric_agreement_ratio=_metric_agreement(key, reviews),
    )


def _votes(key: ReviewKey, reviews: Sequence[Review], criterion: str) -> dict[str, list[int]]:
    """Return item -> +1 for the candidate, -1 for the baseline, 0 for no difference, one per reviewer."""
    votes: dict[str, list[int]] = {}
    for review in reviews:
        for item, said in review.answers.items():
            if criterion in said:
                choice = said[criterion]
                vote = 0 if choice == "same" else 1 if choice == key.candidate_side[item] else -1
                votes.setdefault(item, []).append(vote)
    return votes


def _preference(criterion: str, key: ReviewKey, reviews: Sequence[Review]) -> Preference:
    from scipy.stats import binomtest

    votes = [vote for found in _votes(key, reviews, criterion).values() for vote in found]
    won, lost = votes.count(1), votes.count(-1)
    test = binomtest(won, won + lost, 0.5) if won + lost else None
    bounds = test.proportion_ci(0.95, method="wilson") if test else None
    return Preference(
        criterion=criterion,
        num_candidate=won,
        num_baseline=lost,
        num_same=votes.count(0),
        candidate_ratio=won / (won + lost) if won + lost else None,
        interval=Interval(lower=float(bounds.low), upper=float(bounds.high)) if bounds else None,
        sign_p=float(test.pvalue) if test else 1.0,
    )


def _agreement(one: Review, other: Review) -> tuple[float, float, int] | None:
    """Return raw agreement, Cohen's kappa and the number of items that both judged overall; None where there is none.

    Source: Cohen, A coefficient of agreement for nominal scales, 1960. Where chance alone would agree always, kappa is 1.
    """
    said = [
        (one.answers[item][OVERALL], other.answers[item][OVERALL])
        for item in sorted(one.answers.keys() & other.answers.keys())
        if OVERALL in one.answers[item] and OVERALL in other.answers[item]
    ]
    if not said:
        return None
    raw = sum(left == right for left, right in said) / len(said)
    firsts, seconds = [left for left, _ in said], [right for _, right in said]
    chance = sum(firsts.count(name) * seconds.count(name) for name in ("left", "right", "same")) / len(said) ** 2
    return raw, 1.0 if chance == 1 else (raw - chance) / (1 - chance), len(said)


def _metric_agreement(key: ReviewKey, reviews: Sequence[Review]) -> float | None:
    both = [
        (sum(votes) > 0) == (difference > 0)
        for item, votes in _votes(key, reviews, OVERALL).items()
        if (difference := key.metric_difference[item]) and sum(votes)
    ]
    return sum(both) / len(both) if both else None
