"""Zero points, float8, int8 with rounded inputs, and mixtures: exact after a round trip, and transformers computes the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.activations import round_activation
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import read_plan, read_quantized_layers, write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.quantization.coverage import measure_coverage
from model_optimizer.quantization.layers import read_layers

TOKENS = torch.arange(4, 44)[None]
INPUT_SCALE = torch.tensor([0.03])
DOWN = "model.layers.0.mlp.down_proj"
RECIPES = {
    "asym": ("int4-g32-asym",),
    "asym g64": ("int4-g64-asym",),
    "fp8": ("fp8-dynamic",),
    "fp8 static": ("fp8-static",),
    "w8a8": ("w8a8-int8",),
    "w8a8 static": ("w8a8-int8-static",),
    "mixed": ("fp8-dynamic", "int4-g64-asym", "float32", "w8a8-int8", "int4-g32", "int8-channel", "fp8-static"),
}


def make_plan(model: Path, formats: tuple[str, ...]) -> dict[str, str]:
    return {layer.name: formats[index % len(formats)] for index, layer in enumerate(read_layers(model).linears)}


def quantized(model: Path, plan: dict[str, str]) -> dict[str, QuantizedTensor]:
    weights, found = load_file(model / "model.safetensors"), {}
    for layer, name in plan.items():
        if FORMATS.get(name).on_grid:
            tensor = FORMATS.get(name).quantize(weights[f"{layer}.weight"].float())
            static = FORMATS.get(name).activation == "static-tensor"
            found[layer] = replace(tensor, input_scale=INPUT_SCALE) if static else tensor
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """The tiny model, and one checkpoint of it per recipe."""
    root = tmp_path_factory.mktemp("layouts")
    source = write_tiny_llama(root / "source")
    for recipe, formats in RECIPES.items():
        plan = make_plan(source, formats)
        write_checkpoint(source, root / recipe, plan, quantized(source, plan).__getitem__)
    return source, {recipe: root / recipe for recipe in RECIPES}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def reference_logits(source: Path, plan: dict[str, str]) -> torch.Tensor:
    """Full precision arithmetic on rounded weights and on inputs that are rounded by formulas written out here."""
    model = load_dequantized(source)

    def hook(name: str):
        def rounded(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            hidden = arguments[0]
            reach = 448 if name.startswith("fp8") else 127.5
            step = INPUT_SCALE if name.endswith("static") else hidden.abs().amax(-1, keepdim=True) / reach
            if name.startswith("fp8"):
                return ((hidden / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step,)
            return ((hidden / step).round().clamp(-128, 127) * step,)

        return rounded

    for layer, name in plan.items():
        module = model.get_submodule(layer)
        module.weight.data = FORMATS.get(name).round_trip(module.weight.data)
        if FORMATS.get(name).activation:
            module.register_forward_pre_hook(hook(name))
    return logits(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_write_checkpoint_keeps_codes_scales_and_zero_points_exactly(
    recipe: str, checkpoints: tuple[Path, dict[str, Path]]
) -> None:
    source, written = checkpoints
    plan = make_plan(source, RECIPES[recipe])
    expected = quantized(source, plan)
    assert read_plan(written[recipe]) == {layer: name for layer, name in plan.items() if layer in expected}
    for layer, tensor, _ in read_quantized_layers(written[recipe]):
        wanted = expected.pop(layer)
        assert torch.equal(tensor.codes_OI.float(), wanted.codes_OI.float()) and tensor.codes_OI.dtype is wanted.codes_OI.dtype
        assert torch.equal(tensor.scale_OG, wanted.scale_OG)
        assert (tensor.zero_OG is None) == (wanted.zero_OG is None) == FORMATS.get(plan[layer]).symmetric
        assert wanted.zero_OG is None or torch.equal(tensor.zero_OG, wanted.zero_OG)
        assert (tensor.input_scale is None) == (wanted.input_scale is None)
    assert not expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_loads_every_layout_and_computes_what_we_do(recipe: str, checkpoints: tuple[Path, dict[str, Path]]) -> None:
    source, written = checkpoints
    stock, loading = AutoModelForCausalLM.from_pretrained(written[recipe], output_loading_info=True)
    assert not any(loading.values())
    theirs, ours = logits(stock.eval()), logits(load_dequantized(written[recipe]))
    assert (theirs - ours).abs().max().item() < 1e-5
    assert (reference_logits(source, make_plan(source, RECIPES[recipe])) - ours).abs().max().item() < 1e-5


@pytest.mark.parametrize(
    ("recipe", "top", "formats"),
    [
        ("asym", "pack-quantized", {"pack-quantized"}),
        ("fp8", "float-quantized", {"float-quantized"}),
        ("w8a8 static", "int-quantized", {"int-quantized"}),
        ("mixed", "mixed-precision", {"pack-quantized", "float-quantized", "int-quantized"}),
    ],
)
def test_config_names_the_layout_of_every_group(
    recipe: str, top: str, formats: set[str], checkpoints: tuple[Path, dict[str, Path]]
) -> None:
    section = json.loads((checkpoints[1][recipe] / "config.json").read_text())["quantization_config"]
    assert section["format"] == top
    assert {group["format"] for group in section["config_groups"].values()} == formats
    rounded = {group["format"]: group["input_activations"] for group in section["config_groups"].values()}
    assert rounded.get("pack-quantized") is None
    if recipe == "fp8":
        inputs = rounded["float-quantized"]
        assert (inputs["type"], inputs["num_bits"], inputs["strategy"], inputs["dynamic"]) == ("float", 8, "token", True)
    if recipe == "w8a8 static":
        inputs = rounded["int-quantized"]
        assert (inputs["type"], inputs["num_bits"], inputs["strategy"], inputs["dynamic"]) == ("int", 8, "tensor", False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_coverage_counts_every_part_of_every_layout(recipe: str, checkpoints: tuple[Path, dict[str, Path]]) -> None:
    source, written = checkpoints
    plan, layers = make_plan(source, RECIPES[recipe]), read_layers(source).linears
    coverage = measure_coverage(source, written[recipe], layers, plan, tied=True)
    assert coverage.quantized_weights_ratio == 1 and not coverage.missing_keys and not coverage.unexpected_keys
    stored = sum(FORMATS.get(plan[it.name]).num_bytes(it.out_features, it.in_features) for it in layers)
    assert coverage.true_bits_per_weight == 8 * stored / sum(it.num_weights for it in layers)


def test_true_bits_count_packed_zero_points(checkpoints: tuple[Path, dict[str, Path]]) -> None:
    source, written = checkpoints
    plan, layers = make_plan(source, RECIPES["asym"]), read_layers(source).linears
    coverage = measure_coverage(source, written["asym"], layers, plan, tied=True)
    assert coverage.true_bits_per_weight == 4 + 16 / 32 + 4 / 32  # codes, scale, zero point of each 32 weights


def test_zero_points_are_packed_along_outputs_as_the_library_unpacks_them(checkpoints: tuple[Path, dict[str, Path]]) -> None:
    stored = load_file(checkpoints[1]["asym"] / "model.safetensors")
    words = stored[f"{DOWN}.weight_zero_point"]
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (64 // 8, 128 // 32))
    zero_OG = unpack_from_int32(words, 4, torch.Size((64, 4)), packed_dim=0)
    weight_OI = load_file(checkpoints[0] / "model.safetensors")[f"{DOWN}.weight"]
    grouped_OGK = weight_OI.reshape(64, 4, 32)
    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    scale_OG, theirs_OG = calculate_qparams(grouped_OGK.amin(-1), grouped_OGK.amax(-1), arguments)
    assert (zero_OG - theirs_OG).abs().max().item() <= 1 and (zero_OG == theirs_OG).float().mean().item() > 0.98
    assert stored[f"{DOWN}.weight_scale"].float() == pytest.approx(scale_OG, rel=2**-9)


def test_asymmetric_values_are_those_that_compressed_tensors_gives() -> None:
    weight_OI = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)) + 0.5
    tensor = FORMATS.get("int4-g64-asym").quantize(weight_OI)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=64)
    theirs_OI = fake_quantize(weight_OI, tensor.scale_OG.float(), tensor.zero_OG, arguments)
    assert FORMATS.get("int4-g64-asym").dequantize(tensor) == pytest.approx(theirs_OI, abs=1e-6)


def test_asymmetric_grid_worked_out_by_hand() -> None:
    weight_OI = torch.tensor([[-2.0, 13.0, 0.4, 0.6] + [0.0] * 28, [3.0] * 32])
    tensor = FORMATS.get("int4-g32-asym").quantize(weight_OI)
    assert tensor.scale_OG[0].item() == 1.0 and tensor.zero_OG is not None  # 15 steps from -2 to 13
    assert tensor.zero_OG.flatten().tolist() == [-6, -8]
    assert tensor.codes_OI[0, :5].tolist() == [-8, 7, -6, -5, -6]
    assert tensor.codes_OI[1].unique().tolist() == [7] and tensor.scale_OG[1].item() == pytest.approx(0.2, rel=1e-3)


def test_float8_codes_worked_out_by_hand() -> None:
    weight_OI = torch.tensor([[448.0, -224.0, 1.0, 17.0, 19.0, 0.0], [0.0] * 6])
    tensor = FORMATS.get("fp8-dynamic").quantize(weight_OI)
    assert tensor.scale_OG[0].item() == 1.0 and tensor.codes_OI[0].float().tolist() == [448, -224, 1, 16, 20, 0]  # ties to even
    assert FORMATS.get("fp8-dynamic").dequantize(tensor)[1].tolist() == [0.0] * 6


def test_round_activation_gives_what_compressed_tensors_gives() -> None:
    hidden = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 2, 7)[:, None]
    hidden[1, 3] = 0
    for name, kind in (("w8a8-int8", "int"), ("fp8-dynamic", "float")):
        arguments = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
        scale, zero = calculate_qparams(hidden.amin(-1, keepdim=True), hidden.amax(-1, keepdim=True), arguments)
        assert torch.equal(round_activation(hidden, FORMATS.get(name)), fake_quantize(hidden, scale, zero, arguments))
    for name, kind in (("w8a8-int8-static", "int"), ("fp8-static", "float")):
        arguments = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="tensor")
        expected = fake_quantize(hidden, INPUT_SCALE, torch.zeros(1), arguments)
        assert torch.equal(round_activation(hidden, FORMATS.get(name), INPUT_SCALE), expected)
    assert round_activation(hidden, FORMATS.get("int4-g64")) is hidden


def test_write_checkpoint_refuses_a_static_format_without_a_frozen_step(tiny_llama: Path, tmp_path: Path) -> None:
    plan = make_plan(tiny_llama, ("fp8-static",))
    weights = load_file(tiny_llama / "model.safetensors")
    with pytest.raises(UnsupportedError, match="fp8-static stores a frozen step"):
        write_checkpoint(tiny_llama, tmp_path, plan, lambda it: FORMATS.get("fp8-static").quantize(weights[f"{it}.weight"]))


@pytest.mark.parametrize(("recipe", "dtype"), [("fp8", "F8_E4M3"), ("w8a8", "I8"), ("asym", "I32")])
def test_a_lost_description_is_refused_by_name(
    recipe: str, dtype: str, checkpoints: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    directory = checkpoints[1][recipe]
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    with pytest.raises(IntegrityError, match=rf"does not say how model\.layers\.0\.\S+ is quantized .* of type {dtype}"):
        load_dequantized(tmp_path)
    with pytest.raises(UnsupportedError, match="quantized"):  # neither is it taken for a full-precision source
        read_layers(tmp_path)


def test_a_description_of_another_layout_is_refused(checkpoints: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints[1]["w8a8"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").symlink_to(checkpoints[1]["fp8"] / "model.safetensors")
    with pytest.raises(
        IntegrityError, match=r"as w8a8-int8, which is stored as \.weight of type I8, yet the weights hold F8_E4M3"
    ):
        load_dequantized(tmp_path)


def test_read_quantized_layer_names_an_absent_zero_point(checkpoints: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints[1]["asym"] / "config.json").read_bytes())
    tensors = load_file(checkpoints[1]["asym"] / "model.safetensors")
    del tensors[f"{DOWN}.weight_zero_point"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks the tensor 'model\.layers\.0\.mlp\.down_proj\.weight_zero_point'"):
        load_dequantized(tmp_path)


@pytest.mark.parametrize("recipe", ["fp8", "w8a8", "mixed"])
def test_a_bfloat16_source_loads_in_transformers_in_its_own_type(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).save_pretrained(source)
    plan = make_plan(source, RECIPES[recipe])
    write_checkpoint(source, tmp_path / "q", plan, quantized(source, plan).__getitem__)
    stock, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not any(loading.values()) and stock.dtype is torch.bfloat16
    ours, theirs = logits(load_dequantized(tmp_path / "q")), logits(stock).float()
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0).item() > 0.99
