"""From item scores to verdicts: the pre-registered pooled gate, gates of their own, and guards.

The primary gate pools the items of all primary sets whose items are right or wrong, so that one margin is tested once. A
primary set with another metric, and a slice that says `must_accept`, is a gate of its own; all gates must accept, so a true loss
passes none of them more often than alpha. A pooled set, a gating slice and a guard metric are guards: one rejects when its own
interval lies wholly beyond the margin, at a level that Holm's procedure shares among all guards, and otherwise is only
shown, for its sample alone is seldom large enough to accept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.metrics.registry import Answers, ChoiceScores, Embedder, Statistic
from model_optimizer.verification.golden import CHOICES, GoldenSet, Item, gating_metric
from model_optimizer.verification.golden_answers import Scores
from model_optimizer.verification.golden_statistics import Comparison, Curves, Judged, Outcomes, Rule
from model_optimizer.verification.statistics_slices import holm

POOLED = "all-primary-sets"


class Role(StrEnum):
    """How a result counts."""

    GATE = "gate"
    GUARD = "guard: only a REJECT of it counts"
    SHOWN = "shown only"


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that is compared: a set, a slice of one, another metric of one, or the pool."""

    golden_set: str
    slice: str | None
    metric: str
    compared: Comparison
    rule: Rule
    role: Role
    note: str


def golden_statistic(
    golden: GoldenSet, items: Sequence[Item], metric: str, scores: Scores, embed: Embedder | None = None
) -> Statistic:
    """Return the score of items as a function of their weights.

    Raises:
        ConfigError: the metric compares meanings and there is no embedder.
    """
    found = [scores[golden.card.name, item.id] for item in items]
    statistic = gating_metric(metric).statistic
    assert statistic is not None, "checked when the card was read"
    if metric == CHOICES:
        answers = tuple(item.answer for item in items if item.answer is not None)
        return statistic(ChoiceScores(tuple(score.log_probs for score in found), answers))
    references = tuple(golden.references_of(item) for item in items)
    return statistic(Answers(tuple(score.text for score in found), references, embed))


def clusters_of(golden: GoldenSet, items: Sequence[Item]) -> tuple[str, ...]:
    """Return the cluster of every item; an item without one is its own."""
    return tuple(f"{golden.card.name}/{item.cluster or item.id}" for item in items)


def judge_sets(
    sets: Sequence[GoldenSet], baseline: Scores, candidate: Scores, rule: Rule, embed: Embedder | None = None
) -> tuple[GoldenResult, ...]:
    """Return the pooled result first (absent when no set may gate so), then every set followed by its slices and guards."""
    parts, pooled = list[_Part](), list[_Part]()
    for golden in sets:
        judge = _Judge(golden, baseline, candidate, rule, embed)
        whole = judge.whole()
        parts += [whole, *judge.slices(whole), *judge.guards()]
        if whole.role is Role.GUARD:
            pooled.append(whole)
    return _results([*_pool(pooled, rule), *parts], rule.alpha)


def _pool(wholes: Sequence[_Part], rule: Rule) -> list[_Part]:
    """Return the primary gate over the items of all sets that may be pooled."""
    found = [part.compared for part in wholes if isinstance(part.compared, Outcomes)]
    if not found:
        return []
    together = Outcomes(
        np.concatenate([outcomes.baseline_N for outcomes in found]),
        np.concatenate([outcomes.candidate_N for outcomes in found]),
        tuple(cluster for outcomes in found for cluster in outcomes.clusters),
    )
    least = replace(rule, margin=min(rule.margin, *(part.rule.margin for part in wholes)))
    metric = ", ".join(sorted({part.metric for part in wholes}))
    return [_Part(POOLED, None, metric, together, least, Role.GATE, "primary gate")]


@dataclass(frozen=True, slots=True)
class _Judge:
    """One set of both engines."""

    golden: GoldenSet
    baseline: Scores
    candidate: Scores
    rule: Rule
    embed: Embedder | None

    def whole(self) -> _Part:
        """Return the set itself: a guard of the pool, a gate of its own, or shown only."""
        compared = self._compare(self.golden.items, self.golden.card.metric)
        role, note = Role.GUARD, str(Role.GUARD)
        if barred := self._barred(compared):
            role, note = Role.SHOWN, barred
        elif not isinstance(compared, Outcomes):
            role, note = Role.GATE, f"a gate of its own, by {self.golden.card.metric}"
        return self._part(None, self.golden.card.metric, compared, (role, note))

    def slices(self, whole: _Part) -> list[_Part]:
        """Return the slices that the card declares, in its order."""
        parts = []
        for name, piece in self.golden.card.slices.items():
            items = [item for item in self.golden.items if name in item.slices]
            counts = (piece.gates or piece.must_accept) and whole.role is not Role.SHOWN
            role, note = Role.SHOWN, whole.note if whole.role is Role.SHOWN else "informative slice"
            if counts:
                role = Role.GATE if piece.must_accept else Role.GUARD
                note = "a gate of its own: this slice must accept" if piece.must_accept else str(Role.GUARD)
            part = self._part(name, self.golden.card.metric, self._compare(items, self.golden.card.metric), (role, note))
            margin = min(part.rule.margin, piece.margin or part.rule.margin)
            parts.append(replace(part, rule=replace(part.rule, margin=margin)))
        return parts

    def guards(self) -> list[_Part]:
        """Return the card's other metrics, each with its own margin; they guard though the set itself may be only shown."""
        return [
            replace(
                self._part(None, metric, self._compare(self.golden.items, metric), (Role.GUARD, str(Role.GUARD))),
                rule=replace(self.rule, margin=margin),
            )
            for metric, margin in self.golden.card.guards.items()
        ]

    def _part(self, piece: str | None, metric: str, compared: Comparison, standing: tuple[Role, str]) -> _Part:
        margin = min(self.rule.margin, self.golden.card.margin or self.rule.margin)
        return _Part(self.golden.card.name, piece, metric, compared, replace(self.rule, margin=margin), *standing)

    def _compare(self, items: Sequence[Item], metric: str) -> Comparison:
        kind, clusters = gating_metric(metric), clusters_of(self.golden, items)
        one, other = (
            golden_statistic(self.golden, items, metric, scores, self.embed) for scores in (self.baseline, self.candidate)
        )
        if kind.is_binary:
            return Outcomes(_as_right(one), _as_right(other), clusters)
        return Curves(one, other, clusters, kind.higher_is_better, kind.resampled)

    def _barred(self, compared: Comparison) -> str:
        """Return why the set may not gate, or an empty string."""
        golden = self.golden
        if not golden.card.primary:
            return "not a primary set: shown only"
        if not golden.higher_is_better:
            return ""
        score = compared.baseline_score
        if score < golden.floor_ratio:
            return f"the baseline's {score:.3f} lies below the floor {golden.floor_ratio:.3f}: nothing to lose, shown only"
        if score > golden.ceiling_ratio:
            return f"the baseline's {score:.3f} lies above the ceiling {golden.ceiling_ratio:.3f}: shown only"
        return ""


def _as_right(statistic: Statistic) -> NDArray[np.bool_]:
    return statistic.per_item_N > 0.5


def _results(parts: Sequence[_Part], alpha: float) -> tuple[GoldenResult, ...]:
    """Judge every part; a guard's REJECT counts where it survives Holm's procedure over all guards."""
    judged = [part.compared.judge(part.rule) for part in parts]
    guards = [at for at, part in enumerate(parts) if part.role is Role.GUARD]
    adjusted = holm([judged[at].p_worse for at in guards])
    survives = {at: p_value <= alpha for at, p_value in zip(guards, adjusted, strict=True)}
    return tuple(_result(part, found, survives.get(at)) for at, (part, found) in enumerate(zip(parts, judged, strict=True)))


def _result(part: _Part, found: Judged, survives: bool | None) -> GoldenResult:
    decision, note = found.decision, part.note
    rejects = decision.verdict is Verdict.REJECT
    if rejects and survives is False:
        note = f"{note}; this REJECT alone would be chance once in a few guards (Holm), so it does not count"
    return GoldenResult(
        golden_set=part.golden_set,
        slice=part.slice,
        metric=part.metric,
        num_items=part.compared.num_items,
        baseline_ratio=found.baseline,
        candidate_ratio=found.candidate,
        difference=decision.difference,
        interval=decision.interval,
        num_gained=found.num_gained,
        num_lost=found.num_lost,
        margin=part.rule.margin,
        mde=decision.mde,
        samples_needed=decision.samples_needed,
        gates=part.role is Role.GATE or (rejects and survives is True),
        verdict=decision.verdict,
        reason=(
            f"{note}; one-sided bounds {decision.lower:+.4f} and {decision.upper:+.4f} at alpha {part.rule.alpha:g} against "
            f"{-part.rule.margin:+g}; {found.note}"
        ),
    )
