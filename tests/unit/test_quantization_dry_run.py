"""Two blocks tried end to end: what is kept, what is caught, and when it is done at all."""

from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES, write_architecture

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet
from model_optimizer.quantization import dry_run
from model_optimizer.quantization.dry_run import ROWS, try_two_blocks, write_two_blocks


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("deep"), num_layers=5)


def test_write_two_blocks_keeps_the_first_and_the_last(deep: Path, tmp_path: Path) -> None:
    write_two_blocks(deep, tmp_path)
    source, found = read_headers(deep), read_headers(tmp_path)
    for block, name in ((0, "model.layers.0.mlp.up_proj.weight"), (4, "model.layers.1.mlp.up_proj.weight")):
        assert torch.equal(read_tensor(found[name]), read_tensor(source[f"model.layers.{block}.mlp.up_proj.weight"]))
    assert len(found) == 2 * 9 + 2
    assert torch.equal(read_tensor(found["model.embed_tokens.weight"]), read_tensor(source["model.embed_tokens.weight"])[:ROWS])
    assert load_dequantized(tmp_path).config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", WeightRecipe(method="gptq", formats=("int4-g32",))),
        ("qwen3", WeightRecipe(method="rtn", formats=("int4-g32", "int8-channel"), bits_budget=6.0)),
        ("gemma3", WeightRecipe(method="rtn", formats=("int8-channel",))),
        ("mixtral", WeightRecipe(method="rtn", formats=("int4-g32",))),
    ],
)
def test_try_two_blocks_passes_and_leaves_nothing(family: str, recipe: WeightRecipe, tmp_path: Path) -> None:
    model = write_architecture(FAMILIES[family](True), tmp_path / "model")
    decision = try_two_blocks(model, recipe, tmp_path / "work", progress=Quiet())
    assert decision.numbers["num_formats"] == len(recipe.formats)
    assert list((tmp_path / "work").iterdir()) == []


def test_try_two_blocks_names_a_format_that_comes_back_changed(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is put in where a writer would have one: between the codes and the file."""
    right = dry_run.write_checkpoint

    def wrong(source: Path, target: Path, plan: dict[str, str], quantized: "dict[str, QuantizedTensor]") -> None:
        def shifted(layer: str) -> QuantizedTensor:
            tensor = quantized(layer)  # type: ignore[operator]
            return QuantizedTensor(tensor.codes_OI.roll(1, 0), tensor.scale_OG) if "down_proj" in layer else tensor

        right(source, target, plan, shifted)

    monkeypatch.setattr(dry_run, "write_checkpoint", wrong)
    recipe = WeightRecipe(method="rtn", formats=("int4-g32",))
    with pytest.raises(IntegrityError, match=r"dry run: model\.layers\.0\.mlp\.down_proj as int4-g32 comes back changed"):
        try_two_blocks(deep, recipe, tmp_path, progress=Quiet())
    assert list(tmp_path.iterdir()) == []


def test_try_two_blocks_refuses_a_group_that_does_not_divide_a_row(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"int4-g128.*not divisible"):
        try_two_blocks(deep, WeightRecipe(method="rtn", formats=("int4-g128",)), tmp_path, progress=Quiet())
    assert FORMATS.get("int4-g128").group_size == 128
