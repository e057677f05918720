"""The headline: how much smaller and faster the chosen engine is, or why it is not."""

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.report import Headline, StageResults
from model_optimizer.reporting.text import label, number, quantity, signed, size, times

BYTES_PER_PARAMETER = 2
"""What the size is compared with: 16-bit weights, the usual form of a released checkpoint."""


def headline_figures(results: StageResults, source_bytes: int) -> Headline:
    """Return the figures of the headline; speed against the fastest unquantized measured candidate."""
    speed, interval, _ = speed_ratio(results)
    golden = [row for row in results.verification.golden if row.gates and row.slice is None]
    closest = min(golden, key=lambda row: row.interval.lower + row.margin, default=None)
    own = next((row for row in results.verification.latency if row.strategy == results.compiled.strategy.label), None)
    return Headline(
        size_ratio=results.compiled.engine.num_bytes / (BYTES_PER_PARAMETER * results.target.model.num_parameters),
        engine_bytes=results.compiled.engine.num_bytes,
        source_bytes=source_bytes,
        speed_ratio=speed,
        speed_ratio_lower=interval.lower if interval else None,
        speed_ratio_upper=interval.upper if interval else None,
        decode_tok_per_s=own.throughput_tok_per_s if own else None,
        accuracy_difference=closest.difference if closest else None,
        accuracy_lower=closest.interval.lower if closest else None,
        accuracy_upper=closest.interval.upper if closest else None,
        accuracy_set=closest.golden_set if closest else None,
        peak_bytes=results.memory.measured_peak_bytes,
    )


def speed_ratio(results: StageResults) -> tuple[float | None, Interval | None, str]:
    """Return the speed of the released engine over the baseline, its interval, and how it was timed.

    The scan's interleaved pairs where the scan ran this strategy; else (layers were raised later) the rounds of verification.
    """
    released = results.compiled.strategy
    scanned = next((row for row in results.front.candidates if row.strategy == released), None)
    if scanned is not None and scanned.speed_ratio is not None:
        return scanned.speed_ratio, scanned.speed_ratio_interval, "interleaved pairs of the scan"
    served = next((measure for measure in results.verification.measures if measure.name == "speed_ratio"), None)
    if served is not None and served.value is not None:
        return served.value, served.interval, "interleaved rounds of serving in verification, for the scan did not run it"
    return None, None, "neither paired in the scan nor served beside it"


def headline_sentence(results: StageResults, figures: Headline) -> str:
    """Return two or three sentences: the verdict where it is not ACCEPT, then speed and size with reasons."""
    name = results.compiled.strategy.label
    parts = [_verdict_words(results), f"{name} {_speed(results, figures)} and {_size(results, figures)}."]
    return " ".join(part for part in parts if part)


def _verdict_words(results: StageResults) -> str:
    verdict = results.verdict()
    if verdict is Verdict.ACCEPT:
        return ""
    reasons = [_gate_words(measure) for measure in results.measures() if measure.verdict is verdict]
    dimensions = ", ".join(dimension.value for dimension, answer in results.dimensions().items() if answer is verdict)
    words = "; ".join(reasons) or f"the {dimensions} gate"
    return f"{'Rejected' if verdict is Verdict.REJECT else 'Not decided'}: {words}."


def _gate_words(measure: Measure) -> str:
    bound = "" if measure.limit is None else f", limit {quantity(measure.limit, measure.unit)}"
    more = f", {measure.samples_needed:,} more samples needed" if measure.samples_needed else ""
    return f"{label(measure.name)} {quantity(measure.value, measure.unit)}{bound}{more}"


def _speed(results: StageResults, figures: Headline) -> str:
    baseline = results.front.baseline.label
    if results.compiled.strategy == results.front.baseline:
        return f"is itself the fastest unquantized candidate, so no speed is gained{_because(results)},"
    if figures.speed_ratio is None:
        return f"was not timed against {baseline}"
    ratio = f"{times(figures.speed_ratio)}×"
    if figures.speed_ratio_lower is None or figures.speed_ratio_upper is None:
        return f"generates at {ratio} the speed of {baseline} (no interval)"
    spread = f"({times(figures.speed_ratio_lower)} to {times(figures.speed_ratio_upper)})"
    if figures.speed_ratio_lower > 1:
        return f"generates {ratio} as many tokens per second {spread} as {baseline}"
    if figures.speed_ratio_upper < 1:
        return f"generates more slowly than {baseline}, {ratio} {spread}{_because(results)},"
    return f"is not measurably faster than {baseline}, {ratio} {spread}{_because(results)},"


def _because(results: StageResults) -> str:
    """Return why it was chosen all the same."""
    choice = results.compiled.strategy.label
    reason = next((decision.because for decision in results.front.decisions if decision.choice == choice), None)
    return f" (chosen because: {reason})" if reason else ""


def _size(results: StageResults, figures: Headline) -> str:
    reference = size(BYTES_PER_PARAMETER * results.target.model.num_parameters)
    ratio = f"{times(figures.size_ratio)}×"
    compared = f"{size(figures.engine_bytes)} against {reference}; the source file has {size(figures.source_bytes)}"
    if figures.size_ratio < 1:
        return f"takes {ratio} the size of 2 bytes per parameter ({compared})"
    coverage = results.quantized.coverage
    if not results.quantized.recipe.quantized:
        why = "it is not quantized and keeps 4 bytes per parameter"
    elif coverage.true_bits_per_weight >= 8 * BYTES_PER_PARAMETER:
        why = f"its quantizable layers take {number(coverage.true_bits_per_weight)} bits per weight"
    else:
        why = "what is not quantized, embeddings included, stays in float32"
    return f"is not smaller than 2 bytes per parameter: {ratio} ({compared}), because {why}"


def accuracy_words(figures: Headline) -> tuple[str, str]:
    """Return the accuracy difference and where it comes from: interval and golden set."""
    if figures.accuracy_difference is None or figures.accuracy_lower is None or figures.accuracy_upper is None:
        return "–", "no golden set gates"
    interval = f"{signed(figures.accuracy_lower)} to {signed(figures.accuracy_upper)}"
    return signed(
        figures.accuracy_difference
    ), f"{interval} of score on {figures.accuracy_set}, the gating set nearest to its margin"


def headline_measures(results: StageResults, figures: Headline) -> tuple[Measure, ...]:
    """Return the two ratios of the headline as measures that are shown and do not gate."""
    against = results.front.baseline.label
    _, interval, timed = speed_ratio(results)
    speed = Measure(
        name="generation_speed_ratio",
        dimension=Dimension.SPEED,
        unit="ratio",
        value=figures.speed_ratio,
        baseline=None if figures.speed_ratio is None else 1.0,
        interval=interval,
        higher_is_better=True,
        origin=Origin.NOT_MEASURED if figures.speed_ratio is None else Origin.MEASURED,
        reason=f"{timed}, against {against}",
    )
    engine_size = Measure(
        name="engine_size_ratio",
        dimension=Dimension.RESOURCE,
        unit="ratio",
        value=figures.size_ratio,
        baseline=1.0,
        reason=f"engine of {size(figures.engine_bytes)} over 2 bytes per parameter; source file {size(figures.source_bytes)}",
    )
    return speed, engine_size
