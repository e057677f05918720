"""Hand-made attempts: what a repair and the next trial decide from."""

from pathlib import Path

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Produced, StageArtifact, Stored
from model_optimizer.artifacts.measure import Dimension, Interval, Verdict
from model_optimizer.artifacts.quantized import Coverage, LayerPlan, QuantizedModel
from model_optimizer.artifacts.repair import LayerRaise
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.verification import GoldenResult, Verification
from model_optimizer.verification.stage import NO_SOAK


def golden(difference: float, margin: float, verdict: Verdict) -> GoldenResult:
    return GoldenResult(
        golden_set="all-primary-sets",
        slice=None,
        metric="choice_accuracy",
        num_items=100,
        baseline_ratio=0.8,
        candidate_ratio=0.8 + difference,
        difference=difference,
        interval=Interval(lower=difference - 0.01, upper=difference + 0.01),
        num_gained=0,
        num_lost=round(-100 * difference),
        margin=margin,
        mde=0.01,
        samples_needed=0,
        gates=True,
        verdict=verdict,
        reason="",
    )


def verification(accuracy: Verdict, *, difference: float = -0.2, margin: float = 0.02) -> Verification:
    dimensions = dict.fromkeys(Dimension, Verdict.ACCEPT) | {Dimension.ACCURACY: accuracy}
    return Verification(
        golden=(golden(difference, margin, accuracy),),
        latency=(),
        soak=NO_SOAK,
        dimensions=dimensions,
        verdict=accuracy,
        samples="samples.parquet",
    )


def quantized(strategy: Strategy, plan: dict[str, tuple[str, int]], *, stuck: bool = False) -> QuantizedModel:
    """Return a model whose plan maps layer -> (format, number of weights)."""
    layers = tuple(
        LayerPlan(
            layer=name,
            format=format_name,
            num_weights=num_weights,
            num_bytes=num_weights,
            predicted_kl_nats=0.1,
            output_cosine=1.0,
            suspect=False,
            reason="recipe",
        )
        for name, (format_name, num_weights) in plan.items()
    )
    raise_one = LayerRaise(layer=next(iter(plan)), before="int2-g64", after="int4-g64", kl_before_nats=1.0, kl_after_nats=0.1)
    raised = (raise_one,) if strategy.weights.repairs and not stuck else ()
    coverage = Coverage(quantized_weights_ratio=1.0, true_bits_per_weight=2.25, checkpoint_bytes=100)
    return QuantizedModel(
        recipe=strategy.weights,
        checkpoint="checkpoint",
        plan=layers,
        coverage=coverage,
        predicted_kl_nats=0.1 * len(layers),
        raised=raised,
        calibration=None,
    )


def stored(artifact: StageArtifact, key: str) -> Stored:
    produced = Produced(started_at="2026-01-01T00:00:00+00:00", wall_s=0, peak_rss_bytes=0)
    return Stored[type(artifact)](
        kind="k", key=key, artifact=artifact, directory=Path("nowhere"), produced=produced, cached=False
    )


def attempt(
    strategy: Strategy,
    found: Verification,
    *,
    round_number: int = 0,
    plan: dict[str, tuple[str, int]] | None = None,
    stuck: bool = False,
) -> Attempt:
    model = quantized(strategy, plan or {"a": ("int4-g64", 64)}, stuck=stuck)
    return Attempt(
        round=round_number,
        strategy=strategy,
        cause="test",
        quantized=stored(model, f"q{round_number}"),
        verification=stored(found, f"v{round_number}"),
    )
