"""The accuracy measures: golden sets against the margin, and what moved on held-out text."""

import math
from collections.abc import Sequence

import numpy as np

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.verification.held_out import TextScore
from model_optimizer.verification.judging import POOLED
from model_optimizer.verification.statistics import cluster_bootstrap


def accuracy_measures(golden: Sequence[GoldenResult], texts: Sequence[TextScore], seed: int) -> tuple[Measure, ...]:
    """Return pooled gate, sets, slices, then perplexity, KL and flips."""
    return (*golden_measures(golden), *_held_out_measures(texts, seed))


def golden_measures(golden: Sequence[GoldenResult]) -> tuple[Measure, ...]:
    """Return a measure of every result; where none is a gate, first one that says so and decides nothing."""
    own = {
        result.golden_set: result.metric for result in reversed(golden) if result.slice is None
    }  # a set comes before its guards
    measures = [_golden_measure(result, is_guard=result.metric != own[result.golden_set]) for result in golden]
    if not any(
        result.golden_set == POOLED or (result.gates and result.slice is None and result.metric == own[result.golden_set])
        for result in golden
    ):
        measures.insert(
            0,
            Measure(
                name="golden_change",
                dimension=Dimension.ACCURACY,
                unit="ratio",
                value=None,
                higher_is_better=True,
                verdict=Verdict.INCONCLUSIVE,
                origin=Origin.NOT_MEASURED,
                reason="no golden set may gate: " + "; ".join(f"{result.golden_set}: {result.reason}" for result in golden[:3]),
            ),
        )
    return tuple(measures)


def _golden_measure(result: GoldenResult, *, is_guard: bool) -> Measure:
    """Return the change of the score, better is positive, with the scores in the reason; a guard is named by its metric."""
    parts = [] if result.golden_set == POOLED else [result.golden_set, *([result.slice] if result.slice else [])]
    parts += [result.metric] if is_guard else []
    name = "_".join(["golden", *(part.lower().replace("-", "_") for part in parts), "change"])
    return Measure(
        name=name,
        dimension=Dimension.ACCURACY,
        unit="ratio",
        value=result.difference,
        baseline=0.0,
        interval=result.interval,
        limit=-result.margin,
        higher_is_better=True,
        num_samples=result.num_items,
        mde=result.mde,
        samples_needed=result.samples_needed,
        verdict=result.verdict if result.gates else None,
        reason=(
            f"score {result.candidate_ratio:.4f} against {result.baseline_ratio:.4f}; "
            f"{result.num_gained} items gained, {result.num_lost} lost; {result.reason}"
        ),
    )


def _held_out_measures(texts: Sequence[TextScore], seed: int) -> tuple[Measure, ...]:
    """Return perplexity with its ratio, mean KL and the share of flips; intervals resample whole texts."""
    counts = np.array([text.num_tokens for text in texts], dtype=np.float64)
    total = int(counts.sum())
    baseline = np.array([text.baseline_log_prob for text in texts])
    candidate = np.array([text.candidate_log_prob for text in texts])
    note = f"{len(texts)} held-out texts; shown, does not gate"

    def mean(name: str, unit: str, sums: Sequence[float]) -> Measure:
        values = np.array(sums, dtype=np.float64)
        return Measure(
            name=name,
            dimension=Dimension.ACCURACY,
            unit=unit,
            value=float(values.sum()) / total,
            baseline=0.0,
            interval=cluster_bootstrap(values, counts, seed=seed),
            num_samples=total,
            reason=note,
        )

    log_ratio = cluster_bootstrap(baseline - candidate, counts, seed=seed)
    perplexity = Measure(
        name="held_out_perplexity",
        dimension=Dimension.ACCURACY,
        unit="perplexity",
        value=math.exp(-candidate.sum() / total),
        baseline=math.exp(-baseline.sum() / total),
        num_samples=total,
        reason=note,
    )
    ratio = Measure(
        name="held_out_perplexity_ratio",
        dimension=Dimension.ACCURACY,
        unit="ratio",
        value=math.exp((baseline - candidate).sum() / total),
        baseline=1.0,
        interval=Interval(lower=math.exp(log_ratio.lower), upper=math.exp(log_ratio.upper)),
        num_samples=total,
        reason=note,
    )
    kl = mean("held_out_kl", "nats", [text.kl_nats for text in texts])
    flips = mean("held_out_top1_flips", "ratio", [float(text.num_flips) for text in texts])
    return perplexity, ratio, kl, flips
