"""model/README.md: the card that a model hub shows, with evaluation results in its front matter.

Every figure is a measure or a score of the run. What is not known is said to be unknown.
"""

import re
from pathlib import Path

from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Measure
from model_optimizer.release.findings import Score, is_baseline, measures, scores, unmeasured, warnings
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.version import DISTRIBUTION, package_version

CARD = "model/README.md"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)


def model_card(inputs: PackageInputs, compiled: CompiledModel, bundle: str) -> bytes:
    """Return the card of one bundle."""
    from huggingface_hub import EvalResult, ModelCardData

    found = scores(inputs, compiled)
    quantized = compiled.strategy.weights.quantized
    on_hub = _HUB.fullmatch(inputs.model_ref) is not None
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"golden-set/{score.golden_set}",
            dataset_name=score.golden_set if score.slice is None else f"{score.golden_set} ({score.slice})",
            metric_type=score.metric,
            metric_value=score.value,
        )
        for score in found
    ]
    data = ModelCardData(
        model_name=bundle,
        base_model=inputs.model_ref if on_hub else None,
        base_model_relation="quantized" if on_hub and quantized else None,
        quantized_by=DISTRIBUTION if quantized else None,
        library_name=_library(compiled),
        license=source_license(inputs.model.path),
        pipeline_tag="text-generation",
        tags=[DISTRIBUTION, compiled.engine.runtime, *compiled.strategy.weights.formats],
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{_body(inputs, compiled, bundle)}".encode()


def source_license(checkpoint: Path) -> str | None:
    """Return the license that the source model's own card states, or None where it has no card or states none."""
    import yaml

    try:
        front = _FRONT.match((checkpoint / "README.md").read_text(encoding="utf-8"))
        stated = yaml.safe_load(front[1]) if front else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    name = stated.get("license") if isinstance(stated, dict) else None
    return name if isinstance(name, str) and _LICENSE.fullmatch(name) else None


def _library(compiled: CompiledModel) -> str:
    return "transformers" if compiled.engine.runtime == "torch" else compiled.engine.runtime


def _body(inputs: PackageInputs, compiled: CompiledModel, bundle: str) -> str:
    target = inputs.target.artifact
    kind = "the unquantized baseline" if is_baseline(inputs, compiled) else f"`{compiled.strategy.label}`"
    license_name = source_license(inputs.model.path) or "not stated by the source model; look at its origin before you use it"
    doubts = [*unmeasured(inputs, compiled), *warnings(inputs)] or ["none were found"]
    parts = [
        f"# {bundle}",
        f"`{inputs.model_ref}` as {kind}, made by {DISTRIBUTION} {package_version()} for {target.device.name} "
        f"and {compiled.engine.runtime} {compiled.engine.framework_version}. License: {license_name}.",
        "## Golden sets",
        _scores(scores(inputs, compiled)),
        "## Measures",
        _measures(measures(inputs, compiled)),
        "## Limits and doubts",
        "\n".join(f"- {_plain(doubt)}" for doubt in doubts),
        "## Where it comes from",
        f"Source model sha256 `{inputs.model.digest}`, calibration sha256 `{inputs.calibration_digest}`. The bundle's "
        "`provenance.json` names every stage, `sbom.cdx.json` every component, `metrics/` holds the report. "
        f"Check it with `model-optimizer verify-bundle {bundle}` before you load it.",
    ]
    return "\n\n".join(parts) + "\n"


def _scores(found: tuple[Score, ...]) -> str:
    if not found:
        return "None was run."
    rows = [
        f"| {_plain(it.golden_set)} | {_plain(it.slice or 'all')} | {it.metric} | {it.value:.4g} | {it.num_items} |"
        for it in found
    ]
    return "\n".join(["| set | part | metric | score | items |", "|---|---|---|---|---|", *rows])


def _measures(found: tuple[Measure, ...]) -> str:
    rows = []
    for it in found:
        value = "not measured" if it.value is None else f"{it.value:.6g}"
        bounds = "" if it.interval is None else f"{it.interval.lower:.6g} to {it.interval.upper:.6g}"
        limit = "" if it.limit is None else f"{it.limit:.6g}"
        rows.append(f"| {it.metric} | {value} | {bounds} | {limit} | {it.verdict or ''} | {it.origin.value.replace('_', ' ')} |")
    return "\n".join(["| measure | value | 95 % interval | limit | verdict | origin |", "|---|---|---|---|---|---|", *rows])


def _plain(text: str) -> str:
    """Return text that cannot break out of a table cell or a list."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
