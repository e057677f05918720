"""Checkpoints: exact codes after a round trip, ties, and no model with fresh random weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import read_plan, read_quantized_layers, write_checkpoint
from model_optimizer.formats.loading import load_dequantized, read_state
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import INDEX, read_headers
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.quantization.layers import read_layers

TOKENS = torch.arange(4, 44)[None]
RECIPES = {
    "int8": ("int8-channel",),
    "int4": ("int4-g64",),
    "int3": ("int3-g64",),
    "int2": ("int2-g32",),
    "int5": ("int5-g64",),
    "int6": ("int6-g64",),
    "mixed": ("int8-channel", "int4-g32", "float32", "int2-g64", "int3-g32"),
}


def make_plan(model: Path, formats: tuple[str, ...]) -> dict[str, str]:
    return {layer.name: formats[index % len(formats)] for index, layer in enumerate(read_layers(model).linears)}


def codes_of(model: Path, plan: dict[str, str]) -> dict[str, QuantizedTensor]:
    weights = load_file(model / "model.safetensors")
    return {name: FORMATS.get(it).quantize(weights[f"{name}.weight"]) for name, it in plan.items() if FORMATS.get(it).on_grid}


def write(model: Path, target: Path, formats: tuple[str, ...]) -> dict[str, str]:
    plan = make_plan(model, formats)
    write_checkpoint(model, target, plan, codes_of(model, plan).__getitem__)
    return plan


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@torch.no_grad()
def fake_quantized_logits(source: Path, plan: dict[str, str]) -> torch.Tensor:
    model = load_dequantized(source)
    for name, format_name in plan.items():
        weight_OI = model.get_parameter(f"{name}.weight")
        weight_OI.copy_(FORMATS.get(format_name).round_trip(weight_OI))
    return logits(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_write_checkpoint_keeps_codes_and_scales_exactly(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    plan = write(tiny_llama, tmp_path / "q", RECIPES[recipe])
    expected = codes_of(tiny_llama, plan)
    found = {layer: (tensor, name) for layer, tensor, name in read_quantized_layers(tmp_path / "q")}
    assert found.keys() == expected.keys()
    for layer, (tensor, name) in found.items():
        assert name == plan[layer]
        assert torch.equal(tensor.codes_OI, expected[layer].codes_OI) and torch.equal(tensor.scale_OG, expected[layer].scale_OG)


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_and_load_dequantized_agree_with_fake_quantization(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    plan = write(tiny_llama, tmp_path / "q", RECIPES[recipe])
    expected = fake_quantized_logits(tiny_llama, plan)
    assert (logits(load_dequantized(tmp_path / "q")) - expected).abs().max().item() < 1e-5
    stock, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not any(loading.values())
    assert (logits(stock) - expected).abs().max().item() < 1e-5


def test_write_checkpoint_keeps_a_tied_head_tied(tiny_llama: Path, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "q", ("int8-channel",))
    headers = read_headers(tmp_path / "q")
    assert "lm_head.weight" not in headers
    assert headers["model.embed_tokens.weight"].dtype == "F32"
    model = load_dequantized(tmp_path / "q")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in load_dequantized(tiny_llama).parameters())


def test_write_checkpoint_keeps_an_untied_head_and_the_source_dtype(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m", tied=False)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = write(source, tmp_path / "q", ("int4-g64",))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["lm_head.weight"].dtype is torch.bfloat16 and torch.equal(stored["lm_head.weight"], tensors["lm_head.weight"])
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert (logits(load_dequantized(tmp_path / "q")) - fake_quantized_logits(source, plan)).abs().max().item() < 1e-5


def test_write_checkpoint_copies_the_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "q", ("int8-channel",))
    ours, theirs = (AutoTokenizer.from_pretrained(it) for it in (tmp_path / "q", tiny_llama))
    assert ours("A sheep.")["input_ids"] == theirs("A sheep.")["input_ids"] and ours.chat_template == theirs.chat_template


def test_write_checkpoint_is_byte_identical_on_a_rerun(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tiny_llama, tmp_path / name, RECIPES["mixed"])
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert all((tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes() for name in files)


def test_load_dequantized_refuses_packed_weights_when_the_description_is_lost(tiny_llama: Path, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "q", ("int8-channel",))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"does not say how model\.layers\.0\.mlp\.down_proj is quantized"):
        load_dequantized(tmp_path / "q")


@pytest.mark.parametrize(
    ("dropped", "added"), [("model.layers.1.mlp.down_proj.weight", None), (None, "model.layers.9.extra.weight")]
)
def test_load_dequantized_names_missing_and_unexpected_tensors(
    dropped: str | None, added: str | None, tiny_llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    if dropped:
        del tensors[dropped]
    if added:
        tensors[added] = torch.zeros(2)
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=(dropped or added or "").replace(".", r"\.")):
        load_dequantized(tmp_path / "m")


def test_load_dequantized_refuses_a_packed_layer_without_scale(tiny_llama: Path, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "q", ("int8-channel",))
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        load_dequantized(tmp_path / "q")


def test_load_dequantized_refuses_another_shape(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"model\.norm\.weight"):
        load_dequantized(tmp_path / "m")


def test_load_dequantized_refuses_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_dequantized(tmp_path)


def test_load_dequantized_equals_transformers_on_a_plain_directory(tiny_llama: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    ours = load_dequantized(tiny_llama)
    assert torch.equal(logits(ours), logits(stock)) and not ours.training
    assert ours.generation_config.eos_token_id == stock.generation_config.eos_token_id


@pytest.fixture
def sharded(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model in several shards with an index."""
    shutil.copytree(tiny_llama, tmp_path / "sharded", ignore=shutil.ignore_patterns("model.safetensors"))
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path / "sharded", max_shard_size="150KB")
    return tmp_path / "sharded"


def test_write_checkpoint_keeps_shards_and_mends_the_index(sharded: Path, tiny_llama: Path, tmp_path: Path) -> None:
    plan = make_plan(sharded, ("int4-g64",))
    write_checkpoint(sharded, tmp_path / "q", plan, codes_of(tiny_llama, plan).__getitem__)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) == len(list(sharded.glob("*.safetensors"))) > 1
    assert read_plan(tmp_path / "q") == plan
    assert not any(AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)[1].values())
    assert read_state(tmp_path / "q").keys() == read_state(tiny_llama).keys()


@pytest.mark.parametrize("damage", ["absent shard", "wrong total", "no weights"])
def test_read_plan_blames_the_store_for_a_damaged_checkpoint(damage: str, sharded: Path) -> None:
    shards, index = sorted(sharded.glob("*.safetensors")), sharded / INDEX
    match damage:
        case "absent shard":
            shards[1].unlink()
            message = shards[1].name
        case "wrong total":
            index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 1}}))
            message = "total_size 1, the shards hold 362752"
        case _:
            for path in (*shards, index):
                path.unlink()
            message = "holds no safetensors weights"
    with pytest.raises(IntegrityError, match=message):
        read_plan(sharded)


def test_three_bit_codes_are_packed_across_word_borders_as_the_library_unpacks_them(tiny_llama: Path, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "q", ("int3-g32",))
    stored, layer = load_file(tmp_path / "q" / "model.safetensors"), "model.layers.0.mlp.down_proj"
    words_OW = stored[f"{layer}.weight_packed"].numpy().astype("<i4")
    assert words_OW.shape == (64, 128 * 3 // 32)
    # an independent reading: the row is one stream of bits, lowest first, three per code, shifted by 4
    bits_OB = np.unpackbits(words_OW.view(np.uint8), axis=1, bitorder="little").reshape(64, 128, 3)
    codes_OI = bits_OB @ np.array([1, 2, 4]) - 4
    expected = codes_of(tiny_llama, {layer: "int3-g32"})[layer].codes_OI
    assert codes_OI.tolist() == expected.tolist() and set(codes_OI.flatten().tolist()) <= set(range(-4, 4))
