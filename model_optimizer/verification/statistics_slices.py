"""Many slices, one error rate: which slices are harmed and which are proven unharmed, family-wise at alpha.

A gate that accepts only when EVERY slice is proven needs no correction (each false hypothesis must be rejected, so the
error of the whole is at most alpha). A statement about a slice picked out of many does: that is what Holm is for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import Flips, minimum_detectable_effect, tango_interval
from model_optimizer.verification.statistics_equivalence import score_p_value
from model_optimizer.verification.statistics_plan import Plan


@dataclass(frozen=True, slots=True)
class SliceResult:
    """One slice; p-values are adjusted over all slices, the interval is not."""

    verdict: Verdict
    """REJECT: harmed. ACCEPT: proven unharmed. Both hold for all slices together at alpha each."""
    difference: float
    interval: Interval
    p_harmed: float
    """Of H0: the loss is at most the margin."""
    p_unharmed: float
    """Of H0: the loss is at least the margin."""
    mde: float


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return p-values adjusted step-down: the i-th smallest of m times (m - i + 1), made rising, at most 1.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 1979.

    Raises:
        ConfigError: a value outside [0, 1].
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.size and not ((values >= 0) & (values <= 1)).all():
        raise ConfigError(f"p-values lie in [0, 1]; seen: {list(p_values)}")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1))
    adjusted = np.empty(values.size)
    adjusted[order] = np.minimum(stepped, 1.0)
    return tuple(adjusted.tolist())


def judge_slices(slices: Mapping[str, Flips], plan: Plan) -> dict[str, SliceResult]:
    """Judge every slice of paired binary items against the margin, Holm over the slices for either statement.

    Raises:
        ConfigError: a slice without items.
    """
    if empty := [name for name, flips in slices.items() if flips.num_items <= 0]:
        raise ConfigError(f"a slice needs items; without any: {', '.join(empty)}")
    harmed = holm([score_p_value(flips, -plan.margin, worse=True) for flips in slices.values()])
    unharmed = holm([score_p_value(flips, -plan.margin) for flips in slices.values()])
    return {
        name: SliceResult(
            verdict=_verdict(p_harmed, p_unharmed, plan.alpha),
            difference=flips.difference,
            interval=tango_interval(flips),
            p_harmed=p_harmed,
            p_unharmed=p_unharmed,
            mde=minimum_detectable_effect(flips.discordance, flips.num_items, alpha=plan.alpha, power=plan.power),
        )
        for (name, flips), p_harmed, p_unharmed in zip(slices.items(), harmed, unharmed, strict=True)
    }


def _verdict(p_harmed: float, p_unharmed: float, alpha: float) -> Verdict:
    if p_harmed < alpha:
        return Verdict.REJECT
    return Verdict.ACCEPT if p_unharmed < alpha else Verdict.INCONCLUSIVE
