"""What a run would take: time, memory, disk and money, from the last run of the profile or from a measured one, scaled.

An estimate says what it rests on and how far off it may be. It reads headers and reports; it runs and writes nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.prepare import Request
from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.errors import UnsupportedError
from model_optimizer.models.size import ModelSize, find_size
from model_optimizer.profile import DeploymentProfile
from model_optimizer.store import ARTIFACT, Store

if TYPE_CHECKING:
    from model_optimizer.quantization.layers import LinearLayer

FULL_BYTES = 4
OPENING_PARAMETERS = 33e6
"""Parameters whose work takes as long as opening a candidate, 15 s. Source: a tiny and a 135 M-parameter run on two cores."""
BASE_PARAMETERS = 58e6
"""Parameters whose memory is that of the libraries, 1.8 GB. Source: the same two runs."""
STATISTICS_BYTES = 2
"""Of the inputs' second moments, per weight of a decoder matrix; only methods that mend errors keep them. Source: as above."""
OWN_SPREAD, MEASURED_SPREAD = 1.5, 3.0
"""By how much an estimate from the profile's last run, or from the measured one, may be off."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much a run does; times scale with it."""

    num_parameters: float
    num_candidates: int
    """All of the space; which of them are pruned is seen in the scan."""
    num_tokens: int
    """Prompts and answers of the timed requests, both engines."""
    soak_s: float


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, and the candidates that the profile makes of it."""

    num_parameters: int
    imported: bool
    layers: "tuple[LinearLayer, ...]"
    strategies: tuple[Strategy, ...]
    """Those that a runtime takes."""
    num_candidates: int

    @property
    def num_linear(self) -> int:
        return sum(layer.num_weights for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Experience:
    """A run that is known: its work, and what it took."""

    basis: str
    spread: float
    work: Work
    wall_s: Mapping[Stage, float]
    peak_bytes: float


FIRST_RUN = Experience(
    "a run of a 135 M-parameter model on two CPU cores",
    MEASURED_SPREAD,
    Work(134_515_008, 12, 2 * 368 * 64, 60),
    {Stage.PROFILE: 2.8, Stage.SCAN: 554.5, Stage.MEMORY: 3.7, Stage.VERIFY: 344.4, Stage.PACKAGE: 17.5},
    5.99e9,
)
"""Source: benchmarks/results/first_run.csv, 2026-11-30, commit 4090717 (968 s in all), and the stages of its report."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the stages that are not held would take; None where nothing tells it."""

    wall_s: dict[str, float]
    """Stage -> seconds, of the stages to run."""
    spread: float
    """The time lies between total / spread and total * spread."""
    memory_bytes: float | None
    disk_bytes: float | None
    cost_usd: float | None
    basis: str
    candidates: tuple[str, ...] = ()

    @property
    def total_s(self) -> float | None:
        return sum(self.wall_s.values()) if self.wall_s else None


def estimate_run(request: Request, root: Path, to_run: tuple[Stage, ...]) -> Estimate:
    """Return what `to_run` would take; nothing for a model that is not fetched yet, or whose architecture is not covered.

    Raises:
        ConfigError: the model cannot be read, or the profile asks for a format that does not fit it.
    """
    profile = request.profile
    try:
        subject = _subject(profile, find_size(profile.model, request.base, Store(root / "store")))
    except UnsupportedError as error:
        return Estimate({}, 1.0, None, None, None, str(error))
    work = _work(profile, subject)
    known = _last_run(profile, root) or FIRST_RUN
    wall_s = {stage.value: _stage_s(stage, work, known, held=Stage.SCAN not in to_run) for stage in to_run}
    price = profile.cost.machine_usd_per_hour
    memory = known.peak_bytes * (work.num_parameters + BASE_PARAMETERS) / (known.work.num_parameters + BASE_PARAMETERS)
    return Estimate(
        wall_s=wall_s,
        spread=known.spread,
        memory_bytes=memory if to_run else 0,
        disk_bytes=_disk_bytes(profile, subject, to_run),
        cost_usd=None if price is None else price * sum(wall_s.values()) / 3600,
        basis=known.basis,
        candidates=tuple(strategy.label for strategy in subject.strategies),
    )


def _subject(profile: DeploymentProfile, size: ModelSize | None) -> Subject:
    """Return the model as the scan would see it.

    Raises:
        ConfigError: a format of the profile does not fit it.
        UnsupportedError: it is not here, or its layers are not known.
    """
    from model_optimizer.quantization.layers import LinearLayer, read_layers
    from model_optimizer.strategy.space import candidates

    if size is None:
        raise UnsupportedError(f"{profile.model.ref} is not here yet, and its size is known once it is fetched")
    if size.directory is not None:
        layers = read_layers(size.directory).linears
    else:
        layers = tuple(LinearLayer(name, out, width) for name, out, width in size.linear_OI)
    if not layers:
        raise UnsupportedError(f"{profile.model.ref} names its layers in an unknown way; they are known once it is imported")
    space = candidates(profile.scan, layers, profile.quantization.default_precision)
    taken = tuple(strategy for strategy in space.strategies if strategy.label not in space.unsupported)
    return Subject(size.num_parameters, size.directory is not None, layers, taken, len(space.strategies))


def _work(profile: DeploymentProfile, subject: Subject) -> Work:
    tokens = 2 * profile.verify.latency_requests * _tokens_per_request(profile)
    return Work(subject.num_parameters, subject.num_candidates, tokens, profile.verify.soak.duration)


def _tokens_per_request(profile: DeploymentProfile) -> int:
    return profile.traffic.prompt_tokens.p50 + profile.traffic.output_tokens.p50


def _stage_s(stage: Stage, work: Work, known: Experience, *, held: bool) -> float:
    """Return a stage's time as that of the known run, scaled with its work; a soak takes what the profile says."""
    weight = (work.num_parameters + OPENING_PARAMETERS) / (known.work.num_parameters + OPENING_PARAMETERS)
    per_candidate = known.wall_s[Stage.SCAN] / known.work.num_candidates * weight
    if stage is Stage.SCAN:
        return per_candidate * work.num_candidates
    if stage in (Stage.QUANTIZE, Stage.COMPILE):  # the scan has just made them, unless the store lost them since
        return per_candidate if held else 0.0
    if stage is Stage.VERIFY:
        timed = max(0.0, known.wall_s[stage] - known.work.soak_s)
        return timed * weight * work.num_tokens / known.work.num_tokens + work.soak_s
    return known.wall_s[stage] * weight


def _disk_bytes(profile: DeploymentProfile, subject: Subject, to_run: tuple[Stage, ...]) -> float:
    """Return what the store and the bundles would grow by: checkpoints, engines, exports, statistics, two bundles."""
    full = FULL_BYTES * subject.num_parameters
    recipes = {strategy.weights for strategy in subject.strategies}
    stored = {recipe: _recipe_bytes(recipe, subject) for recipe in recipes}
    total = 0.0
    if Stage.SCAN in to_run:
        total += 0 if subject.imported else full
        total += sum(stored[it] for it in recipes if it.quantized) + sum(stored[it.weights] for it in subject.strategies)
        total += full if any(strategy.runtime != "torch" for strategy in subject.strategies) else 0
        mends = any(not method.startswith("rtn") for method in profile.scan.methods)
        total += STATISTICS_BYTES * subject.num_linear if mends else 0
    if Stage.PACKAGE in to_run:
        total += 2 * full + 2 * max(stored.values(), default=0)
    return total


def _recipe_bytes(recipe: WeightRecipe, subject: Subject) -> float:
    """Return a checkpoint or engine of one recipe: matrices in its format, all else in 4 bytes."""
    from model_optimizer.formats.registry import FORMATS

    rest = FULL_BYTES * (subject.num_parameters - subject.num_linear)
    if not recipe.quantized:
        return FULL_BYTES * subject.num_parameters
    if recipe.bits_budget is not None:
        return rest + recipe.bits_budget * subject.num_linear / 8
    return rest + sum(FORMATS.get(recipe.formats[0]).num_bytes(it.out_features, it.in_features) for it in subject.layers)


def _last_run(profile: DeploymentProfile, root: Path) -> Experience | None:
    """Return what the newest bundle of this profile tells of its run; None where there is none, or it cannot be read."""
    found = [path for path in root.glob(f"bundles/{profile.name}-v*/metrics/report.json") if not path.parts[-3].endswith("-v0")]
    for path in sorted(found, key=lambda it: it.stat().st_mtime, reverse=True):
        try:
            report = Report.model_validate_json(path.read_bytes())
        except (OSError, ValueError):  # of an older version, or half removed
            continue
        return _experience(report, profile, path.parents[1])
    return None


def _experience(report: Report, profile: DeploymentProfile, bundle: Path) -> Experience:
    store = bundle.parents[1] / "store"
    peaks = [peak for note in report.stages if (peak := _peak_bytes(store / note.stage / note.key / ARTIFACT))]
    requests = sum(row.num_requests for row in report.verification.latency)
    work = Work(
        num_parameters=report.target.model.num_parameters,
        num_candidates=len(report.front.candidates),
        num_tokens=max(1, requests * _tokens_per_request(profile)),
        soak_s=report.verification.soak.ran_s,
    )
    wall_s = {**FIRST_RUN.wall_s, **{Stage(note.stage): note.wall_s for note in report.stages}}
    return Experience(f"the run of {bundle.name}", OWN_SPREAD, work, wall_s, max(peaks, default=FIRST_RUN.peak_bytes))


def _peak_bytes(artifact: Path) -> int | None:
    """Return the memory that a stage's process took at most; None where the store holds it no more."""
    try:
        return int(json.loads(artifact.read_bytes())["produced"]["peak_rss_bytes"])
    except (OSError, ValueError, KeyError):
        return None
