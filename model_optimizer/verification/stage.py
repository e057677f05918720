"""Stage 6, verify: is the chosen engine good enough to release? Measured on the compiled engines themselves.

Accuracy comes first: a candidate that is rejected for it is neither timed nor soaked, so that a repair starts at once.
Golden sets, held-out text and the soak journal their progress in the workspace, so that a killed run goes on; the interleaved
latency rounds are short and are measured anew, because rounds of two processes make no pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import field_serializer

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.verification import GoldenResult, LatencyResult, SoakResult, Verification
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.metrics.embedding_similarity import LocalEmbedder
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare, texts
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.spec import Cost, Sla, Traffic
from model_optimizer.store import file_refs, stage_key
from model_optimizer.verification import raw
from model_optimizer.verification.accuracy import accuracy_measures
from model_optimizer.verification.config import VerifyConfig
from model_optimizer.verification.gates import combine, dimension_verdicts
from model_optimizer.verification.golden import GoldenSet, load_golden_set
from model_optimizer.verification.golden_answers import ItemScore, Shard, Tokenizer
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.golden_statistics import Rule
from model_optimizer.verification.held_out import Engines, TextScore, score_held_out
from model_optimizer.verification.judging import judge_sets
from model_optimizer.verification.latency import (
    BASELINE,
    CANDIDATE,
    LatencyPlan,
    LatencyRun,
    plan_latency,
    run_latency,
    summarise,
)
from model_optimizer.verification.leakage import refuse_leakage
from model_optimizer.verification.resource import cost_measure, engine_measure, memory_measures, soak_use_measures
from model_optimizer.verification.robustness import robustness_measures, soak_measure
from model_optimizer.verification.soak import Stress, run_soak
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.speed import speed_measures

SAMPLES = "samples.parquet"
"""Raw samples, in the entry."""
UNLOADED = (
    ("throughput", Dimension.SPEED, "tok_per_s"),
    ("cost", Dimension.RESOURCE, "usd_per_1k_requests"),
    ("soak", Dimension.ROBUSTNESS, "s"),
)
"""What is said not to be measured of a candidate that is rejected for accuracy."""
NO_SOAK = SoakResult(
    requested_s=0,
    ran_s=0,
    num_segments=0,
    num_requests=0,
    num_failed=0,
    num_non_finite=0,
    num_wrong_canaries=0,
    memory_slope_bytes_per_hour=0,
    memory_slope_interval=Interval(lower=0, upper=0),
    p50_first_ms=0,
    p50_last_ms=0,
    num_sessions=0,
)


class VerifyInputs(StageInputs):
    """What verify reads. Golden sets count by content; the names under which a profile finds them do not."""

    engine: Stored[CompiledModel]
    baseline: Stored[CompiledModel]
    memory: Stored[MemoryPlan]
    model: Tree
    """A Hugging Face directory; its tokenizer is used."""
    golden: tuple[Tree, ...]
    """Folders of golden sets."""
    calibration: CalibrationSource
    sla: Sla
    traffic: Traffic
    cost: Cost
    config: VerifyConfig

    @field_serializer("config")
    def _without_names(self, config: VerifyConfig) -> dict[str, object]:
        return config.model_dump(mode="json", exclude={"golden_sets"})


@dataclass(frozen=True, slots=True)
class _Material:
    """What is measured on: sets, held-out text, tokenizer, the requests' text."""

    sets: tuple[GoldenSet, ...]
    held_out: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer
    warnings: tuple[str, ...]

    @property
    def text_tokens(self) -> tuple[int, ...]:
        return tuple(token for text in self.held_out for token in text)


@dataclass(frozen=True, slots=True)
class _Accuracy:
    """Scores of both engines and what follows from them."""

    baseline: dict[tuple[str, str], ItemScore]
    candidate: dict[tuple[str, str], ItemScore]
    golden: tuple[GoldenResult, ...]
    texts: tuple[TextScore, ...]
    measures: tuple[Measure, ...]

    @property
    def rejected(self) -> bool:
        return Verdict.REJECT in [measure.verdict for measure in self.measures]

    @property
    def num_non_finite(self) -> int:
        """Count the candidate's scores that are NaN or infinite."""
        return sum(not np.isfinite(value) for score in self.candidate.values() for value in score.log_probs)


@dataclass(frozen=True, slots=True)
class _Load:
    """What the latency rounds and the soak saw."""

    plan: LatencyPlan
    run: LatencyRun
    latency: tuple[LatencyResult, LatencyResult]
    soak: SoakResult
    segments: tuple[Segment, ...]


def verify_quality(inputs: VerifyInputs, workspace: Path, *, progress: Progress) -> Verification:
    """Measure the chosen engine against the baseline in all four dimensions and judge it.

    A failed gate does not raise: the verdict is in the artifact.

    Raises:
        ConfigError: a golden set is unusable or was calibrated on, or there is no held-out text.
        UnsupportedError: a runtime cannot open its engine here.
    """
    material = _load_material(inputs)
    key = stage_key(inputs)
    with _opened(inputs) as engines:
        accuracy = _measure_accuracy(inputs, material, engines, _Journals(workspace, key), progress)
        journal = Journal(workspace / "soak.jsonl", key, Segment)
        load = None if accuracy.rejected else _measure_load(inputs, material, engines, journal, progress)
        notes = (*engines.candidate.facts.notes, *engines.baseline.facts.notes)
    measures = (*accuracy.measures, *_engine_measures(inputs), *_load_measures(inputs, accuracy, load))
    raw.write_rows(workspace / SAMPLES, _all_rows(accuracy, load))
    dimensions = dimension_verdicts(measures)
    return Verification(
        files=file_refs(workspace, workspace / SAMPLES),
        measures=measures,
        decisions=_decisions(inputs, accuracy, load),
        warnings=tuple(dict.fromkeys((*material.warnings, *notes))),
        golden=accuracy.golden,
        latency=load.latency if load else (),
        soak=load.soak if load else NO_SOAK,
        dimensions=dimensions,
        verdict=combine(tuple(dimensions.values())),
        samples=SAMPLES,
    )


def _load_material(inputs: VerifyInputs) -> _Material:
    """Read golden sets and held-out text, and refuse a set that was calibrated on."""
    from transformers import AutoTokenizer

    sets = tuple(load_golden_set(tree.path) for tree in inputs.golden)
    names = [golden.card.name for golden in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two golden sets are called {twice[0]!r}; their cards must have different names")
    refuse_leakage(texts(inputs.calibration), sets)
    prepared = prepare(inputs.calibration, inputs.model.path)
    held_out, warnings = prepared.held_out, prepared.warnings
    if not held_out:
        held_out = prepared.samples
        warnings = (*warnings, "perplexity and KL are measured on the calibration text itself")
    tokenizer = cast("Tokenizer", AutoTokenizer.from_pretrained(inputs.model.path, local_files_only=True))
    return _Material(sets, held_out, tokenizer, warnings)


@contextmanager
def _opened(inputs: VerifyInputs) -> Iterator[Engines]:
    """Open both engines with the planned KV cache; one of them where the choice is the baseline."""
    kv = inputs.memory.artifact.kv
    candidate = _open(inputs.engine, kv)
    try:
        if inputs.engine.key == inputs.baseline.key:
            yield Engines(candidate, candidate)
            return
        baseline = _open(inputs.baseline, kv)
        try:
            yield Engines(candidate, baseline)
        finally:
            baseline.close()
    finally:
        candidate.close()


def _open(compiled: Stored[CompiledModel], kv: KvPlan) -> LogitsRuntime:
    engine = compiled.artifact.engine
    return RUNTIMES.get(engine.runtime).open(engine, compiled.directory / engine.directory, kv)


@dataclass(frozen=True, slots=True)
class _Journals:
    """Where the accuracy parts keep their progress."""

    workspace: Path
    key: str

    def golden(self, engine: str) -> Journal[Shard]:
        return Journal(self.workspace / f"golden-{engine}.jsonl", self.key, Shard)

    def held_out(self) -> Journal[TextScore]:
        return Journal(self.workspace / "held-out.jsonl", self.key, TextScore)


def _measure_accuracy(
    inputs: VerifyInputs, material: _Material, engines: Engines, journals: _Journals, progress: Progress
) -> _Accuracy:
    """Score all golden items and the held-out text with both engines."""
    candidate = score_items(engines.candidate, material.sets, material.tokenizer, journals.golden(CANDIDATE), progress)
    baseline = candidate
    if not engines.same:
        baseline = score_items(engines.baseline, material.sets, material.tokenizer, journals.golden(BASELINE), progress)
    config = inputs.config
    rule = Rule(inputs.sla.accuracy_loss_ratio, config.alpha, config.power)
    golden = judge_sets(material.sets, baseline, candidate, rule, LocalEmbedder(inputs.model.path))
    scored = score_held_out(engines, material.held_out, journals.held_out(), progress)
    return _Accuracy(baseline, candidate, golden, scored, accuracy_measures(golden, scored, config.seed))


def _measure_load(
    inputs: VerifyInputs, material: _Material, engines: Engines, journal: Journal[Segment], progress: Progress
) -> _Load:
    """Time both engines in turn, then soak the candidate."""
    plan = plan_latency(inputs.config, inputs.sla, inputs.traffic, material.text_tokens)
    run = run_latency(engines, plan, progress)
    longest = engines.candidate.facts.max_model_len
    stress = Stress(inputs.traffic, material.text_tokens, inputs.sla.concurrency, longest, inputs.config.seed)
    soak = run_soak(engines.candidate, stress, inputs.config.soak, journal, progress)
    latency = (
        summarise(run, CANDIDATE, inputs.engine.artifact.strategy.label),
        summarise(run, BASELINE, inputs.baseline.artifact.strategy.label),
    )
    return _Load(plan, run, latency, soak, tuple(journal.records))


def _engine_measures(inputs: VerifyInputs) -> tuple[Measure, ...]:
    return (
        engine_measure(inputs.engine.artifact, inputs.baseline.artifact),
        *memory_measures(inputs.memory.artifact, inputs.sla),
    )


def _load_measures(inputs: VerifyInputs, accuracy: _Accuracy, load: _Load | None) -> tuple[Measure, ...]:
    """Return speed, cost and robustness; where nothing was run, that it was not measured and why."""
    config, sla = inputs.config, inputs.sla
    if load is None:
        return tuple(
            Measure(
                name=name,
                dimension=dimension,
                unit=unit,
                value=None,
                origin=Origin.NOT_MEASURED,
                reason="the candidate was rejected for accuracy before it was timed or soaked",
            )
            for name, dimension, unit in UNLOADED
        )
    peak_bytes = inputs.memory.artifact.measured_peak_bytes
    return (
        *speed_measures(load.run, load.latency, sla, config.alpha),
        cost_measure(load.run, sla, inputs.cost, config.alpha),
        *robustness_measures(load.soak, accuracy.num_non_finite, load.latency[0].num_failed, peak_bytes),
        soak_measure(load.soak, config.required_soak),
        *soak_use_measures(load.soak),
    )


def _all_rows(accuracy: _Accuracy, load: _Load | None) -> Iterator[raw.Row]:
    yield from raw.golden_rows(CANDIDATE, accuracy.candidate)
    yield from raw.golden_rows(BASELINE, accuracy.baseline)
    yield from raw.held_out_rows(accuracy.texts)
    if load is not None:
        yield from raw.latency_rows(load.run)
        yield from raw.soak_rows(load.segments)


def _decisions(inputs: VerifyInputs, accuracy: _Accuracy, load: _Load | None) -> tuple[Decision, ...]:
    """Return how the primary gate and the sample sizes came about."""
    primary = accuracy.golden[0]
    gate = Decision(
        subject="primary accuracy gate",
        choice=f"{primary.golden_set}, margin {primary.margin:g}" if primary.gates else "none",
        because="the sets marked primary are pooled before anything is measured, so that one margin is tested once",
        numbers={"num_items": primary.num_items, "alpha": inputs.config.alpha, "power": inputs.config.power},
    )
    if load is None:
        rejected = Decision(
            subject="latency and soak",
            choice="not run",
            because="accuracy was rejected; a repair or another candidate comes first",
        )
        return gate, rejected
    sample = Decision(
        subject="latency sample",
        choice=f"{load.plan.num_requests} requests per engine in {len(load.plan.rounds)} interleaved rounds",
        because="two requests per stream and round, and what a P95 limit needs for a finite bound",
        numbers={"asked_num_requests": inputs.config.latency_requests, "concurrency": load.plan.concurrency},
    )
    return gate, sample
