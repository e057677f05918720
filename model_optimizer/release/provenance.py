"""provenance.json: an in-toto statement of what the bundle's model files were made from."""

from model_optimizer.artifacts.base import FileRef
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.version import DISTRIBUTION, optimizer_hash, package_version
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
                    "internalParameters": {"hardware_fingerprint": inputs.fingerprint, "stage_keys": inputs.stage_keys},
                    "resolvedDependencies": _materials(inputs),
                },
                "runDetails": {
                    "builder": {"id": builder, "version": {"optimizer_hash": optimizer_hash()}},
                    "metadata": {"invocationId": stage_key(inputs)},
                },
            },
        }
    )


def _materials(inputs: PackageInputs) -> list[dict[str, object]]:
    """Return name and digest of everything that went in."""
    materials: list[dict[str, object]] = [
        {"name": "source", "digest": {"gitCommit": inputs.source_commit}},
        {"name": "model", "digest": {"sha256": inputs.model.digest}},
        {"name": "calibration", "digest": {"sha256": inputs.calibration_digest}},
    ]
    materials += [{"name": f"golden set {tree.path.name}", "digest": {"sha256": tree.digest}} for tree in inputs.golden]
    return materials
