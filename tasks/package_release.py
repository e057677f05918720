"""Task 7: the report, the signed bundle and its sign-off record."""

from importlib.metadata import version
from pathlib import Path

from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.measure import Measure
from model_optimizer.artifacts.release import Release
from model_optimizer.release import stage as release
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.self_check import self_check
from model_optimizer.release.sign import ensure_key
from model_optimizer.release.version import optimizer_hash
from model_optimizer.reporting.build import RunFacts, StoredStages, build_report
from model_optimizer.reporting.renderers import render_documents
from model_optimizer.verification.golden import load_golden_set
from model_optimizer.verification.samples import sample_outputs
from tasks._task import Workplace, stage_task
from tasks.tracking import PACKAGED, VersionRecord

LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "compressed-tensors", "numpy", "scipy", "prefect", "mlflow")
NUM_SAMPLES = 4


def _fault(made: Release, inputs: PackageInputs, place: Workplace) -> str | None:
    return release.find_release_fault(made, place.bundles, inputs.config.signer.key.expanduser())


@stage_task(Stage.PACKAGE, Release, fault=_fault)
def package_release(inputs: PackageInputs, workspace: Path, place: Workplace) -> Release:
    run = RunFacts(inputs.name, inputs.model_ref, inputs.source_bytes, {name: version(name) for name in LIBRARIES}, inputs.seeds)
    stages = StoredStages(inputs.target, inputs.front, inputs.quantized, inputs.engine, inputs.memory, inputs.verification)
    prompts = tuple(item.prompt for item in load_golden_set(inputs.golden[0].path).items[:NUM_SAMPLES])
    samples = sample_outputs(prompts, inputs.model.path, inputs.engine, inputs.baseline_engine, inputs.memory.artifact.kv)
    documents = render_documents(build_report(run, stages, rounds=tuple(attempt.record() for attempt in inputs.attempts)))
    made = release.package_release(
        inputs, workspace, bundles=place.bundles, documents=documents, samples=samples, progress=place.progress
    )
    return self_check(made, place.bundles, ensure_key(inputs.config.signer.key), place.progress)


def headline_measures(inputs: PackageInputs) -> tuple[Measure, ...]:
    """Return the gating measures of all stages: what two parent runs are compared by."""
    return tuple(measure for measure in inputs.results.measures() if measure.verdict is not None)


def version_record(flow_run_id: str, inputs: PackageInputs, made: Stored[Release], place: Workplace) -> VersionRecord:
    """Return how the bundle is filed in the model registry; its sign-off is told apart from that, for it comes later."""
    artifact = made.artifact
    return VersionRecord(
        name=inputs.name,
        source=(place.bundles / artifact.bundle).as_uri(),
        run_record_id=flow_run_id,
        aliases=(PACKAGED,),
        model_record_id=f"{flow_run_id}/model/{inputs.engine.artifact.strategy.label}",
        tags={
            "mo.bundle": artifact.bundle,
            "mo.manifest_sha256": artifact.manifest_sha256,
            "mo.optimizer_hash": optimizer_hash(),
        },
    )
