"""From item scores to verdicts: the pre-registered pooled gate, one guard per set, and the slices.

The primary gate pools the items of all primary sets, so that one margin is tested once. A single set or a gating
slice is a guard: it rejects when its own interval lies wholly beyond the margin, and otherwise is only shown, for
its sample alone is seldom large enough to accept. A true loss passes only where it passes the primary gate, so the
guards cost no alpha.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.metrics.choice_accuracy import is_right
from model_optimizer.verification.golden import GoldenSet, ItemScore
from model_optimizer.verification.statistics import Flips, decide, design_effect, mcnemar_p_value

POOLED = "all-primary-sets"
Scores = Mapping[tuple[str, str], ItemScore]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the gate tests: loss below `margin` (absolute score difference), one-sided at `alpha`, planned at `power`."""

    margin: float
    alpha: float
    power: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Paired outcomes of N items."""

    baseline_N: NDArray[np.bool_]
    candidate_N: NDArray[np.bool_]
    clusters: tuple[str, ...]

    @property
    def difference_N(self) -> NDArray[np.float64]:
        """Return +1 gained, -1 lost, 0 unchanged."""
        return self.candidate_N.astype(np.float64) - self.baseline_N.astype(np.float64)

    def take(self, chosen_N: NDArray[np.bool_]) -> "Outcomes":
        """Return the outcomes of the chosen items."""
        clusters = tuple(cluster for cluster, chosen in zip(self.clusters, chosen_N, strict=True) if chosen)
        return Outcomes(self.baseline_N[chosen_N], self.candidate_N[chosen_N], clusters)


def outcomes(golden: GoldenSet, baseline: Scores, candidate: Scores) -> Outcomes:
    """Say of every item of a set which engine was right."""
    name = golden.card.name
    right = [
        [is_right(scores[name, item.id].log_probs, item.answer) for item in golden.items] for scores in (baseline, candidate)
    ]
    clusters = tuple(f"{name}/{item.cluster or item.id}" for item in golden.items)
    return Outcomes(np.array(right[0], dtype=bool), np.array(right[1], dtype=bool), clusters)


def judge_sets(sets: Sequence[GoldenSet], baseline: Scores, candidate: Scores, rule: Rule) -> tuple[GoldenResult, ...]:
    """Return the pooled result first (absent when no set may gate), then every set followed by its slices."""
    results, pooled = list[GoldenResult](), list[Outcomes]()
    margins = [rule.margin]
    for golden in sets:
        found = outcomes(golden, baseline, candidate)
        own = Rule(min(rule.margin, golden.card.margin or rule.margin), rule.alpha, rule.power)
        barred = _barred(golden, found)
        if not barred:
            pooled.append(found)
            margins.append(own.margin)
        results.append(_result(golden.card.name, None, found, own, barred or _GUARD))
        for name, piece in golden.card.slices.items():
            chosen_N = np.array([name in item.slices for item in golden.items], dtype=bool)
            note = _GUARD if piece.gates and not barred else barred or "informative slice"
            results.append(_result(golden.card.name, name, found.take(chosen_N), own, note))
    if pooled:
        together = Outcomes(
            np.concatenate([found.baseline_N for found in pooled]),
            np.concatenate([found.candidate_N for found in pooled]),
            tuple(cluster for found in pooled for cluster in found.clusters),
        )
        results.insert(0, _result(POOLED, None, together, Rule(min(margins), rule.alpha, rule.power), _PRIMARY))
    return tuple(results)


_PRIMARY, _GUARD = "primary gate", "guard: only a REJECT of it counts"


def _barred(golden: GoldenSet, found: Outcomes) -> str:
    """Return why a set may not gate, or an empty string."""
    if not golden.card.primary:
        return "not a primary set: shown only"
    score = float(found.baseline_N.mean())
    if score < golden.floor_ratio:
        return f"the baseline's {score:.3f} lies below the floor {golden.floor_ratio:.3f}: nothing to lose, shown only"
    if score > golden.ceiling_ratio:
        return f"the baseline's {score:.3f} lies above the ceiling {golden.ceiling_ratio:.3f}: shown only"
    return ""


def _result(name: str, piece: str | None, found: Outcomes, rule: Rule, note: str) -> GoldenResult:
    num_items = found.baseline_N.size
    difference_N = found.difference_N
    gained, lost = int((difference_N > 0).sum()), int((difference_N < 0).sum())
    inflation = design_effect(difference_N, found.clusters)
    decision = decide(
        Flips(num_items / inflation, gained / inflation, lost / inflation), rule.margin, alpha=rule.alpha, power=rule.power
    )
    clustered = f"; clustering shrinks the sample by {inflation:.2f}" if inflation > 1 else ""
    return GoldenResult(
        golden_set=name,
        slice=piece,
        metric="choice_accuracy",
        num_items=num_items,
        baseline_ratio=float(found.baseline_N.mean()),
        candidate_ratio=float(found.candidate_N.mean()),
        difference=decision.difference,
        interval=decision.interval,
        num_gained=gained,
        num_lost=lost,
        margin=rule.margin,
        mde=decision.mde,
        samples_needed=round(decision.samples_needed * inflation),
        gates=note == _PRIMARY or (note == _GUARD and decision.verdict is Verdict.REJECT),
        verdict=decision.verdict,
        reason=(
            f"{note}; one-sided bounds {decision.lower:+.4f} and {decision.upper:+.4f} at alpha {rule.alpha:g} against "
            f"{-rule.margin:+g}; McNemar p {mcnemar_p_value(gained, lost):.2g} (description only){clustered}"
        ),
    )
