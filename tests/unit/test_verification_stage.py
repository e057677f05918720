"""The whole stage on tiny real models: an equal one passes, a damaged one is rejected, a short sample stays open."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_optimizer.artifacts.base import Produced, StageArtifact, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel, Engine, Parity
from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.verification import Verification
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.spec import Cost, Lengths, Sla, Traffic
from model_optimizer.store import Store, canonical_json, stage_key
from model_optimizer.verification.config import SoakConfig, VerifyConfig
from model_optimizer.verification.stage import VerifyInputs, verify_quality

KV = KvPlan(page_tokens=16, num_pages=128, bytes_per_token=512, max_batch=4, max_model_len=128)
CONFIG = VerifyConfig(golden_sets=("x",), latency_requests=10, soak=SoakConfig(duration=0.3, segment=0.3))
TRAFFIC = Traffic(prompt_tokens=Lengths(p50=8, p95=16, max=24), output_tokens=Lengths(p50=3, p95=5, max=6))


def stored(artifact: StageArtifact, directory: Path, key: str) -> Stored:
    produced = Produced(started_at="2026-01-01T00:00:00+00:00", wall_s=0, peak_rss_bytes=0)
    return Stored[type(artifact)](kind="k", key=key, artifact=artifact, directory=directory, produced=produced, cached=False)


def compiled(directory: Path, key: str, recipe: WeightRecipe = WeightRecipe(), num_bytes: int = 1000) -> Stored[CompiledModel]:
    parity = Parity(
        max_abs_logit_difference=0, mean_kl_nats=0, top1_agreement_ratio=1, greedy_tokens_equal=True,
        num_tokens=1, tolerance_kl_nats=1, passed=True,
    )  # fmt: skip
    engine = Engine(runtime="torch", directory=directory.name, num_bytes=num_bytes, framework_version=framework_version("torch"))
    artifact = CompiledModel(
        strategy=Strategy(weights=recipe, runtime="torch"), engine=engine, parity=parity,
        level=0, layout="layout.json", reproduce=None, build_s=0,
    )  # fmt: skip
    return stored(artifact, directory.parent, key)


def damage(source: Path, target: Path) -> Path:
    """Copy a model with every matrix rounded to four values."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            step = tensor.abs().max() / 1.5
            weights[name] = ((tensor / step - 0.5).round().clamp(-2, 1) + 0.5) * step
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def write_known_items(directory: Path, model: Path, num: int) -> Tree:
    """Write items whose answer the model gives nine times in ten, as found by transformers alone."""
    directory.mkdir()
    card = {
        "name": directory.name,
        "version": "1",
        "description": "d",
        "provenance": "p",
        "licence": "CC0-1.0",
        "languages": ["en"],
    }
    (directory / "card.yaml").write_text(yaml.safe_dump(card))
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    lines = []
    for number in range(num):
        prompt, choices = f"item {number * 7919}", [" a", " b"]
        head = tokenizer.encode(prompt)
        tails = [tokenizer.encode(choice, add_special_tokens=False) for choice in choices]
        with torch.no_grad():
            logits = [torch.log_softmax(network(torch.tensor([head + tail])).logits[0], -1) for tail in tails]
        sums = [
            sum(float(rows[len(head) - 1 + at, token]) for at, token in enumerate(tail))
            for rows, tail in zip(logits, tails, strict=True)
        ]
        liked = max(range(2), key=sums.__getitem__)
        item = {"id": str(number), "prompt": prompt, "choices": choices, "answer": liked if number % 10 else 1 - liked}
        lines.append(json.dumps(item))
    (directory / "items.jsonl").write_text("\n".join(lines))
    return Tree.of(directory)


def write_calibration(path: Path, extra: str = "") -> CalibrationSource:
    texts = [f"Sentence number {number} speaks of something {'new ' * (number % 7)}every time." for number in range(24)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, *([extra] if extra else [])]))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


@pytest.fixture(scope="module")
def inputs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> VerifyInputs:
    """Baseline and an equal copy of it, judged on 200 items."""
    root = tmp_path_factory.mktemp("verify")
    shutil.copytree(tiny_llama, root / "copy")
    memory = MemoryPlan(
        kv=KV, budget=(), planned_concurrency=2, capacity_requests=8, ran_concurrency=2,
        predicted_peak_bytes=2**30, measured_peak_bytes=2**29, config="kv_cache_config.json",
    )  # fmt: skip
    return VerifyInputs(
        fingerprint="f",
        engine=compiled(root / "copy", "copy"),
        baseline=compiled(tiny_llama, "base"),
        memory=stored(memory, root, "memory"),
        model=Tree.of(tiny_llama),
        golden=(write_known_items(root / "known", tiny_llama, 200),),
        calibration=write_calibration(root / "text.jsonl"),
        sla=Sla(concurrency=2, max_model_len=128, accuracy_loss_ratio=0.02),
        traffic=TRAFFIC,
        cost=Cost(machine_usd_per_hour=0.5),
        config=CONFIG,
    )


def measure_of(found: Verification, name: str) -> Measure:
    return next(measure for measure in found.measures if measure.name == name)


def test_verify_quality_accepts_an_equal_model(inputs: VerifyInputs, tmp_path: Path) -> None:
    found = verify_quality(inputs, tmp_path, progress=Quiet())
    assert found.dimensions[Dimension.ACCURACY] is Verdict.ACCEPT
    assert found.dimensions[Dimension.RESOURCE] is Verdict.ACCEPT
    assert found.dimensions[Dimension.ROBUSTNESS] is Verdict.ACCEPT
    pooled = found.golden[0]
    assert (pooled.num_items, pooled.num_gained, pooled.num_lost) == (200, 0, 0)
    assert pooled.baseline_ratio == pytest.approx(0.9)
    assert measure_of(found, "held_out_kl").value == pytest.approx(0.0, abs=1e-9)
    assert measure_of(found, "held_out_perplexity_ratio").value == pytest.approx(1.0, abs=1e-6)
    assert measure_of(found, "cost").origin is Origin.PREDICTED
    assert {measure.dimension for measure in found.measures} == set(Dimension)
    table = pq.read_table(tmp_path / found.samples)
    assert set(table["part"].to_pylist()) == {"golden", "held_out", "latency", "soak"}
    assert sum(part == "golden" for part in table["part"].to_pylist()) == 2 * 2 * 200


def test_verify_quality_rejects_a_damaged_model(inputs: VerifyInputs, tmp_path: Path) -> None:
    recipe = WeightRecipe(method="rtn", formats=("int4-g64",))
    broken = compiled(damage(inputs.model.path, tmp_path / "broken"), "broken", recipe, num_bytes=500)
    found = verify_quality(inputs.model_copy(update={"engine": broken}), tmp_path, progress=Quiet())
    assert found.verdict is Verdict.REJECT
    assert found.dimensions[Dimension.ACCURACY] is Verdict.REJECT
    assert found.golden[0].num_lost > found.golden[0].num_gained + 10
    assert measure_of(found, "golden_change").interval.upper < -0.02
    assert measure_of(found, "held_out_kl").value > 0.1
    assert measure_of(found, "engine").verdict is Verdict.ACCEPT


def test_verify_quality_neither_times_nor_soaks_what_is_rejected_for_accuracy(inputs: VerifyInputs, tmp_path: Path) -> None:
    broken = compiled(damage(inputs.model.path, tmp_path / "broken"), "broken")
    found = verify_quality(inputs.model_copy(update={"engine": broken}), tmp_path, progress=Quiet())
    assert (found.latency, found.soak.ran_s) == ((), 0)
    assert {name: measure_of(found, name).origin for name in ("throughput", "cost", "soak")} == dict.fromkeys(
        ("throughput", "cost", "soak"), Origin.NOT_MEASURED
    )
    assert found.dimensions[Dimension.SPEED] is found.dimensions[Dimension.ROBUSTNESS] is Verdict.INCONCLUSIVE
    assert found.verdict is Verdict.REJECT
    assert set(pq.read_table(tmp_path / found.samples)["part"].to_pylist()) == {"golden", "held_out"}


def test_verify_quality_is_inconclusive_when_the_set_is_short(inputs: VerifyInputs, tiny_llama: Path, tmp_path: Path) -> None:
    short = write_known_items(tmp_path / "short", tiny_llama, 40)
    found = verify_quality(inputs.model_copy(update={"golden": (short,)}), tmp_path, progress=Quiet())
    assert found.dimensions[Dimension.ACCURACY] is Verdict.INCONCLUSIVE
    assert found.verdict in (Verdict.INCONCLUSIVE, Verdict.REJECT)
    assert measure_of(found, "golden_change").samples_needed > 50


def test_verify_quality_takes_the_baseline_itself_as_choice_and_resumes_from_the_store(
    inputs: VerifyInputs, tmp_path: Path
) -> None:
    same = inputs.model_copy(update={"engine": inputs.baseline})
    store = Store(tmp_path)
    key = stage_key(same)
    entry = store.produce("verify", key, Verification, lambda workspace: verify_quality(same, workspace, progress=Quiet()))
    assert entry.artifact.verdict is Verdict.ACCEPT
    again = Store(tmp_path).produce("verify", key, Verification, lambda _: pytest.fail("was made again"))
    assert again.cached and again.artifact == entry.artifact
    (entry.directory / "artifact.json").unlink()
    resumed = Store(tmp_path).produce(
        "verify", key, Verification, lambda workspace: verify_quality(same, workspace, progress=Quiet())
    )
    assert resumed.artifact.golden == entry.artifact.golden and resumed.artifact.soak == entry.artifact.soak


def test_verify_quality_refuses_a_set_that_was_calibrated_on(inputs: VerifyInputs, tmp_path: Path) -> None:
    item = json.loads((inputs.golden[0].path / "items.jsonl").read_text().splitlines()[7])
    source = write_calibration(tmp_path / "leaky.jsonl", extra=f"{item['prompt'].upper()}: {item['choices'][item['answer']]}!")
    with pytest.raises(ConfigError, match="calibration text 25"):
        verify_quality(inputs.model_copy(update={"calibration": source}), tmp_path, progress=Quiet())


def test_stage_key_ignores_the_names_of_sets_and_sees_their_content(inputs: VerifyInputs) -> None:
    renamed = inputs.model_copy(update={"config": CONFIG.model_copy(update={"golden_sets": ("y",)})})
    assert stage_key(renamed) == stage_key(inputs)
    other = inputs.model_copy(update={"golden": (Tree(digest="0" * 64, path=inputs.golden[0].path),)})
    assert stage_key(other) != stage_key(inputs)
    assert str(inputs.model.path) not in canonical_json(inputs).decode()
