"""provenance.json: an in-toto statement of what the bundle's model files were made from, on what, when and by which stages."""

from datetime import datetime, timedelta

from model_optimizer.artifacts.base import FileRef, Produced
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.version import DISTRIBUTION, lock_sha256, optimizer_hash, package_version
from model_optimizer.store import canonical_json, stage_key

PROVENANCE = "provenance.json"


def provenance(inputs: PackageInputs, subject: tuple[FileRef, ...]) -> bytes:
    """Return the statement as canonical JSON.

    Source: in-toto Attestation Framework, Statement v1; SLSA provenance predicate v1.
    """
    builder = f"urn:{DISTRIBUTION}:{package_version()}"
    return canonical_json(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": ref.path, "digest": {"sha256": ref.sha256}} for ref in subject],
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {
                "buildDefinition": {
                    "buildType": f"urn:{DISTRIBUTION}:release:1",
                    "externalParameters": {
                        "name": inputs.name,
                        "model": inputs.model_ref,
                        "sla": inputs.sla.model_dump(mode="json"),
                        "traffic": inputs.traffic.model_dump(mode="json"),
                        "seeds": inputs.seeds,
                    },
                    "internalParameters": {
                        "hardware": _hardware(inputs),
                        "hardware_fingerprint": inputs.fingerprint,
                        "stage_keys": inputs.stage_keys,
                    },
                    "resolvedDependencies": _materials(inputs),
                },
                "runDetails": {
                    "builder": {"id": builder, "version": {"optimizer_hash": optimizer_hash()}},
                    "metadata": {
                        "invocationId": stage_key(inputs),
                        "startedOn": started_on(inputs),
                        "finishedOn": ended_on(inputs),
                    },
                    "byproducts": _stages(inputs),
                },
            },
        }
    )


def _materials(inputs: PackageInputs) -> list[dict[str, object]]:
    """Return name and digest of everything that went in."""
    materials: list[dict[str, object]] = [
        {"name": "source", "digest": {"gitCommit": inputs.source_commit}},
        {"name": "model", "digest": {"sha256": inputs.model.digest}},
        {"name": "lock of libraries", "digest": {"sha256": lock_sha256()}},
        {"name": "calibration", "digest": {"sha256": inputs.calibration_digest}},
    ]
    materials += [{"name": f"golden set {tree.path.name}", "digest": {"sha256": tree.digest}} for tree in inputs.golden]
    return materials


def started_on(inputs: PackageInputs) -> str:
    """Return when the first of the stages that the release rests on began, which may have been in an earlier run."""
    return min(_time(made.started_at) for made in inputs.made.values()).isoformat(timespec="seconds")


def ended_on(inputs: PackageInputs) -> str:
    """Return when the last of the stages before packaging ended."""
    return max(_end(made) for made in inputs.made.values()).isoformat(timespec="seconds")


def _end(made: Produced) -> datetime:
    return _time(made.started_at) + timedelta(seconds=made.wall_s)


def _time(stated: str) -> datetime:
    return datetime.fromisoformat(stated)


def _hardware(inputs: PackageInputs) -> dict[str, object]:
    device = inputs.target.artifact.device
    return {
        "kind": device.kind,
        "name": device.name,
        "num_cores": device.num_cores,
        "instruction_sets": list(device.instruction_sets),
        "memory_bytes": device.memory_bytes,
        "driver": device.driver,
    }


def _stages(inputs: PackageInputs) -> list[dict[str, object]]:
    """Return every stage's store entry with its start and end."""
    return [
        {
            "name": f"stage {stage}",
            "uri": f"urn:{DISTRIBUTION}:store:{inputs.stage_keys[stage]}",
            "annotations": {"started_on": made.started_at, "ended_on": _end(made).isoformat(timespec="seconds")},
        }
        for stage, made in inputs.made.items()
    ]
