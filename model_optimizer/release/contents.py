"""The small files of a bundle: config.yaml, metadata.json, rollback, sample and health check."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import yaml

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.release import SampleOutput
from model_optimizer.artifacts.target import DeviceFacts
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.release.bundle import engine_place
from model_optimizer.release.endpoints import server_of
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.loading import Loaded
from model_optimizer.release.manifest import BUNDLE_FORMAT, MANIFEST, METADATA
from model_optimizer.release.version import DISTRIBUTION, optimizer_hash, package_version
from model_optimizer.store import canonical_json


@dataclass(frozen=True, slots=True)
class Told:
    """What a bundle says of itself beside its engine."""

    bundle: str
    samples: tuple[SampleOutput, ...]
    previous: Path | None
    """What to roll back to; None for the baseline."""
    loaded: Loaded


def small_files(inputs: PackageInputs, compiled: CompiledModel, told: Told) -> dict[str, bytes]:
    """Return the text files of a bundle by path."""
    target = inputs.target.artifact
    bundle = told.bundle
    return {
        "config.yaml": _config(inputs, compiled),
        METADATA: _metadata(inputs, compiled, told),
        "data/sample.json": _sample(compiled, inputs.baseline_engine.artifact, told.samples),
        "health_check.sh": _health_check(target.device, compiled.engine.runtime, bundle),
        **_rollback(bundle, told.previous),
    }


def framework_triple(inputs: PackageInputs, compiled: CompiledModel) -> dict[str, str]:
    """Return which framework the weights come from, which optimizer changed them, which runtime executes them."""
    return {
        "training": f"{inputs.target.artifact.model.architecture} in transformers {metadata.version('transformers')}",
        "optimizer": f"{DISTRIBUTION} {package_version()}",
        "inference": f"{compiled.engine.runtime} {compiled.engine.framework_version}",
    }


def _config(inputs: PackageInputs, compiled: CompiledModel) -> bytes:
    device = inputs.target.artifact.device
    document = {
        "name": inputs.name,
        "model": {"ref": inputs.model_ref, "sha256": inputs.model.digest},
        "hardware": {
            "kind": device.kind,
            "name": device.name,
            "num_cores": device.num_cores,
            "instruction_sets": list(device.instruction_sets),
            "memory_bytes": device.memory_bytes,
            "fingerprint": inputs.fingerprint,
        },
        "sla": inputs.sla.model_dump(mode="json", exclude_none=True),
        "traffic": inputs.traffic.model_dump(mode="json"),
        "strategy": {"label": compiled.strategy.label, **compiled.strategy.model_dump(mode="json")},
        "framework": framework_triple(inputs, compiled),
        "seeds": inputs.seeds,
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode()


def _metadata(inputs: PackageInputs, compiled: CompiledModel, told: Told) -> bytes:
    device = inputs.target.artifact.device
    return canonical_json(
        {
            "bundle_format": BUNDLE_FORMAT,
            "bundle": told.bundle,
            "strategy": compiled.strategy.label,
            "engine": engine_place(compiled).removeprefix("model").lstrip("/") or ".",
            "engine_bytes": compiled.engine.num_bytes,
            "runtime": compiled.engine.runtime,
            "framework_version": compiled.engine.framework_version,
            "framework": framework_triple(inputs, compiled),
            "triple": told.loaded.triple(inputs, compiled).model_dump(mode="json"),
            "compute_capability": compiled.engine.compute_capability,
            "driver": compiled.engine.driver,
            "optimizer_hash": optimizer_hash(),
            "device": {"kind": device.kind, "name": device.name, "instruction_sets": list(device.instruction_sets)},
            "model_ref": inputs.model_ref,
            "model_sha256": inputs.model.digest,
        }
    )


def _sample(compiled: CompiledModel, baseline: CompiledModel, samples: tuple[SampleOutput, ...]) -> bytes:
    """Return prompts with the greedy output of the engine that this bundle holds."""
    own = compiled.strategy != baseline.strategy
    rows = [
        {
            "prompt": sample.prompt,
            "prompt_tokens": list(sample.prompt_tokens),
            "tokens": list(sample.tokens if own else sample.baseline_tokens),
            "text": sample.text if own else sample.baseline_text,
        }
        for sample in samples
    ]
    return canonical_json({"decoding": "greedy", "samples": rows})


def _health_check(device: DeviceFacts, runtime: str, bundle: str) -> bytes:
    text = (PACKAGE_ROOT / "release" / "data" / "health_check.sh").read_text(encoding="utf-8")
    values: Mapping[str, str] = {
        "DEVICE_KIND": device.kind,
        "INSTRUCTION_SETS": " ".join(device.instruction_sets) if device.kind == "cpu" else "",
        "SERVER": server_of(runtime).name,
        "MODEL_NAME": bundle,
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value.replace("'", ""))
    return text.encode()


def _rollback(bundle: str, previous: Path | None) -> dict[str, bytes]:
    """Return rollback/: which bundle to go back to, its digest, its model, and how."""
    if previous is None:
        words = f"`{bundle}` is the unquantized baseline: the bundle that every later version can go back to.\n"
        return {"rollback/README.md": f"# Going back\n\n{words}".encode()}
    digest = file_sha256(previous / MANIFEST)
    earlier = json.loads((previous / METADATA).read_bytes())
    reference = {
        "bundle": previous.name,
        "manifest_sha256": digest,
        "model_ref": earlier["model_ref"],
        "model_sha256": earlier["model_sha256"],
    }
    text = f"""# Going back from {bundle}

The version before this one is `{previous.name}` (manifest sha256 `{digest}`), made from `{earlier["model_ref"]}`.
`previous.json` holds the same for machines. To go back:

1. check it: `model-optimizer verify-bundle {previous.name}`
2. where it was deployed: `model-optimizer rollback --to ROOT {previous.name}`; elsewhere first
   `model-optimizer deploy {previous.name} --to ROOT`; then restart or reload the server
3. check the result: `{previous.name}/health_check.sh URL`
"""
    return {"rollback/previous.json": canonical_json(reference), "rollback/README.md": text.encode()}
