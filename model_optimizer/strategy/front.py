"""From figures to the front: baseline, flags, scores, choice, picture, and the artifact that holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model_optimizer.artifacts.front import Candidate, ParetoFront, Prediction
from model_optimizer.artifacts.measure import Dimension, Measure
from model_optimizer.decisions import Decision
from model_optimizer.formats.registry import FULL_PRECISION
from model_optimizer.spec import Sla
from model_optimizer.store import file_refs, write_atomically
from model_optimizer.strategy.choose import Choice, Option, baseline_of, choose
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.figures import Figures, constrained, limits, measures, point, speed_ratio
from model_optimizer.strategy.pareto import dominators, violations
from model_optimizer.strategy.picture import draw
from model_optimizer.strategy.space import Space

PICTURE = "pareto.svg"
UNSTEADY_RATIO = 0.3
"""An interval wider than this share of its median is reported as a doubt."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """All that was predicted and measured, before it is judged."""

    space: Space
    predictions: Mapping[str, Prediction]
    pruned: Mapping[str, str]
    figures: tuple[Figures, ...]
    warnings: tuple[str, ...] = ()


def assemble(scanned: Scanned, sla: Sla, config: ScanConfig, workspace: Path) -> ParetoFront:
    """Judge the figures, choose, draw, and return the artifact."""
    figures = {it.label: it for it in scanned.figures}
    beaten = dominators([point(it) for it in scanned.figures])
    hard = limits(sla, config.max_kl_nats)
    broken = {label: violations(constrained(it), hard) for label, it in figures.items()}
    pinned = scanned.space.pinned if scanned.space.pinned != FULL_PRECISION else None
    options = _options(figures, beaten, broken)
    choice = choose(options, max_kl_nats=config.max_kl_nats, pinned=pinned)
    candidates = []
    for strategy in scanned.space.strategies:
        label, predicted = strategy.label, scanned.predictions[strategy.label]
        if label not in figures:
            candidates.append(Candidate(strategy=strategy, predicted=predicted, pruned_because=scanned.pruned[label]))
            continue
        ratio = speed_ratio(figures[label], figures[choice.baseline])
        candidates.append(
            Candidate(
                strategy=strategy,
                predicted=predicted,
                measures=measures(figures[label], figures[choice.baseline], sla, config.max_kl_nats),
                speed_ratio=ratio.value,
                speed_ratio_interval=ratio.interval,
                dominated=label in beaten,
                dominated_by=beaten.get(label),
                feasible=broken[label] is None,
                infeasible_because=broken[label],
                score_ratio=choice.scores[label],
            )
        )
    front = ParetoFront(
        measures=_measures(scanned),
        decisions=(*scanned.space.decisions, *_pruned(scanned), *choice.decisions),
        warnings=(*scanned.warnings, *_warnings(scanned, choice)),
        candidates=tuple(candidates),
        choice=figures[choice.chosen].strategy,
        baseline=figures[choice.baseline].strategy,
        picture=PICTURE,
    )
    write_atomically(workspace / PICTURE, draw(front, config.max_kl_nats).encode())
    rows = (workspace / "damage.jsonl", workspace / "rounds.jsonl")
    return front.model_copy(update={"files": file_refs(workspace, workspace / PICTURE, *(row for row in rows if row.exists()))})


def _options(figures: Mapping[str, Figures], beaten: Mapping[str, str], broken: Mapping[str, str | None]) -> list[Option]:
    """Return what the choice needs to know, with who is surely slower here than the baseline: the whole interval below 1."""
    options = [_option(it, beaten, broken) for it in figures.values()]
    baseline = figures[baseline_of(options).label]
    slower = {}
    for label, it in figures.items():
        ratio = speed_ratio(it, baseline)
        if it.strategy.weights.quantized and ratio.interval.upper < 1:
            bounds = f"[{ratio.interval.lower:.3g}, {ratio.interval.upper:.3g}]"
            slower[label] = f"slower here than {baseline.label}: {ratio.value:.3g} {bounds} of its throughput"
    return [replace(option, slower_because=slower.get(option.label)) for option in options]


def _option(figures: Figures, beaten: Mapping[str, str], broken: Mapping[str, str | None]) -> Option:
    return Option(
        label=figures.label,
        quantized=figures.strategy.weights.quantized,
        time_per_token_ms=figures.time_per_token_ms,
        resident_bytes=figures.damage.weight_bytes,
        kl_nats=figures.kl_nats,
        dominated_by=beaten.get(figures.label),
        infeasible_because=broken[figures.label],
    )


def _pruned(scanned: Scanned) -> tuple[Decision, ...]:
    """Say of every candidate that was not measured why."""
    return tuple(
        Decision(
            subject=label,
            choice="not measured",
            because=reason,
            numbers={
                "predicted_tok_per_s": scanned.predictions[label].decode_tok_per_s,
                "predicted_resident_bytes": scanned.predictions[label].resident_bytes,
                "predicted_kl_nats": scanned.predictions[label].kl_nats,
            },
        )
        for label, reason in scanned.pruned.items()
    )


def _measures(scanned: Scanned) -> tuple[Measure, ...]:
    """Return how many candidates there were and were measured, and how wrong the predictor was on the measured ones."""
    total, measured = len(scanned.space.strategies), len(scanned.figures)
    speed = [abs(it.predicted.decode_tok_per_s / it.throughput - 1) for it in scanned.figures]
    memory = [abs(it.predicted.resident_bytes / it.damage.weight_bytes - 1) for it in scanned.figures]
    count = (("candidates", total, "in the space"), ("measured", measured, "built and run"))
    errors = (("predictor_speed_error", speed, Dimension.SPEED), ("predictor_memory_error", memory, Dimension.RESOURCE))
    return (
        *(
            Measure(name=name, dimension=Dimension.SPEED, unit="count", value=value, higher_is_better=True, reason=reason)
            for name, value, reason in count
        ),
        Measure(
            name="pruned",
            dimension=Dimension.SPEED,
            unit="ratio",
            value=(total - measured) / total,
            higher_is_better=True,
            reason="share of the space that was not measured",
        ),
        *(
            Measure(
                name=name,
                dimension=dimension,
                unit="ratio",
                value=float(np.median(values)),
                num_samples=len(values),
                reason="median of |predicted / measured - 1| over the measured candidates",
            )
            for name, values, dimension in errors
        ),
    )


def _warnings(scanned: Scanned, choice: Choice) -> tuple[str, ...]:
    found = []
    if choice.fallback and scanned.space.pinned:
        found.append(f"the profile pins {scanned.space.pinned}; {choice.chosen} was taken although {choice.fallback}")
    elif choice.fallback:
        found.append(f"no candidate keeps every limit; {choice.chosen} was taken although {choice.fallback}")
    for it in scanned.figures:
        interval = it.throughput_interval
        if (width := (interval.upper - interval.lower) / it.throughput) > UNSTEADY_RATIO:
            found.append(
                f"{it.label}: throughput varied between rounds, interval {width:.0%} of the median; the machine was busy"
            )
    return tuple(found)
