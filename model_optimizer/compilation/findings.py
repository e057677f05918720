"""What the compile stage reports of the engine that it made: measures and decisions."""

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.compilation.levels import Attempt, Reached
from model_optimizer.decisions import Decision


def measures_of(attempt: Attempt, *, quantized: bool) -> tuple[Measure, ...]:
    """Return `engine_bytes`, `parity_kl`, `parity_top1_agreement`, `build`,
    `smoke_requests` and, of quantized weights, `integer_weights`."""
    return (
        Measure(name="engine_bytes", dimension=Dimension.RESOURCE, unit="bytes", value=attempt.built.engine.num_bytes),
        *_parity(attempt),
        Measure(name="build", dimension=Dimension.SPEED, unit="s", value=attempt.build_s),
        Measure(
            name="smoke_requests",
            dimension=Dimension.ROBUSTNESS,
            unit="count",
            value=attempt.trial.num_requests,
            higher_is_better=True,
            reason=f"generated without fault: one token, ends of pages, several rows, {attempt.trial.longest} tokens at most",
        ),
        *((_integers(attempt),) if quantized else ()),
    )


def _parity(attempt: Attempt) -> tuple[Measure, ...]:
    parity, tokens = attempt.parity, attempt.parity.num_tokens
    return (
        Measure(
            name="parity_kl",
            dimension=Dimension.ACCURACY,
            unit="nats",
            value=parity.mean_kl_nats,
            limit=parity.tolerance_kl_nats,
            num_samples=tokens,
            reason="engine against its own checkpoint, held-out text",
        ),
        Measure(
            name="parity_top1_agreement",
            dimension=Dimension.ACCURACY,
            unit="ratio",
            value=parity.top1_agreement_ratio,
            higher_is_better=True,
            num_samples=tokens,
        ),
    )


def _integers(attempt: Attempt) -> Measure:
    name, unit = "integer_weights", "ratio"
    if attempt.coverage is None:
        return Measure(
            name=name,
            dimension=Dimension.RESOURCE,
            unit=unit,
            value=None,
            higher_is_better=True,
            origin=Origin.NOT_MEASURED,
            reason=f"{attempt.built.engine.runtime} does not say what it computes from codes",
        )
    return Measure(
        name=name,
        dimension=Dimension.RESOURCE,
        unit=unit,
        value=attempt.coverage.share,
        limit=1.0,
        higher_is_better=True,
        num_samples=attempt.coverage.num_layers,
        reason="quantized weights whose layer was seen to compute from codes in a trial run",
    )


def decisions_of(label: str, reached: Reached) -> tuple[Decision, ...]:
    """Return which variant was taken and, where it is another than asked for, which level and why."""
    attempt = reached.attempt
    variant = Decision(
        subject=f"engine of {label}",
        choice=attempt.variant.name,
        because=attempt.variant.because or "the runtime runs these weights as they are",
        numbers={
            "parity_kl_nats": attempt.parity.mean_kl_nats,
            "tolerance_kl_nats": attempt.parity.tolerance_kl_nats,
            "engine_bytes": float(attempt.built.engine.num_bytes),
        },
    )
    if not reached.because:
        return (variant,)
    numbers = {"asked_level": float(reached.asked_level), "reached_level": float(attempt.level)}
    return variant, Decision(
        subject=f"compile level of {label}", choice=f"level {attempt.level}", because=reached.because, numbers=numbers
    )
