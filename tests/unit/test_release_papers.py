"""What a bundle says of its origin: provenance, bill of materials and model card, each held against what it was made from."""

import json
from pathlib import Path

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from huggingface_hub import ModelCard
from release_fixtures import make_inputs, package
from report_fixtures import NUM_PARAMETERS

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.paths import data_directory
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.release.model_card import source_license
from model_optimizer.release.stage import PackageInputs
from model_optimizer.release.verify import verify_bundle

Made = tuple[PackageInputs, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Made:
    """One release; its inputs and the folder with its bundles."""
    root = tmp_path_factory.mktemp("papers")
    inputs = make_inputs(root, tiny_llama)
    package(inputs, root)
    return inputs, root / "bundles"


def statement(made: Made, bundle: str = "chat-v1") -> dict[str, dict]:  # type: ignore[type-arg]
    return json.loads((made[1] / bundle / "provenance.json").read_bytes())  # type: ignore[no-any-return]


def bill(made: Made, bundle: str = "chat-v1") -> dict:  # type: ignore[type-arg]
    return json.loads((made[1] / bundle / "sbom.cdx.json").read_bytes())  # type: ignore[no-any-return]


def card(made: Made, bundle: str = "chat-v1") -> ModelCard:
    return ModelCard((made[1] / bundle / "model" / "README.md").read_text())


def test_provenance_is_an_in_toto_statement_with_slsa_predicate(made: Made) -> None:
    document = statement(made)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert set(document["predicate"]) == {"buildDefinition", "runDetails"}
    assert {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"} == set(
        document["predicate"]["buildDefinition"]
    )


def test_provenance_names_digests_hardware_stages_and_times(made: Made) -> None:
    inputs, _ = made
    definition, details = (statement(made)["predicate"][part] for part in ("buildDefinition", "runDetails"))
    digests = {it["name"]: next(iter(it["digest"].values())) for it in definition["resolvedDependencies"]}
    assert digests == {
        "source": "0" * 40,
        "lock of libraries": file_sha256(data_directory("constraints") / "cpu.txt"),
        "model": inputs.model.digest,
        "calibration": "c" * 64,
        "golden set everyday-facts": inputs.golden[0].digest,
    }
    assert definition["internalParameters"]["hardware"]["name"] == "Example Xeon"
    assert definition["internalParameters"]["stage_keys"] == inputs.stage_keys
    assert definition["externalParameters"]["seeds"] == {"calibration": 0, "verify": 7}
    assert details["metadata"]["startedOn"] == "2026-11-29T20:00:00+00:00"
    assert details["metadata"]["finishedOn"] == "2026-11-29T20:00:12+00:00"
    assert [it["name"] for it in details["byproducts"]] == [f"stage {stage}" for stage in inputs.stage_keys]


@pytest.mark.parametrize("bundle", ["chat-v0", "chat-v1"])
def test_bill_of_materials_is_valid_cyclonedx(made: Made, bundle: str) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill(made, bundle))) is None


def test_bill_of_materials_names_model_files_data_and_locked_libraries(made: Made) -> None:
    document = bill(made)
    model = document["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == ("machine-learning-model", "chat", "1")
    files = {it["name"]: it["hashes"][0]["content"] for it in model["components"]}
    assert files["model/model.safetensors"] == file_sha256(made[1] / "chat-v1" / "model" / "model.safetensors")
    assert set(files) == {
        path.relative_to(made[1] / "chat-v1").as_posix() for path in (made[1] / "chat-v1" / "model").rglob("*") if path.is_file()
    }
    by_type: dict[str, set[str]] = {}
    for component in document["components"]:
        by_type.setdefault(component["type"], set()).add(component["name"])
    assert by_type["data"] == {"calibration data", "everyday-facts"}
    lock = (data_directory("constraints") / "cpu.txt").read_text().split()
    assert len(by_type["library"]) == sum("==" in line for line in lock)
    torch = next(it for it in document["components"] if it["name"] == "torch")
    assert torch["purl"].startswith("pkg:pypi/torch@2.")
    assert len(next(it for it in document["dependencies"] if it["ref"] == "model")["dependsOn"]) == len(document["components"])


def test_bill_of_materials_says_where_figures_come_from_and_what_is_missing(made: Made) -> None:
    card = bill(made)["metadata"]["component"]["modelCard"]
    figures = {it["type"]: it for it in card["quantitativeAnalysis"]["performanceMetrics"] if "slice" not in it}
    assert figures["speed/p95_latency_ms (measured)"]["value"] == "1233"
    assert figures["speed/p95_latency_ms (measured)"]["confidenceInterval"] == {"lowerBound": "1147", "upperBound": "1344"}
    assert figures["speed/ttft_model_ms (predicted)"]["value"] == "66"
    assert not any("energy" in name for name in figures)
    limits = card["considerations"]["technicalLimitations"]
    assert "resource/energy_per_token_j was not measured: this machine exposes no energy counter" in limits
    assert {"name": "model-optimizer-pipeline:num_parameters", "value": str(NUM_PARAMETERS)} in card["properties"]


def test_papers_are_the_same_for_the_same_inputs(made: Made, tmp_path: Path, tiny_llama: Path) -> None:
    """Only the signature draws randomness; serial number and times follow from the inputs."""
    root = tmp_path / "again"
    inputs = make_inputs(root, tiny_llama)
    package(inputs, root)
    for place in ("sbom.cdx.json", "provenance.json", "model/README.md", MANIFEST):
        assert (root / "bundles" / "chat-v1" / place).read_bytes() == (made[1] / "chat-v1" / place).read_bytes(), place


def test_model_card_carries_evaluation_results_that_were_measured(made: Made) -> None:
    data = card(made).data
    results = {(it.dataset_name, it.metric_type): it.metric_value for it in data.eval_results or []}
    assert results[("everyday-facts", "choice_accuracy")] == pytest.approx(0.606)
    assert results[("sentence-sense", "choice_accuracy")] == pytest.approx(0.614)
    assert (data.quantized_by, data.pipeline_tag, data.library_name) == (
        "model-optimizer-pipeline",
        "text-generation",
        "onnxruntime",
    )
    assert data.base_model is None and data.license is None  # package:tiny is no hub id, and it has no card
    baseline = {it.dataset_name: it.metric_value for it in card(made, "chat-v0").data.eval_results or []}
    assert baseline["everyday-facts"] == pytest.approx(0.612)


def test_model_card_says_what_was_not_measured_and_what_is_unknown(made: Made) -> None:
    text = card(made).text
    assert "| resource/energy_per_token_j | not measured |  |  |  | not measured |" in text
    assert "| speed/ttft_model_ms | 66 |  |  |  | predicted |" in text
    assert "License: not stated by the source model" in text
    assert "- the soak lasted 60 s of the 86400 s that final sign-off needs" in text
    assert "chinese &lt;zh>" in text


def test_model_card_of_the_baseline_claims_nothing_of_the_candidate(made: Made) -> None:
    text = card(made, "chat-v0").text
    assert "the unquantized baseline" in text and "| speed/p95_latency_ms | 1850 |" in text and "1233" not in text


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# M", "apache-2.0"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: 'x: |'\n---\n", None),
        ("---\n{{{\n---\n", None),
        ("# no front matter", None),
    ],
)
def test_source_license_is_what_the_source_states(tmp_path: Path, front: str, expected: str | None) -> None:
    (tmp_path / "README.md").write_text(front)
    assert source_license(tmp_path) == expected
    assert source_license(tmp_path / "nowhere") is None


def test_model_card_names_a_base_model_of_the_hub(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama).model_copy(update={"model_ref": "example/tiny-1B"})
    package(inputs, tmp_path)
    front = (tmp_path / "bundles" / "chat-v1" / "model" / "README.md").read_text().split("---")[1]
    data = yaml.safe_load(front)
    assert (data["base_model"], data["base_model_relation"]) == ("example/tiny-1B", "quantized")
    assert data["model-index"][0]["name"] == "chat-v1"


def test_package_release_numbers_a_name_that_says_its_strategy(tmp_path: Path, tiny_llama: Path) -> None:
    """The strategy in a name is up to the profile; numbers follow it, and a longer name's versions do not count."""
    name = "chat-13b-awq-int4"
    inputs = make_inputs(tmp_path, tiny_llama).model_copy(update={"name": name})
    (tmp_path / "bundles" / f"{name}-v2-v7").mkdir(parents=True)
    assert package(inputs, tmp_path).bundle == f"{name}-v1"
    for path in (tmp_path / "work").iterdir():
        path.unlink()
    assert package(inputs, tmp_path).bundle == f"{name}-v2"
    facts = verify_bundle(tmp_path / "bundles" / f"{name}-v2", public_key=tmp_path / "keys" / "key.pem.pub")
    assert facts.name == f"{name}-v2"
    assert bill((inputs, tmp_path / "bundles"), f"{name}-v2")["metadata"]["component"]["name"] == name
