"""Span F1 of named-entity recognition: right only where type and borders are both right, by the `nervaluate` package."""

import json
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import TypeAdapter, model_validator

from model_optimizer.artifacts.base import Frozen
from model_optimizer.metrics.json_answers import read_output, read_references
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, ratio_statistic
from model_optimizer.metrics.words import words

if TYPE_CHECKING:
    from nervaluate.entities import Entity


class Span(Frozen):
    """An entity by borders, or by its text where the answer of a language model holds no positions."""

    label: str
    start: int | None = None
    end: int | None = None
    text: str | None = None

    @model_validator(mode="after")
    def _placed(self) -> Self:
        by_borders = self.start is not None and self.end is not None and self.start <= self.end
        if not by_borders and (self.text is None or self.start is not None or self.end is not None):
            raise ValueError("a span has `start` <= `end`, or `text` alone")
        return self


SPANS = TypeAdapter(list[Span])
_ALLOWED = '{"label": "person", "start": 0, "end": 4} or {"label": "person", "text": "Ada"}'


def span_f1(answers: Answers) -> Statistic:
    """Return 2 correct / (claimed + wanted) over all spans of all items, the strict scheme of SemEval 2013 task 9.1.

    Source: Segura-Bedmar et al., SemEval-2013 task 9, section 4, as counted by nervaluate's `strict`.
    """
    from nervaluate.strategies import StrictEvaluation

    strict = StrictEvaluation()
    correct, either = list[float](), list[float]()
    for output, references in zip(answers.outputs_N, answers.references_N, strict=True):
        wanted, claimed = read_references(references, SPANS, _ALLOWED), read_output(output, SPANS)
        places: dict[tuple[str, ...], int] = {}
        tags = sorted({span.label for span in (*wanted, *claimed)})
        truth = _entities(wanted, places)
        # exact ones first: nervaluate lets an overlapping claim take a span away from the exact claim that follows
        claims = sorted(_entities(claimed, places), key=lambda entity: entity not in truth)
        counts, _ = strict.evaluate(truth, claims, tags, 0)
        correct.append(2.0 * counts.correct)
        either.append(float(len(wanted) + len(claimed)))
    return ratio_statistic(np.array(correct, np.float64), np.array(either, np.float64), empty=1.0)


def _entities(spans: list[Span], places: dict[tuple[str, ...], int]) -> "list[Entity]":
    """Return spans as nervaluate's entities; equal texts of one item get equal borders, their repetitions borders further on."""
    from nervaluate.entities import Entity

    seen: dict[tuple[str, ...], int] = {}
    entities = []
    for span in spans:
        start, end = span.start, span.end
        if start is None or end is None:
            text = words(span.text or "")
            seen[text] = seen.get(text, 0) + 1
            start = end = places.setdefault((*text, f"#{seen[text]}"), len(places))
        entities.append(Entity(span.label, start, end))
    return entities


def _check(references: tuple[str, ...]) -> None:
    read_references(references, SPANS, _ALLOWED)


def _example(seed: int) -> Answers:
    generator = np.random.default_rng(seed)
    outputs, references = list[str](), list[tuple[str, ...]]()
    for _ in range(12):
        starts = sorted(int(start) for start in generator.choice(60, 3, replace=False))
        spans = [{"label": str(generator.choice(["person", "place"])), "start": start, "end": start + 1} for start in starts]
        references.append(tuple(json.dumps(span) for span in spans))
        outputs.append(json.dumps([span for span in spans if generator.uniform() < 0.7]))
    return Answers(tuple(outputs), tuple(references))


METRICS.register("span_f1")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: span_f1(answers).value,
        example=_example,
        statistic=span_f1,
        reads_json=True,
        needs_reference=False,
        check=_check,
    )
)
