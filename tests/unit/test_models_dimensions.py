"""Config fields that may be left out, old and new spelling: every reader derives the same, contradictions are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_optimizer.compilation.export import _rotary, _shape
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.model_config import read_config
from model_optimizer.models.check import check_model_directory
from model_optimizer.models.dimensions import CLASS_DEFAULTS, PLAIN_FAMILIES, expected_shapes, is_native, read_dimensions
from model_optimizer.models.facts import read_facts
from model_optimizer.models.headers import read_headers
from model_optimizer.models.resolve import resolve_model
from model_optimizer.models.shape import read_shape
from model_optimizer.models.tokenizer_files import highest_token_id
from model_optimizer.models.weights import num_not_finite
from model_optimizer.protocols import Quiet
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store

LLAMA: dict[str, object] = {
    "model_type": "llama", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
CONFIG = Path("config.json")


def without(*names: str) -> dict[str, object]:
    return {name: value for name, value in LLAMA.items() if name not in names}


def edit(model: Path, **changes: object) -> None:
    """Change fields of config.json; `...` takes a field away."""
    data = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim"),
    [
        (LLAMA, 2, 16),
        (without("num_key_value_heads"), 4, 16),
        (LLAMA | {"num_key_value_heads": None}, 4, 16),
        (without("head_dim"), 2, 16),
        (LLAMA | {"head_dim": 32}, 2, 32),
        (without("head_dim", "num_key_value_heads"), 4, 16),
        (without("head_dim") | {"model_type": "mistral", "num_attention_heads": 8}, 2, 8),
        (without("head_dim", "num_key_value_heads") | {"model_type": "mistral", "num_attention_heads": 16}, 8, 4),
        (without("head_dim") | {"model_type": "qwen2"}, 2, 16),
        (without("head_dim") | {"model_type": "qwen3"}, 2, 128),
    ],
)
def test_every_reader_derives_the_same_heads(config: dict[str, object], kv_heads: int, head_dim: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw, whole, drawn = read_dimensions(config, CONFIG), read_shape(config), _shape(read_config(tmp_path), frozenset())
    assert (raw.num_kv_heads, raw.head_dim) == (kv_heads, head_dim)
    assert (whole.num_kv_heads, whole.head_dim) == (kv_heads, head_dim)
    assert (drawn.num_kv_heads, drawn.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize("model_type", PLAIN_FAMILIES)
def test_class_defaults_are_those_of_transformers(model_type: str) -> None:
    stated = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim", "model_type")}
    filled = CONFIG_MAPPING[model_type](**{**stated, "num_attention_heads": 32})
    ours = read_dimensions({**stated, "num_attention_heads": 32, "model_type": model_type}, CONFIG)
    assert ours.num_kv_heads == filled.num_key_value_heads
    assert ours.head_dim == (filled.to_dict().get("head_dim") or 64 // 32)
    assert set(CLASS_DEFAULTS) < set(PLAIN_FAMILIES)


@pytest.mark.parametrize("model_type", PLAIN_FAMILIES)
def test_expected_shapes_are_those_of_the_real_model(model_type: str) -> None:
    stated = {name: value for name, value in LLAMA.items() if name != "model_type"}
    real = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**stated, tie_word_embeddings=False)).state_dict()
    expected = expected_shapes(read_dimensions(LLAMA | {"model_type": model_type}, CONFIG), untied=True)
    assert {name: tuple(real[name].shape) for name in expected} == expected
    assert all(name.endswith((".bias", "q_norm.weight", "k_norm.weight")) for name in real.keys() - expected.keys())


OLD_LINEAR = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW_LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("fields", "theta", "factor"),
    [
        ({}, 1e4, 1.0),
        ({"rope_theta": 5e5}, 5e5, 1.0),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, 1.0),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, 1.0),
        (OLD_LINEAR, 5e5, 2.0),
        (NEW_LINEAR, 5e5, 2.0),
    ],
)
def test_old_and_new_rope_fields_give_the_same_frequencies(
    fields: dict[str, object], theta: float, factor: float, model: Path
) -> None:
    # Source: Su et al. 2021, section 3.2.2: frequency i of D/2 is theta^(-2 i / D); linear scaling divides it by the factor
    expected_D = theta ** (-np.arange(0, 16, 2) / 16) / factor
    edit(model, rope_parameters=..., rope_theta=..., rope_scaling=...)
    edit(model, **fields)
    check_model_directory(model)
    read_shape(json.loads((model / "config.json").read_text()))
    drawn_D, scale = _rotary(read_config(model), 16)
    assert scale == 1.0
    assert drawn_D == pytest.approx(expected_D, rel=1e-6)
    loaded = load_dequantized(model)
    assert loaded.model.rotary_emb.inv_freq.numpy() == pytest.approx(expected_D, rel=1e-6)


def test_read_facts_derives_what_the_config_leaves_out(model: Path) -> None:
    edit(model, architectures=..., head_dim=...)
    check_model_directory(model)
    facts = read_facts(model)
    assert (facts.architecture, facts.head_dim, facts.num_kv_heads, facts.num_heads) == ("LlamaForCausalLM", 16, 2, 4)


def test_check_model_directory_derives_kv_heads_of_a_model_without_grouping(tmp_path: Path, tiny_llama: Path) -> None:
    torch.manual_seed(0)
    stated = {name: value for name, value in LLAMA.items() if name not in ("model_type", "num_key_value_heads", "head_dim")}
    LlamaForCausalLM(LlamaConfig(**stated, eos_token_id=2)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path)
    edit(tmp_path, num_key_value_heads=..., head_dim=..., architectures=...)
    check_model_directory(tmp_path)
    assert read_facts(tmp_path).kv_bytes_per_token == 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, head, float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_attention_heads": 5, "head_dim": None}, ConfigError, "64 is no multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, ConfigError, "4 is no multiple of num_key_value_heads 3"),
        ({"vocab_size": True}, ConfigError, "vocab_size is True; allowed: a positive whole number"),
        ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers is 0"),
        ({"rope_theta": -1.0}, ConfigError, "rope_theta is -1.0; allowed: a positive number"),
        ({"rope_parameters": []}, ConfigError, "rope_parameters is \\[\\]"),
        ({"model_type": "../llama"}, UnsupportedError, "not known"),
    ],
)
def test_read_dimensions_says_what_is_wrong(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        read_dimensions(LLAMA | change, CONFIG)
    assert "\n" not in str(caught.value)


def test_is_native_agrees_with_transformers() -> None:
    assert [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not is_native(name)] == []
    assert not any(is_native(name) for name in ("mine", "", "../llama", "llama.py"))


def test_own_code_beside_a_native_model_is_told_and_never_run(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(model, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (model / "modeling_mine.py").write_text("raise SystemExit('this must never run')\n")
    resolve_model(ModelRef(ref="model"), tmp_path, Store(tmp_path / "store"), Quiet())
    assert "own code (auto_map in config.json), which is not executed: the built-in llama is used" in caplog.text
    assert type(load_dequantized(model)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_num_not_finite_counts_like_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(37, 11, generator=generator).to(dtype)
    tensor[3, 4], tensor[5, 6], tensor[36, 10] = float("nan"), float("inf"), float("-inf")
    tensor[0, 0] = torch.finfo(dtype).max
    save_file({"a": tensor, "b": torch.zeros(3, dtype=torch.int8), "c": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    assert num_not_finite(headers["a"]) == int((~torch.isfinite(tensor)).sum()) == 3
    assert num_not_finite(headers["c"]) == 0


def test_resolve_model_refuses_a_weight_that_is_no_number(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][7] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight holds 1 NaN or infinite values of 64; found when the source was read"
    ):
        resolve_model(ModelRef(ref="model"), tmp_path, Store(tmp_path / "store"), Quiet())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("tokenizer", "highest"),
    [
        ({"model": {"vocab": {"a": 0, "b": 5}}}, 5),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}, "added_tokens": [{"id": 9}]}, 9),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": None}, 1),
    ],
)
def test_highest_token_id_knows_both_vocabulary_forms(tokenizer: dict[str, object], highest: int) -> None:
    assert highest_token_id(tokenizer, Path("tokenizer.json")) == highest
