"""The law of every transform: the function stays; and what is refused or told because it could not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES, SIZES, write_architecture
from safetensors.torch import load_file, save_file
from transform_fixtures import logits, moments_in, transform_inputs, write_outlying, write_text
from transformers import LlamaConfig, PreTrainedConfig

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.model_config import read_config
from model_optimizer.models.headers import read_headers
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.transforms.anatomy import read_anatomy
from model_optimizer.quantization.transforms.base import Folding, scale_columns
from model_optimizer.quantization.transforms.equivalence import logits_error_ratio, require_equivalent
from model_optimizer.quantization.transforms.fold import Folded, fold_all, transforms_of, write_folded
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.store import Store

TIED = {"llama": True, "qwen2": False, "qwen3": True, "mistral": False, "gemma3": True, "phi3": False}
"""Family -> whether its head is tied."""
WHOLE = ("qwen2", "gemma3")
"""Families that every transform is tried on; the others get those two that touch most tensors."""
CASES = [
    (family, name)
    for family in TIED
    for name in (TRANSFORMS.names() if family in WHOLE else ("awq", "rotate-residual"))
    if (family, name) != ("gemma3", "rotate-residual")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transforms")


@pytest.fixture(scope="module")
def calibration(folder: Path) -> CalibrationSource:
    return write_text(folder)


def outlying(family: str, folder: Path) -> Path:
    path = folder / family
    return path if path.exists() else write_outlying(FAMILIES[family](TIED[family]), path)


def folded(model: Path, calibration: CalibrationSource, folder: Path, *names: str) -> Folded:
    store = Store(folder / "store")
    inputs = transform_inputs(model, calibration)
    return fold_all(inputs, names, store, lambda tree: moments_in(store, calibration, tree), Quiet())


@pytest.mark.parametrize(("family", "name"), CASES)
def test_transform_keeps_the_logits(family: str, name: str, folder: Path, calibration: CalibrationSource) -> None:
    model = outlying(family, folder)
    made = folded(model, calibration, folder, name).model.path
    before, after = logits(model), logits(made)
    assert (after - before).norm() < 2e-5 * before.norm()
    stored, source = load_file(made / "model.safetensors"), load_file(model / "model.safetensors")
    changed = [key for key in source if key in stored and not torch.equal(stored[key], source[key])]
    assert len(changed) >= 4 and all("layers" in key or "rotate-residual" in name for key in changed)


def test_transforms_compose(folder: Path, calibration: CalibrationSource) -> None:
    model = outlying("qwen2", folder)
    made = folded(model, calibration, folder, *transforms_of("awq", "residual"))
    assert [decision.subject for decision in made.decisions] == [
        "rotation of the residual stream",
        "rotation of values",
        "awq",
    ]
    before = logits(model)
    assert (logits(made.model.path) - before).norm() < 4e-5 * before.norm()


def test_rotate_residual_unties_the_head_and_says_what_it_costs(folder: Path, calibration: CalibrationSource) -> None:
    made = folded(outlying("llama", folder), calibration, folder, "rotate-residual")
    assert read_config(made.model.path).tie_word_embeddings is False
    head, embedding = (read_headers(made.model.path)[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head.shape == embedding.shape == (260, 64)
    (warning,) = made.warnings
    assert "lm_head no longer shares the embedding's matrix (0.1 MB more)" in warning and head.num_bytes == 66560


def test_rotate_residual_keeps_the_tie_where_the_final_gain_is_one_number(folder: Path, calibration: CalibrationSource) -> None:
    model = write_architecture(LlamaConfig(**SIZES, tie_word_embeddings=True), folder / "plain-gain")
    tensors = load_file(model / "model.safetensors")
    assert tensors["model.norm.weight"].eq(1).all()
    for name in ("down_proj", "o_proj", "gate_proj", "q_proj"):
        tensors[f"model.layers.0.{'mlp' if name in ('down_proj', 'gate_proj') else 'self_attn'}.{name}.weight"][:, 3] *= 20
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    made = folded(model, calibration, folder, "rotate-residual")
    before = logits(model)
    assert made.warnings == () and "lm_head.weight" not in read_headers(made.model.path)
    assert (logits(made.model.path) - before).norm() < 2e-5 * before.norm()
    assert not torch.equal(
        load_file(made.model.path / "model.safetensors")["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"]
    )


def test_rotate_residual_refuses_norms_after_the_block(folder: Path, calibration: CalibrationSource) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.post_attention_layernorm multiplies .*rotation: heads"):
        folded(outlying("gemma3", folder), calibration, folder, "rotate-residual")


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "gpt2": (lambda: FAMILIES["gpt2"](False), r"gpt2 models are not built like Llama"),
    "mixtral": (lambda: FAMILIES["mixtral"](False), r"model\.layers\.0\.mlp has no gate_proj/up_proj or gate_up_proj"),
}


@pytest.mark.parametrize("family", list(REFUSED))
def test_read_anatomy_refuses_by_name(family: str, tmp_path: Path) -> None:
    make, message = REFUSED[family]
    with pytest.raises(UnsupportedError, match=message):
        read_anatomy(write_architecture(make(), tmp_path / "model"))


def test_logits_error_ratio_sees_a_scale_that_was_not_folded_back(tiny_llama: Path, tmp_path: Path) -> None:
    anatomy, folding = read_anatomy(tiny_llama), Folding()
    exact = frozenset({"model.layers.0.mlp.down_proj.weight"})
    write_folded(tiny_llama, tmp_path / "same", folding, anatomy, exact)
    assert logits_error_ratio(tiny_llama, tmp_path / "same", anatomy) == 0
    folding.add("model.layers.0.mlp.down_proj.weight", scale_columns(torch.full((128,), 1.01)))
    write_folded(tiny_llama, tmp_path / "other", folding, anatomy, exact)
    assert logits_error_ratio(tiny_llama, tmp_path / "other", anatomy) > 1e-3


def test_require_equivalent_refuses_a_changed_function(tiny_llama: Path) -> None:
    require_equivalent(1e-4, "awq", tiny_llama)
    with pytest.raises(UnsupportedError, match=r"awq changes the logits of .* by 0\.01 of their size \(at most 0\.001"):
        require_equivalent(0.01, "awq", tiny_llama)


@pytest.mark.parametrize("name", ["awq", "smoothquant", "rotate-heads"])
def test_transform_rounds_bfloat16_sources_once(name: str, folder: Path, calibration: CalibrationSource) -> None:
    """Folded layers are float32, and what stays in 16 bits is exact: the function differs by float32 rounding alone."""
    path = folder / "bfloat16"
    model = path if path.exists() else write_outlying(FAMILIES["mistral"](False), path, dtype=torch.bfloat16)
    made = folded(model, calibration, folder, name).model.path
    before = logits(model)
    assert (logits(made) - before).norm() < 2e-5 * before.norm()
    types = {key: header.dtype for key, header in read_headers(made).items()}
    assert {types[key] for key in types if "norm" in key or "embed" in key or "lm_head" in key} == {"BF16"}
    assert sum(types[key] == "F32" for key in types if "_proj" in key) >= 2
