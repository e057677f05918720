"""The walk for input moments against plain hooks on the whole model, what it shares, and after a kill."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPTNeoXConfig, GPTNeoXForCausalLM

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.moments import Moments
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.tiny import write_byte_tokenizer, write_tiny_llama
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.moments import STATE, MomentsInputs, measure_moments, read_moment


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills. " * (1 + n % 3)}) for n in range(16))
    )
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def make_inputs(model: Path, calibration: CalibrationSource, max_tokens: int = 64) -> MomentsInputs:
    return MomentsInputs(
        fingerprint="test", model=Tree.of(model), calibration=calibration, num_sequences=9, max_tokens=max_tokens
    )


@pytest.fixture(scope="module")
def deep_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("deep"), num_layers=4)


@torch.no_grad()
def plain_moments(inputs: MomentsInputs) -> dict[str, torch.Tensor]:
    """Return every layer's moment from one forward of the whole model per sequence, in float64."""
    model = load_dequantized(inputs.model.path)
    layers = read_layers(inputs.model.path).linears
    sums = {layer.name: torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64) for layer in layers}

    def add(name: str, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs_NI = arguments[0].flatten(0, -2).double()
        sums[name] += inputs_NI.T @ inputs_NI

    for name in sums:
        model.get_submodule(name).register_forward_pre_hook(lambda _, arguments, name=name: add(name, arguments))
    samples = [
        tokens[: inputs.max_tokens] for tokens in prepare(inputs.calibration, inputs.model.path).samples[: inputs.num_sequences]
    ]
    for tokens in samples:
        model(torch.tensor([tokens]), use_cache=False)
    return {name: total / sum(map(len, samples)) for name, total in sums.items()}


def write_gemma(directory: Path) -> Path:
    """Layers slide over 8 tokens and see all in turn, so that each kind is called with another mask and rotation."""
    config = Gemma3TextConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=8, max_position_embeddings=128, pad_token_id=3, bos_token_id=0, eos_token_id=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_measure_moments_equals_hooks_on_the_whole_model(
    family: str, deep_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    model = deep_llama if family == "llama" else write_gemma(tmp_path / "model")
    inputs = make_inputs(model, calibration)
    moments = measure_moments(inputs, tmp_path / "out", progress=Quiet())
    expected = plain_moments(inputs)
    assert moments.places.keys() == expected.keys()
    for name, expected_II in expected.items():
        found_II = read_moment(tmp_path / "out", moments, name)
        assert torch.equal(found_II, found_II.T)
        torch.testing.assert_close(found_II.double(), expected_II, rtol=1e-4, atol=1e-4 * expected_II.diagonal().mean().item())


@pytest.fixture(scope="module")
def measured(
    deep_llama: Path, calibration: CalibrationSource, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MomentsInputs, Moments]:
    inputs = make_inputs(deep_llama, calibration)
    return inputs, measure_moments(inputs, tmp_path_factory.mktemp("moments"), progress=Quiet())


def test_layers_that_read_one_input_share_one_moment_of_which_a_triangle_is_stored(
    measured: tuple[MomentsInputs, Moments],
) -> None:
    inputs, moments = measured
    block = {layer.removeprefix("model.layers.2."): place for layer, place in moments.places.items() if ".2." in layer}
    assert block["self_attn.q_proj"] == block["self_attn.k_proj"] == block["self_attn.v_proj"]
    assert block["mlp.gate_proj"] == block["mlp.up_proj"] != block["self_attn.o_proj"]
    assert len({(place.file, place.tensor) for place in moments.places.values()}) == 4 * 4
    triangles = 4 * (3 * 64 * 65 // 2 + 128 * 129 // 2)
    assert [file.path for file in moments.files] == [f"moments/block-{number:04}.safetensors" for number in range(4)]
    assert 0 <= sum(file.num_bytes for file in moments.files) - 4 * triangles < 4 * 1024
    samples = prepare(inputs.calibration, inputs.model.path).samples[:9]
    assert moments.num_tokens == sum(len(tokens[:64]) for tokens in samples)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


class KillAt(Quiet):
    """Stop the world before block number `count` of this call."""

    def __init__(self, count: int):
        self.count, self.seen = count, 0

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            if label == "input moments":
                if self.seen == self.count:
                    raise Killed
                self.seen += 1
            yield item


@pytest.mark.parametrize("cut", [1, 3])
def test_measure_moments_continues_after_a_kill_with_the_same_bytes(
    cut: int, measured: tuple[MomentsInputs, Moments], tmp_path: Path
) -> None:
    inputs, expected = measured
    with pytest.raises(Killed):
        measure_moments(inputs, tmp_path, progress=KillAt(cut))
    rest = KillAt(1000)
    assert measure_moments(inputs, tmp_path, progress=rest) == expected  # file digests included
    assert rest.seen == 4 - cut and not (tmp_path / STATE).exists()


@pytest.mark.parametrize("damage", ["torn state", "torn block", "absent block"])
def test_measure_moments_starts_again_when_the_journal_is_damaged(
    damage: str, measured: tuple[MomentsInputs, Moments], tmp_path: Path
) -> None:
    inputs, expected = measured
    with pytest.raises(Killed):
        measure_moments(inputs, tmp_path, progress=KillAt(2))
    path = tmp_path / STATE if damage == "torn state" else tmp_path / "moments" / "block-0001.safetensors"
    if damage == "absent block":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rest = KillAt(1000)
    assert measure_moments(inputs, tmp_path, progress=rest) == expected
    assert rest.seen == 4


def test_measure_moments_refuses_what_the_walk_does_not_cover(calibration: CalibrationSource, tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=2,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="model type 'gpt_neox' is not covered"):
        measure_moments(make_inputs(tmp_path / "model", calibration), tmp_path / "out", progress=Quiet())


def test_read_moment_names_a_layer_that_was_not_on_the_walk(measured: tuple[MomentsInputs, Moments], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"vision\.head lies outside the stack .*skip_layers"):
        read_moment(tmp_path, measured[1], "vision.head")
