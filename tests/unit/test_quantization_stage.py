"""The quantize stage end to end on a tiny model: plans, budgets, demands, the breaker, proofs, resuming."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.measure import Origin
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.errors import ConfigError, IntegrityError, UnsupportedError
from model_optimizer.formats.compressed_tensors import read_plan
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.coverage import measure_coverage, require_coverage
from model_optimizer.quantization.layers import read_layers, tie_groups
from model_optimizer.quantization.parts import Parts
from model_optimizer.quantization.shared import QuantizeInputs, shared_sensitivity
from model_optimizer.quantization.stage import CHECKPOINT, PARTS, quantize
from model_optimizer.store import Store, stage_key

INT8 = WeightRecipe(method="rtn", formats=("int8-channel",))
INT4 = WeightRecipe(method="rtn", formats=("int4-g64",))
LOOSE = {"kl_breaker_nats": 1e9, "sensitivity_sequences": 4, "sensitivity_tokens": 64}


def mixed(bits: float) -> WeightRecipe:
    return WeightRecipe(method="rtn", formats=("int4-g64", "int8-channel"), bits_budget=bits)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(12)))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def make_inputs(model: Path, calibration: CalibrationSource, recipe: WeightRecipe, **config: object) -> QuantizeInputs:
    settings = QuantizationConfig.model_validate(LOOSE | config)
    return QuantizeInputs(fingerprint="test", model=Tree.of(model), recipe=recipe, calibration=calibration, config=settings)


def produce(store: Store, inputs: QuantizeInputs) -> Stored[QuantizedModel]:
    return store.produce(
        Stage.QUANTIZE,
        stage_key(inputs),
        QuantizedModel,
        lambda workspace: quantize(inputs, workspace, store=store, progress=Quiet()),
    )


def measure(artifact: QuantizedModel, name: str) -> float | None:
    return next(measure.value for measure in artifact.measures if measure.name == name)


@pytest.mark.parametrize(("recipe", "bits"), [(INT8, 8 + 16 * 576 / 73728), (INT4, 4.25)])
def test_quantize_stores_every_linear_layer(
    recipe: WeightRecipe, bits: float, store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    inputs = make_inputs(tiny_llama, calibration, recipe)
    stored = produce(store, inputs)
    artifact, format_name = stored.artifact, recipe.formats[0]
    assert read_plan(stored.directory / CHECKPOINT) == {layer.layer: format_name for layer in artifact.plan}
    assert len(artifact.plan) == 14 and artifact.checkpoint == CHECKPOINT
    num_rows = sum(layer.out_features for layer in read_layers(tiny_llama).linears)
    assert artifact.coverage.quantized_weights_ratio == 1.0
    expected_bits = 4.25 if format_name == "int4-g64" else 8 + 16 * num_rows / sum(layer.num_weights for layer in artifact.plan)
    assert artifact.coverage.true_bits_per_weight == pytest.approx(expected_bits)
    assert sum(layer.num_bytes for layer in artifact.plan) * 8 == pytest.approx(
        expected_bits * sum(layer.num_weights for layer in artifact.plan)
    )
    assert measure(artifact, "weight_bytes") == artifact.coverage.checkpoint_bytes
    sensitivity = shared_sensitivity(inputs, store, progress=Quiet()).artifact
    total = sum(layer.predicted_kl_nats for layer in artifact.plan)
    assert artifact.predicted_kl_nats == pytest.approx(sensitivity.total_kl_nats(total))
    predicted = next(it for it in artifact.measures if it.name == "predicted_kl")
    assert predicted.origin is Origin.PREDICTED and predicted.value == artifact.predicted_kl_nats > 0


def test_quantize_checkpoint_computes_the_same_as_fake_quantization(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    stored = produce(store, make_inputs(tiny_llama, calibration, mixed(6.0)))
    model, tokens = load_dequantized(tiny_llama), torch.arange(4, 60)[None]
    with torch.no_grad():
        for layer in stored.artifact.plan:
            weight_OI = model.get_parameter(f"{layer.layer}.weight")
            weight_OI.copy_(FORMATS.get(layer.format).round_trip(weight_OI))
        difference = load_dequantized(stored.directory / CHECKPOINT)(tokens).logits - model(tokens).logits
    assert difference.abs().max().item() < 1e-5


def test_quantize_measures_sensitivity_once_for_all_recipes(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    for recipe in (INT8, INT4, mixed(5.0)):
        produce(store, make_inputs(tiny_llama, calibration, recipe))
    assert len([path for path in (store.root / "sensitivity").iterdir() if path.is_dir()]) == 1


def test_quantize_skips_an_unquantized_recipe(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    artifact = produce(store, make_inputs(tiny_llama, calibration, WeightRecipe())).artifact
    assert artifact.skipped_because and artifact.checkpoint is None and artifact.files == ()
    assert artifact.coverage.true_bits_per_weight == 32.0
    assert measure(artifact, "weight_bytes") == 362752


@pytest.mark.parametrize("bits", [4.5, 5.0, 6.0, 7.5])
def test_quantize_keeps_the_budget_and_ties_fused_layers(
    bits: float, store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    artifact = produce(store, make_inputs(tiny_llama, calibration, mixed(bits))).artifact
    chosen = {layer.layer: layer.format for layer in artifact.plan}
    assert 4.25 <= artifact.coverage.true_bits_per_weight <= bits
    for block in ("model.layers.0", "model.layers.1"):
        assert len({chosen[f"{block}.self_attn.{leaf}"] for leaf in ("q_proj", "k_proj", "v_proj")}) == 1
        assert len({chosen[f"{block}.mlp.{leaf}"] for leaf in ("gate_proj", "up_proj")}) == 1
    uniform = produce(store, make_inputs(tiny_llama, calibration, INT4)).artifact
    assert artifact.predicted_kl_nats <= uniform.predicted_kl_nats
    budget = next(decision for decision in artifact.decisions if decision.subject == "bit budget")
    assert budget.numbers["used_bytes"] == sum(layer.num_bytes for layer in artifact.plan) <= budget.numbers["budget_bytes"]


@pytest.mark.parametrize(("method", "looks"), [("rtn", True), ("gptq", False)])
def test_quantize_looks_again_at_a_mix_only_where_plain_rounding_writes_it(
    method: str, looks: bool, store: Store, tiny_llama: Path, calibration: CalibrationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_optimizer.quantization.stage.LEAST_NATS", 0.0)
    recipe = mixed(5.5).model_copy(update={"method": method})
    artifact = produce(store, make_inputs(tiny_llama, calibration, recipe, moments_sequences=2)).artifact
    decision = next(it for it in artifact.decisions if it.subject == "bit budget")
    assert ("second look" in decision.because) is looks


def test_quantize_refuses_a_budget_below_the_cheapest_format(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    with pytest.raises(UnsupportedError, match="raise bits_budget"):
        produce(store, make_inputs(tiny_llama, calibration, mixed(4.0)))


def test_quantize_refuses_a_group_that_does_not_divide(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    recipe = WeightRecipe(method="rtn", formats=("int4-g128",))
    with pytest.raises(UnsupportedError, match=r"q_proj: in_features 64 is not divisible by group 128"):
        produce(store, make_inputs(tiny_llama, calibration, recipe))


def test_breaker_keeps_full_precision_for_a_tied_group_and_says_so(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    free = {layer.layer: layer for layer in produce(store, make_inputs(tiny_llama, calibration, INT4)).artifact.plan}
    ranked = sorted(free.values(), key=lambda layer: layer.predicted_kl_nats)
    limit = (ranked[-1].predicted_kl_nats + ranked[-2].predicted_kl_nats) / 2
    artifact = produce(store, make_inputs(tiny_llama, calibration, INT4, kl_breaker_nats=limit)).artifact
    kept = {layer.layer for layer in artifact.plan if layer.format == "float32"}
    assert ranked[-1].layer in kept and all(layer.reason == "KL breaker" for layer in artifact.plan if layer.layer in kept)
    tripped = next(decision for decision in artifact.decisions if decision.subject == ranked[-1].layer)
    assert tripped.choice == "float32 instead of int4-g64"
    assert tripped.numbers["kl_nats"] == pytest.approx(ranked[-1].predicted_kl_nats)
    assert tripped.numbers["num_layers_tied"] == len(kept)
    assert artifact.coverage.quantized_weights_ratio == 1.0


def test_breaker_takes_a_dearer_format_where_the_recipe_has_one(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    plan = produce(store, make_inputs(tiny_llama, calibration, INT4)).artifact.plan
    worst = max(plan, key=lambda layer: layer.predicted_kl_nats)
    config = {"kl_breaker_nats": worst.predicted_kl_nats * 0.99}
    artifact = produce(store, make_inputs(tiny_llama, calibration, mixed(6.0), **config)).artifact
    assert next(layer.format for layer in artifact.plan if layer.layer == worst.layer) == "int8-channel"


@pytest.mark.parametrize("share", [0.6, 0.05])
def test_kl_budget_raises_layers_for_the_fewest_bytes(
    share: float, store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    free = produce(store, make_inputs(tiny_llama, calibration, INT4)).artifact
    limit = share * free.predicted_kl_nats
    inputs = make_inputs(tiny_llama, calibration, INT4, kl_budget_nats=limit)
    kept = produce(store, inputs).artifact
    assert kept.predicted_kl_nats <= limit < free.predicted_kl_nats
    by_layer = {layer.layer: layer for layer in shared_sensitivity(inputs, store, progress=Quiet()).artifact.layers}
    groups = tie_groups(read_layers(tiny_llama).linears)
    costs = [
        (sum(it.num_weights for it in group), sum(by_layer[it.name].predicted_kl_nats["int4-g64"] for it in group))
        for group in groups
    ]
    total = sum(layer.predicted_kl_nats for layer in kept.plan)
    raised = {layer.layer for layer in kept.plan if layer.format == "float32"}
    assert {layer.layer for layer in kept.plan if layer.reason == "KL budget"} == raised
    fewest = min(
        sum(weights for chosen, (weights, _) in zip(choice, costs, strict=True) if chosen)
        for choice in itertools.product((False, True), repeat=len(costs))
        if sum(kl for chosen, (_, kl) in zip(choice, costs, strict=True) if not chosen) <= total * (1 + 1e-9)
    )
    assert sum(layer.num_weights for layer in kept.plan if layer.format == "float32") == fewest
    decision = next(it for it in kept.decisions if it.subject == "KL budget")
    assert decision.numbers["predicted_after_nats"] == pytest.approx(kept.predicted_kl_nats)


def test_suspects_are_layers_below_the_cosine_floor(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    artifact = produce(store, make_inputs(tiny_llama, calibration, INT4, cosine_floor=0.9965)).artifact
    assert [layer.suspect for layer in artifact.plan] == [layer.output_cosine < 0.9965 for layer in artifact.plan]
    named = {decision.subject for decision in artifact.decisions if decision.choice.startswith("suspect")}
    assert named == {layer.layer for layer in artifact.plan if layer.suspect}


def test_overrides_and_skips_are_obeyed_and_logged(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    config = {
        "skip_layers": ("layers.0.mlp.down_proj",),
        "layer_overrides": (
            {"layers": ("self_attn",), "precision": "int8-channel"},
            {"layers": ("lm_head",), "precision": "float32"},
        ),
    }
    artifact = produce(store, make_inputs(tiny_llama, calibration, INT4, **config)).artifact
    for layer in artifact.plan:
        expected = "int4-g64"
        if "self_attn" in layer.layer:
            expected = "int8-channel"
        elif layer.layer == "model.layers.0.mlp.down_proj":
            expected = "float32"
        assert layer.format == expected
    logged = {decision.subject: decision for decision in artifact.decisions}
    assert logged["self_attn"].numbers["num_layers"] == 8 and logged["layers.0.mlp.down_proj"].choice == "float32"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"skip_layers": ("nowhere",)}, "'nowhere' matches no layer"),
        ({"layer_overrides": ({"layers": ("mlp",), "precision": "int5"},)}, "unknown weight format 'int5'"),
        ({"layer_overrides": ({"layers": ("q_proj",), "precision": "float32"},)}, None),
        (
            {
                "layer_overrides": (
                    {"layers": ("q_proj",), "precision": "int8-channel"},
                    {"layers": ("k_proj",), "precision": "int4-g64"},
                )
            },
            "must share a precision; seen: .*q_proj=int8-channel.*k_proj=int4-g64.*v_proj=free",
        ),
    ],
)
def test_demands_that_cannot_be_met_are_refused(
    config: dict[str, object], message: str | None, store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    inputs = make_inputs(tiny_llama, calibration, INT4, **config)
    if message:
        with pytest.raises(ConfigError, match=message):
            produce(store, inputs)
    else:  # one member's demand decides for the whole fused group
        artifact = produce(store, inputs).artifact
        chosen = {layer.format for layer in artifact.plan if layer.layer.endswith(("q_proj", "k_proj", "v_proj"))}
        assert chosen == {"float32"}
        assert sum("fused when served" in decision.because for decision in artifact.decisions) == 4


def test_quantizing_the_head_is_refused(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    config = {"layer_overrides": ({"layers": ("lm_head",), "precision": "int8-channel"},)}
    with pytest.raises(UnsupportedError, match="'lm_head' names only layers that stay in full precision"):
        produce(store, make_inputs(tiny_llama, calibration, INT4, **config))


def gptq(recipe: WeightRecipe) -> WeightRecipe:
    return recipe.model_copy(update={"method": "gptq"})


def test_gptq_hurts_less_than_plain_rounding_in_the_same_bytes(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    plain = produce(store, make_inputs(tiny_llama, calibration, INT4))
    mended = produce(store, make_inputs(tiny_llama, calibration, gptq(INT4)))
    assert [(it.layer, it.format, it.num_bytes) for it in mended.artifact.plan] == [
        (it.layer, it.format, it.num_bytes) for it in plain.artifact.plan
    ]
    samples = prepare(calibration, tiny_llama).samples

    def log_probs(directory: Path) -> torch.Tensor:
        model = load_dequantized(directory)
        with torch.no_grad():
            return torch.cat([torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1) for tokens in samples])

    reference = log_probs(tiny_llama)
    kl = [
        (reference.exp() * (reference - log_probs(entry.directory / CHECKPOINT))).sum(-1).mean().item()
        for entry in (plain, mended)
    ]
    assert kl[1] < 0.6 * kl[0]
    reasons = [next(it.reason for it in entry.artifact.measures if it.name == "predicted_kl") for entry in (plain, mended)]
    assert "upper guess" not in reasons[0] and "an upper guess" in reasons[1]
    assert mended.artifact.predicted_kl_nats == plain.artifact.predicted_kl_nats


def test_signround_hurts_less_than_plain_rounding_in_the_same_bytes_and_says_what_it_did(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    formats = {"formats": ("int3-g32",)}
    settings = {"tuning_steps": 12, "tuning_batch": 2, "tuning_tokens": 16}
    plain, learned = (
        produce(store, make_inputs(tiny_llama, calibration, WeightRecipe(method=method, **formats), **settings))
        for method in ("rtn", "signround")
    )
    sizes = [measure(it.artifact, "true_bits_per_weight") for it in (plain, learned)]
    assert sizes[0] == sizes[1] is not None
    said = next(it for it in learned.artifact.decisions if it.subject == "rounding")
    assert said.numbers["num_steps"] == 12 and said.numbers["num_tokens"] > 0
    full = load_dequantized(tiny_llama)
    tokens = torch.tensor([prepare(calibration, tiny_llama).samples[0][:16]])
    with torch.no_grad():
        wanted = full(tokens).logits
        errors = [
            (load_dequantized(it.directory / CHECKPOINT)(tokens).logits - wanted).square().sum().item() for it in (plain, learned)
        ]
    assert errors[1] < 0.9 * errors[0]


def test_moments_are_measured_once_for_all_recipes_and_only_where_needed(
    tmp_path: Path, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    store = Store(tmp_path / "store")
    produce(store, make_inputs(tiny_llama, calibration, INT4))
    assert not (store.root / "moments").exists()
    low = WeightRecipe(method="gptq", formats=("int2-g64", "int3-g64", "int4-g64", "int8-channel"), bits_budget=3.5)
    for recipe in (gptq(INT4), gptq(mixed(6.0)), low):
        produce(store, make_inputs(tiny_llama, calibration, recipe))
    assert len([path for path in (store.root / "moments").iterdir() if path.is_dir()]) == 1
    lowest = produce(store, make_inputs(tiny_llama, calibration, low)).artifact
    assert lowest.coverage.true_bits_per_weight <= 3.5 and len({it.format for it in lowest.plan}) > 1


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


class KillAtGroup(Quiet):
    """Stop the world before the group number `count` of layers that read one input is quantized."""

    def __init__(self, count: int):
        self.count = count

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for number, item in enumerate(items):
            if label == "quantize" and number == self.count:
                raise Killed
            yield item


def test_quantize_does_not_redo_finished_layers_after_a_kill(
    store: Store, tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    inputs = make_inputs(tiny_llama, calibration, mixed(6.0))
    whole = produce(store, inputs)
    with pytest.raises(Killed):
        quantize(inputs, tmp_path, store=store, progress=KillAtGroup(5))
    parts = sorted((tmp_path / PARTS).iterdir())
    assert len(parts) == 7 + 3  # a whole block, and q/k/v of the next
    layer, format_name, _ = parts[0].name.rsplit(".", 2)
    marked = Parts(tmp_path / PARTS).read(layer, format_name)  # a redone layer would lose this mark
    assert marked is not None
    marked.codes_OI[0, 0] = 1 - marked.codes_OI[0, 0]
    Parts(tmp_path / PARTS).write(layer, format_name, marked)
    parts[1].write_bytes(b"torn")
    content = bytearray(parts[2].read_bytes())
    content[len(content) // 2] ^= 1
    parts[2].write_bytes(content)
    resumed = quantize(inputs, tmp_path, store=store, progress=Quiet())
    assert resumed.plan == whole.artifact.plan and not (tmp_path / PARTS).exists()
    ours, theirs = (load_file(directory / CHECKPOINT / "model.safetensors") for directory in (tmp_path, whole.directory))
    different = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert different == {f"{layer}.weight_packed"}


def test_quantize_is_byte_identical_on_a_rerun(
    store: Store, tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    inputs = make_inputs(tiny_llama, calibration, gptq(mixed(6.0)))
    again = quantize(inputs, tmp_path, store=store, progress=Quiet())
    assert again == produce(store, inputs).artifact


@pytest.mark.parametrize("fault", ["left in full precision", "missing", "unexpected"])
def test_coverage_gate_refuses_what_was_not_planned(
    fault: str, store: Store, tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    stored = produce(store, make_inputs(tiny_llama, calibration, INT8))
    plan = {layer.layer: layer.format for layer in stored.artifact.plan}
    tensors = load_file(stored.directory / CHECKPOINT / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    if fault == "unexpected":
        tensors["model.stray.weight"] = torch.zeros(1)
    else:
        for suffix in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{name}.{suffix}"]
    if fault == "left in full precision":
        tensors[f"{name}.weight"] = torch.zeros(128, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    coverage = measure_coverage(tiny_llama, tmp_path, read_layers(tiny_llama).linears, plan, tied=True)
    if fault != "unexpected":
        assert coverage.quantized_weights_ratio == pytest.approx(1 - 128 * 64 / 73728)
    with pytest.raises(IntegrityError, match="not what was planned"):
        require_coverage(coverage, plan)


def test_key_ignores_places_and_depends_on_content(tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path) -> None:
    base = make_inputs(tiny_llama, calibration, INT8)
    moved = base.model_copy(update={"model": Tree(digest=base.model.digest, path=tmp_path)})
    assert stage_key(moved) == stage_key(base)
    assert stage_key(make_inputs(tiny_llama, calibration, INT4)) != stage_key(base)
    assert stage_key(make_inputs(tiny_llama, calibration, INT8, seed=1)) != stage_key(base)


def test_recipe_refuses_a_method_that_does_not_exist() -> None:
    with pytest.raises(ValidationError):
        WeightRecipe.model_validate({"method": "magic", "formats": ("int8-channel",)})
