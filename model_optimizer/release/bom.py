"""sbom.cdx.json: a CycloneDX bill of materials of the bundle with a model card for machines.

The components are built by cyclonedx-python-lib. It has no class for a model card, so that one is put into the JSON that the
library wrote; the tests validate the whole strictly against CycloneDX 1.6.
"""

import functools
import json
import uuid
from datetime import datetime
from typing import TYPE_CHECKING

from model_optimizer.artifacts.base import FileRef
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Measure, Origin
from model_optimizer.release.findings import measures, scores, unmeasured, warnings
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.provenance import ended_on
from model_optimizer.release.version import DISTRIBUTION, locked, package_version
from model_optimizer.store import canonical_json, stage_key

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

BOM = "sbom.cdx.json"
_MODEL, _SOURCE = "model", "source-model"


def bill_of_materials(inputs: PackageInputs, compiled: CompiledModel, bundle: str, files: tuple[FileRef, ...]) -> bytes:
    """Return the bill of a bundle whose model files are `files`, as canonical JSON.

    Source: CycloneDX 1.6, component type machine-learning-model with modelCard.
    """
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    family, _, version = bundle.rpartition("-v")
    model = Component(
        name=family,
        version=version,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=_MODEL,
        description=f"{inputs.model_ref} as {compiled.strategy.label} for {inputs.target.artifact.device.name}",
        components=_files(files),
    )
    tool = Component(name=DISTRIBUTION, version=package_version(), type=ComponentType.APPLICATION, bom_ref="optimizer")
    source, data = _source(inputs), _data(inputs)
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"urn:{DISTRIBUTION}:{bundle}:{stage_key(inputs)}"),
        metadata=BomMetaData(
            component=model, timestamp=datetime.fromisoformat(ended_on(inputs)), tools=ToolRepository(components=[tool])
        ),
        components=[source, *data],
    )
    bom.register_dependency(model, [source, *data])
    document, libraries = json.loads(JsonV1Dot6(bom).output_as_string()), _libraries()
    document["components"] += libraries["components"]
    document["dependencies"] += libraries["dependencies"]
    next(it for it in document["dependencies"] if it["ref"] == _MODEL)["dependsOn"] += [
        it["ref"] for it in libraries["dependencies"]
    ]
    document["metadata"]["component"]["modelCard"] = _model_card(inputs, compiled, [it.bom_ref.value or "" for it in data])
    return canonical_json(document)


def _files(files: tuple[FileRef, ...]) -> "list[Component]":
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    return [
        Component(
            name=ref.path,
            type=ComponentType.FILE,
            bom_ref=f"file:{ref.path}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=ref.sha256)],
        )
        for ref in files
    ]


def _source(inputs: PackageInputs) -> "Component":
    from cyclonedx.model.component import ComponentType

    return _described(_SOURCE, inputs.model_ref, ComponentType.MACHINE_LEARNING_MODEL, inputs.model.digest)


def _data(inputs: PackageInputs) -> "list[Component]":
    """Return calibration data and golden sets."""
    from cyclonedx.model.component import ComponentType

    calibration = _described("calibration", "calibration data", ComponentType.DATA, inputs.calibration_digest)
    sets = [_described(f"golden:{it.path.name}", it.path.name, ComponentType.DATA, it.digest) for it in inputs.golden]
    return [calibration, *sets]


def _described(reference: str, name: str, kind: object, digest: str) -> "Component":
    """Return a component that is known by the digest over its whole tree, which is no hash of one file."""
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType

    assert isinstance(kind, ComponentType)
    return Component(
        name=name, type=kind, bom_ref=reference, properties=[Property(name=f"{DISTRIBUTION}:tree_sha256", value=digest)]
    )


@functools.cache
def _libraries() -> dict[str, list[dict[str, str]]]:
    """Return the libraries of the lock, which the optimizer ran with, as parts of a bill; hundreds, so made once a process."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    components = [
        Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"pypi:{name.lower()}",
            purl=PackageURL(type="pypi", name=name, version=version),
        )
        for name, version in locked()
    ]
    document = json.loads(JsonV1Dot6(Bom(components=components)).output_as_string())
    return {part: document.get(part, []) for part in ("components", "dependencies")}


def _model_card(inputs: PackageInputs, compiled: CompiledModel, data: list[str]) -> dict[str, object]:
    facts = inputs.target.artifact.model
    performance = [_performance(it) for it in measures(inputs, compiled) if it.value is not None]
    for score in scores(inputs, compiled):
        entry: dict[str, object] = {"type": f"{score.golden_set}/{score.metric} (measured)", "value": f"{score.value:.6g}"}
        performance.append(entry if score.slice is None else {**entry, "slice": score.slice})
    return {
        "modelParameters": {
            "task": "text-generation",
            "architectureFamily": facts.model_type,
            "modelArchitecture": facts.architecture,
            "datasets": [{"ref": reference} for reference in data],
        },
        "quantitativeAnalysis": {"performanceMetrics": performance},
        "considerations": {"technicalLimitations": [*unmeasured(inputs, compiled), *warnings(inputs)]},
        "properties": [
            {"name": f"{DISTRIBUTION}:strategy", "value": compiled.strategy.label},
            {"name": f"{DISTRIBUTION}:num_parameters", "value": str(facts.num_parameters)},
        ],
    }


def _performance(measure: Measure) -> dict[str, object]:
    """Return one figure with where it comes from."""
    entry: dict[str, object] = {"type": f"{measure.metric} ({_origin(measure.origin)})", "value": f"{measure.value:.6g}"}
    if measure.interval is not None:
        bounds = {"lowerBound": f"{measure.interval.lower:.6g}", "upperBound": f"{measure.interval.upper:.6g}"}
        entry["confidenceInterval"] = bounds
    return entry


def _origin(origin: Origin) -> str:
    return origin.value.replace("_", " ")
