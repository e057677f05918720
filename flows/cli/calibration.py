"""`model-optimizer calibration check`: what is known about calibration text before it calibrates anything."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows.bootstrap import home
from flows.progress import TerminalProgress, terminal
from model_optimizer.errors import ConfigError

if TYPE_CHECKING:
    from model_optimizer.models.resolve import ResolvedModel
    from model_optimizer.profile import DeploymentProfile
    from model_optimizer.quantization.calibration_check import CalibrationCheck
    from model_optimizer.quantization.config import CalibrationConfig

BAR = 40
"""Characters of the longest bar."""


@dataclass(frozen=True)
class CheckRequest:
    """What is to be checked, and against what."""

    data: Path
    """A file, `builtin:NAME` or `self`."""
    model: str | None
    profile: Path | None
    trace: Path | None
    fields: tuple[str, ...]
    """ROLE=COLUMN each."""
    min_expert_tokens: int | None
    strict: bool


def check_data(request: CheckRequest, *, as_json: bool) -> None:
    """Print what calibration text holds, lacks and repeats.

    Raises:
        ConfigError: the text is unusable, holds a golden item, starves an expert of a stated minimum, or (strict) warned of.
    """
    from model_optimizer.profile import load_profile
    from model_optimizer.quantization.calibration import texts
    from model_optimizer.quantization.calibration_check import examine
    from model_optimizer.quantization.calibration_source import CalibrationSource, Sampler
    from model_optimizer.quantization.expert_coverage import require_expert_tokens
    from model_optimizer.quantization.traffic_coverage import trace_lengths, traffic_lengths

    profile = load_profile(request.profile, ()) if request.profile else None
    config = _config(request, profile)
    requests: tuple[int, ...] = ()
    if request.trace:
        requests = trace_lengths(request.trace)
    elif profile:
        requests = traffic_lengths(profile.traffic, profile.sla.max_model_len)
    source = None if config.is_self else CalibrationSource.of(config, Path.cwd())
    model = _model(request, profile)
    if source is None:
        source = CalibrationSource.of(
            config, Path.cwd(), Sampler(model=model.tree, cache=home() / "calibration") if model else None
        )
    with_experts = request.min_expert_tokens is not None
    found = examine(source, model.tree.path if model else None, requests, with_experts=with_experts)
    names, overlap = _golden_overlap(texts(source), request.profile, profile)
    if as_json:
        typer.echo(json.dumps(found.model_dump() | {"golden_sets": names, "golden_overlap": overlap}, indent=1))
    else:
        typer.echo("\n".join(_lines(found, names, overlap, has_traffic=bool(requests))))
    if overlap:
        raise ConfigError(overlap)
    if request.min_expert_tokens is not None:
        require_expert_tokens(found.experts, request.min_expert_tokens)
    if request.strict and found.warnings:
        raise ConfigError(f"{len(found.warnings)} warnings, and --strict allows none: {found.warnings[0]}")


def _config(request: CheckRequest, profile: "DeploymentProfile | None") -> "CalibrationConfig":
    """Return the profile's settings, or the defaults, for the data that is named here."""
    from pydantic import ValidationError

    from model_optimizer.quantization.config import CalibrationConfig

    settings = profile.calibration.model_dump() if profile else {}
    split = [pair.partition("=") for pair in request.fields]
    fields = {role: column for role, _, column in split}
    if bad := [role for role, column in fields.items() if not column]:
        raise ConfigError(f"--field {bad[0]!r} names no column; write --field ROLE=COLUMN, e.g. --field text=body")
    try:
        return CalibrationConfig.model_validate(settings | {"path": request.data} | ({"fields": fields} if fields else {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--field: {first['msg'].removeprefix('Value error, ')}; seen: {first['input']!r}") from error


def _model(request: CheckRequest, profile: "DeploymentProfile | None") -> "ResolvedModel | None":
    """Return the model that is named, imported if need be; the profile's only where nothing has to be imported for it."""
    from model_optimizer.models.resolve import check_reference, find_resolved, resolve_model
    from model_optimizer.spec import ModelRef
    from model_optimizer.store import Store

    store, here = Store(home() / "store"), Path.cwd()
    if request.model is not None:
        check_reference(ModelRef(ref=request.model), here)
        return resolve_model(ModelRef(ref=request.model), here, store, TerminalProgress(terminal()))
    if profile is None or request.profile is None:
        return None
    return find_resolved(profile.model, request.profile.resolve().parent, store)


def _golden_overlap(texts: tuple[str, ...], path: Path | None, profile: "DeploymentProfile | None") -> tuple[list[str], str]:
    """Return the names of the sets that were compared (the profile's, else those that ship), and the first item found."""
    from model_optimizer.paths import data_directory
    from model_optimizer.verification.golden import CARD, find_golden_set, load_golden_set
    from model_optimizer.verification.leakage import refuse_leakage

    if profile and path:
        folders = [find_golden_set(name, path.resolve().parent) for name in profile.verify.golden_sets]
    else:
        folders = sorted(card.parent for card in data_directory("golden_sets").glob(f"*/{CARD}"))
    sets = [load_golden_set(folder) for folder in folders]
    names = [golden.card.name for golden in sets]
    try:
        refuse_leakage(texts, sets)
    except ConfigError as error:
        return names, str(error)
    return names, ""


def _lines(found: "CalibrationCheck", golden: list[str], overlap: str, *, has_traffic: bool) -> list[str]:
    report, unit = found.report, found.unit
    mark = ", byte-order mark dropped" if found.byte_order_mark else ""
    encoding = "" if found.kind == "parquet" else f", UTF-8{mark}"
    lines = [
        f"{found.name}: {found.kind}, {found.num_bytes / 1e3:.1f} kB{encoding}",
        f"records  {report.num_read} read: {report.num_used} calibrate, {report.num_held_out} held out, "
        f"{report.num_unused} beyond those asked for, {report.num_empty} empty, {report.num_short} short, "
        f"{report.num_duplicate} duplicates, {report.num_bad} bad",
        f"{unit:8} {report.num_tokens} in all; shortest {found.shortest}, "
        + ", ".join(f"{name} {length}" for name, length in report.length_percentiles.items())
        + f"; {report.num_cut} samples cut",
    ]
    if unit == "bytes":
        lines.append(
            "         no model is known here, so lengths are bytes: a text has at most that many tokens; --model counts them"
        )
    longest = max(report.length_histogram.values())
    for name, count in report.length_histogram.items():
        lines.append(f"{name:>17} {'#' * max(1 if count else 0, round(BAR * count / longest))} {count}")
    lines += _coverage_lines(found, has_traffic=has_traffic)
    for load in found.experts:
        reached = len(load.tokens_per_expert) - len(load.never_reached)
        lines.append(
            f"experts  {load.router}: {reached} of {len(load.tokens_per_expert)} reached, {min(load.tokens_per_expert)} "
            f"to {max(load.tokens_per_expert)} of {load.num_tokens} tokens"
        )
    lines.append(f"golden   {overlap or 'no item of ' + ', '.join(golden) + ' in it'}")
    return lines + [f"warning  {warning}" for warning in found.warnings]


def _coverage_lines(found: "CalibrationCheck", *, has_traffic: bool) -> list[str]:
    coverage = found.coverage
    if coverage is None:
        missing = "--model, since traffic is stated in tokens" if has_traffic else "--profile or --traffic"
        return [f"traffic  not compared; give {missing}"]
    return [
        f"traffic  score {coverage.score_ratio:.2f} of 1 (shared lengths), {coverage.distance_octaves:.2f} doublings off, "
        f"{coverage.reached_ratio:.0%} of the requests no longer than the longest sample",
        *(f"         lacks {gap}" for gap in coverage.gaps()),
    ]
