"""The scan end to end on a tiny model: real checkpoints, real engines of both runtimes, real rounds."""

import json
from pathlib import Path

import pytest
from test_memory_stage import PRODUCED

from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.artifacts.target import DeviceFacts, TargetProfile
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.models.facts import read_facts
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.spec import Lengths, Sla, Traffic
from model_optimizer.store import Store, stage_key
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.entries import compile_inputs, quantize_inputs, quantized_entry
from model_optimizer.strategy.scan import ScanInputs, scan_pareto

TRAFFIC = Traffic(prompt_tokens=Lengths(p50=8, p95=16, max=24), output_tokens=Lengths(p50=6, p95=10, max=12))
DEVICE = DeviceFacts(
    kind="cpu",
    name="test",
    num_cores=2,
    instruction_sets=(),
    cache_bytes={},
    memory_bytes=8 * 2**30,
    memory_free_bytes=8 * 2**30,
    copy_bytes_per_s=1e10,
    read_bytes_per_s=1e10,
    matmul_flop_per_s=1e12,
)


def scan_inputs(model: Path, folder: Path) -> ScanInputs:
    """Return a scan of both runtimes whose KL limit rules nothing out."""
    words = ["the", "scan", "measures", "what", "a", "prediction", "cannot", "decide", "and", "says", "why"]
    lines = [{"text": " ".join(words[i % 7 :] + words[: i % 5] + [str(i * 7919)])} for i in range(24)]
    calibration = folder / "calibration.jsonl"
    calibration.write_text("\n".join(json.dumps(line) for line in lines))
    target = TargetProfile(device=DEVICE, model=read_facts(model), budget=(), decision_table=(), questions=())
    return ScanInputs(
        fingerprint="test",
        model=Tree.of(model),
        target=Stored[TargetProfile](
            kind="profile", key="1" * 64, artifact=target, directory=model, produced=PRODUCED, cached=False
        ),
        sla=Sla(concurrency=2, max_model_len=128),
        traffic=TRAFFIC,
        config=ScanConfig(bits=(8, 32), kl_tokens=256, rounds=3, max_kl_nats=10),
        quantization=QuantizationConfig(kl_breaker_nats=100),
        compile=CompileConfig(),
        calibration=CalibrationSource.of(CalibrationConfig(path=calibration, num_samples=16, min_length=4), folder),
    )


def produce(inputs: ScanInputs, store: Store) -> Stored[ParetoFront]:
    return store.produce(
        Stage.SCAN,
        stage_key(inputs),
        ParetoFront,
        lambda workspace: scan_pareto(inputs, workspace, store=store, progress=Quiet()),
    )


Scanned = tuple[ScanInputs, Store, Stored[ParetoFront]]


@pytest.fixture(scope="module")
def scanned(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Scanned:
    folder = tmp_path_factory.mktemp("scan")
    inputs, store = scan_inputs(tiny_llama, folder), Store(folder / "store")
    return inputs, store, produce(inputs, store)


def test_scan_pareto_measures_what_pruning_leaves(scanned: Scanned) -> None:
    front = scanned[2].artifact
    measured = {it.strategy.label for it in front.candidates if it.measures}
    assert measured == {"float32/torch", "float32/onnxruntime", "int8-channel-rtn/onnxruntime"}
    pruned = {it.strategy.label: it.pruned_because or "" for it in front.candidates if not it.measures}
    assert set(pruned) == {"int8-channel-rtn/torch"}
    assert "predicted dominated by float32/" in pruned["int8-channel-rtn/torch"]


def test_scan_pareto_finds_quantization_to_hurt_and_engines_to_agree(scanned: Scanned) -> None:
    kl = {
        it.strategy.label: measure.value
        for it in scanned[2].artifact.candidates
        for measure in it.measures
        if measure.name == "kl" and measure.value is not None
    }
    assert kl["float32/torch"] == 0
    assert kl["float32/onnxruntime"] < 1e-6
    assert 100 * kl["float32/onnxruntime"] < kl["int8-channel-rtn/onnxruntime"] < 0.05


def test_scan_pareto_states_one_baseline_with_ratio_one(scanned: Scanned) -> None:
    front = scanned[2].artifact
    assert not front.baseline.weights.quantized
    assert front.candidate(front.baseline).speed_ratio == pytest.approx(1.0)
    assert front.candidate(front.choice).feasible
    assert {ref.path for ref in front.files} == {"pareto.svg", "damage.jsonl", "rounds.jsonl"}


def test_scan_pareto_leaves_the_entries_that_later_stages_ask_for(scanned: Scanned) -> None:
    inputs, store, front = scanned
    choice = front.artifact.choice
    wanted = quantize_inputs(inputs.ingredients, choice.weights)
    quantized = store.find(Stage.QUANTIZE, stage_key(wanted), QuantizedModel)
    assert quantized is not None
    compiled = store.find(Stage.COMPILE, stage_key(compile_inputs(inputs.ingredients, choice, quantized)), CompiledModel)
    assert compiled is not None and compiled.artifact.strategy == choice


def test_scan_pareto_resumes_from_a_torn_journal(scanned: Scanned, tmp_path: Path) -> None:
    inputs, store, first = scanned
    damage, rounds = ((first.directory / name).read_bytes() for name in ("damage.jsonl", "rounds.jsonl"))
    (tmp_path / "damage.jsonl").write_bytes(damage[:-10])
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(rounds.splitlines(keepends=True)[:2]))
    again = scan_pareto(inputs, tmp_path, store=store, progress=Quiet())
    assert (tmp_path / "damage.jsonl").read_bytes().splitlines()[:3] == damage.splitlines()[:3]
    assert (tmp_path / "rounds.jsonl").read_bytes().splitlines()[:2] == rounds.splitlines()[:2]
    assert len((tmp_path / "rounds.jsonl").read_bytes().splitlines()) == 1 + 3
    kept = {it.strategy.label: (it.predicted, it.pruned_because) for it in first.artifact.candidates}
    assert {it.strategy.label: (it.predicted, it.pruned_because) for it in again.candidates} == kept


def test_quantized_entry_is_a_hit_after_the_scan(scanned: Scanned) -> None:
    inputs, store, _ = scanned
    recipe = WeightRecipe(method="rtn", formats=("int8-channel",))
    assert quantized_entry(inputs.ingredients, recipe, store=store, progress=Quiet()).cached


def test_scan_pareto_takes_the_pinned_precision_in_its_better_method_whatever_the_limit_says(
    scanned: Scanned, tmp_path: Path
) -> None:
    inputs, store, _ = scanned
    config = inputs.config.model_copy(update={"methods": ("rtn", "gptq"), "max_kl_nats": 1e-9, "runtimes": ("onnxruntime",)})
    quantization = inputs.quantization.model_copy(update={"default_precision": "int2-g32"})
    pinned = inputs.model_copy(update={"config": config, "quantization": quantization})
    front = scan_pareto(pinned, tmp_path, store=store, progress=Quiet())
    assert [it.strategy.label for it in front.candidates] == [
        "float32/onnxruntime",
        "int2-g32-rtn/onnxruntime",
        "int2-g32-gptq/onnxruntime",
    ]
    assert front.choice.weights.formats == ("int2-g32",) and front.baseline.label == "float32/onnxruntime"
    assert any(warning.startswith("the profile pins int2-g32; int2-g32-") for warning in front.warnings)
    kl = {it.strategy.weights.method: m.value or 0 for it in front.candidates for m in it.measures if m.name == "kl"}
    assert kl["none"] < 1e-6 < kl["gptq"] < 0.8 * kl["rtn"]
    guesses = {it.strategy.weights.method: it.predicted.kl_upper_guess for it in front.candidates}
    assert guesses["rtn"] is None and "gptq mends" in (guesses["gptq"] or "")


def test_scan_pareto_measures_the_pinned_precision_where_a_runtime_gains_nothing_by_it(scanned: Scanned, tmp_path: Path) -> None:
    inputs, store, _ = scanned
    config = inputs.config.model_copy(update={"runtimes": ("torch",)})
    quantization = inputs.quantization.model_copy(update={"default_precision": "int8-channel"})
    pinned = inputs.model_copy(update={"config": config, "quantization": quantization})
    front = scan_pareto(pinned, tmp_path, store=store, progress=Quiet())
    assert front.choice.label == "int8-channel-rtn/torch"
    assert not any("pins" in warning for warning in front.warnings)


def test_scan_pareto_leaves_out_a_budget_that_the_breaker_makes_impossible(scanned: Scanned, tmp_path: Path) -> None:
    inputs, store, _ = scanned
    config = inputs.config.model_copy(update={"bits": (3.5, 32), "runtimes": ("onnxruntime",)})
    quantization = inputs.quantization.model_copy(update={"kl_breaker_nats": 1e-9})
    tight = inputs.model_copy(update={"config": config, "quantization": quantization})
    front = scan_pareto(tight, tmp_path, store=store, progress=Quiet())
    assert [it.strategy.label for it in front.candidates] == ["float32/onnxruntime"]
    left_out = next(it for it in front.decisions if it.subject == "mixed-3.5bits-rtn")
    assert left_out.choice == "left out of the space" and "cannot hold the layers" in left_out.because
