"""Stage 6, verify: is the chosen engine good enough to release? Measured on the compiled engines themselves.

Golden sets, held-out text and the soak journal their progress in the workspace, so that a killed run goes on; the interleaved
latency rounds are short and are measured anew, because rounds of two processes make no pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import field_serializer

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Measure
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.verification import GoldenResult, Verification
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare, texts
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.spec import Cost, Sla, Traffic
from model_optimizer.store import file_refs, stage_key
from model_optimizer.verification import raw
from model_optimizer.verification.accuracy import accuracy_measures
from model_optimizer.verification.config import VerifyConfig
from model_optimizer.verification.gates import combine, dimension_verdicts
from model_optimizer.verification.golden import GoldenSet, ItemScore, Shard, Tokenizer, load_golden_set, score_items
from model_optimizer.verification.held_out import Engines, TextScore, score_held_out
from model_optimizer.verification.judging import Rule, judge_sets
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
from model_optimizer.verification.resource import cost_measure, engine_measure, memory_measures
from model_optimizer.verification.robustness import robustness_measures, soak_measure
from model_optimizer.verification.soak import Segment, Stress, run_soak
from model_optimizer.verification.speed import speed_measures

SAMPLES = "samples.parquet"
"""Raw samples, in the entry."""


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

    @property
    def num_non_finite(self) -> int:
        """Count the candidate's scores that are NaN or infinite."""
        return sum(not np.isfinite(value) for score in self.candidate.values() for value in score.log_probs)


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
        plan = plan_latency(inputs.config, inputs.sla, inputs.traffic, material.text_tokens)
        run = run_latency(engines, plan, progress)
        stress = Stress(
            inputs.traffic,
            material.text_tokens,
            inputs.sla.concurrency,
            engines.candidate.facts.max_model_len,
            inputs.config.seed,
        )
        journal = Journal(workspace / "soak.jsonl", key, Segment)
        soak = run_soak(engines.candidate, stress, inputs.config.soak, journal, progress)
        notes = (*engines.candidate.facts.notes, *engines.baseline.facts.notes)
    strategies = {CANDIDATE: inputs.engine.artifact.strategy.label, BASELINE: inputs.baseline.artifact.strategy.label}
    latency = (summarise(run, CANDIDATE, strategies[CANDIDATE]), summarise(run, BASELINE, strategies[BASELINE]))
    measures = (
        *accuracy_measures(accuracy.golden, accuracy.texts, inputs.config.seed),
        *speed_measures(run, latency, inputs.sla, inputs.config.alpha),
        *_resource_measures(inputs, run),
        *robustness_measures(soak, accuracy.num_non_finite, latency[0].num_failed, inputs.memory.artifact.measured_peak_bytes),
        soak_measure(soak, inputs.config.required_soak),
    )
    raw.write_rows(workspace / SAMPLES, _all_rows(accuracy, run, journal))
    dimensions = dimension_verdicts(measures)
    verdict = combine(tuple(dimensions.values()))
    return Verification(
        files=file_refs(workspace, workspace / SAMPLES),
        measures=measures,
        decisions=_decisions(inputs, material, accuracy, plan),
        warnings=tuple(dict.fromkeys((*material.warnings, *notes))),
        golden=accuracy.golden,
        latency=latency,
        soak=soak,
        dimensions=dimensions,
        verdict=verdict,
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
    return _Material(sets, held_out, AutoTokenizer.from_pretrained(inputs.model.path, local_files_only=True), warnings)


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
    golden = judge_sets(material.sets, baseline, candidate, rule)
    scored = score_held_out(engines, material.held_out, journals.held_out(), progress)
    return _Accuracy(baseline, candidate, golden, scored)


def _resource_measures(inputs: VerifyInputs, run: LatencyRun) -> tuple[Measure, ...]:
    return (
        engine_measure(inputs.engine.artifact, inputs.baseline.artifact),
        *memory_measures(inputs.memory.artifact, inputs.sla),
        cost_measure(run, inputs.sla, inputs.cost, inputs.config.alpha),
    )


def _all_rows(accuracy: _Accuracy, run: LatencyRun, journal: Journal[Segment]) -> Iterator[raw.Row]:
    yield from raw.golden_rows(CANDIDATE, accuracy.candidate)
    yield from raw.golden_rows(BASELINE, accuracy.baseline)
    yield from raw.held_out_rows(accuracy.texts)
    yield from raw.latency_rows(run)
    yield from raw.soak_rows(journal.records)


def _decisions(inputs: VerifyInputs, material: _Material, accuracy: _Accuracy, plan: LatencyPlan) -> tuple[Decision, ...]:
    """Return how the sample sizes and the primary gate came about."""
    primary = accuracy.golden[0]
    return (
        Decision(
            subject="primary accuracy gate",
            choice=f"{primary.golden_set}, margin {primary.margin:g}" if primary.gates else "none",
            because="the sets marked primary are pooled before anything is measured, so that one margin is tested once",
            numbers={"num_items": primary.num_items, "alpha": inputs.config.alpha, "power": inputs.config.power},
        ),
        Decision(
            subject="latency sample",
            choice=f"{plan.num_requests} requests per engine in {len(plan.rounds)} interleaved rounds",
            because="two requests per stream and round, and what a P95 limit needs for a finite bound",
            numbers={"asked_num_requests": inputs.config.latency_requests, "concurrency": plan.concurrency},
        ),
    )
