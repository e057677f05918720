"""Verdicts: what every dimension and the whole answer, from the measures alone."""

from collections.abc import Sequence

from model_optimizer.artifacts.measure import Dimension, Measure, Verdict


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """Return REJECT if any rejects, else INCONCLUSIVE if any is or if there is none at all, else ACCEPT."""
    if Verdict.REJECT in verdicts:
        return Verdict.REJECT
    return Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts or not verdicts else Verdict.ACCEPT


def dimension_verdicts(measures: Sequence[Measure]) -> dict[Dimension, Verdict]:
    """Return the verdict of every dimension over its gating measures; a dimension without any is INCONCLUSIVE."""
    return {
        dimension: combine([measure.verdict for measure in measures if measure.dimension is dimension and measure.verdict])
        for dimension in Dimension
    }


def exact(passed: bool) -> Verdict:
    """Return the verdict of a count or size that carries no sampling error."""
    return Verdict.ACCEPT if passed else Verdict.REJECT
