"""Training the scales of a rounded model: the gradient, what is won on text that did not train, and a kill."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.distillation import (
    FOLDER,
    JOURNAL_STEPS,
    STATE,
    Distillation,
    RoundedLinear,
    Student,
    distill,
    forget,
)
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.parts import Parts

STEPS = 3 * JOURNAL_STEPS


def random_text(num_sequences: int, seed: int) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(4, 260, (24,), generator=generator).tolist()) for _ in range(num_sequences))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose embeddings span four directions, as real activations span few."""
    directory = write_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=1)
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(3)
    low_VD = torch.randn(260, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
    tensors["model.embed_tokens.weight"] = low_VD / 10
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


HELD_OUT = random_text(8, seed=9)


def rounded(model: Path, format_name: str, folder: Path, *, noise: float = 0.0) -> Distillation:
    """Round every layer to nearest; `noise` spoils scales by that standard deviation of their logarithms."""
    headers, parts = read_headers(model), Parts(folder / "parts")
    plan = {layer.name: format_name for layer in read_layers(model).linears}
    generator = torch.Generator().manual_seed(5)
    for layer in plan:
        tensor = FORMATS.get(format_name).quantize(read_tensor(headers[f"{layer}.weight"]))
        factor_OG = (torch.randn(tensor.scale_OG.shape, generator=generator) * noise).exp()
        parts.write(layer, format_name, replace(tensor, scale_OG=(tensor.scale_OG.float() * factor_OG).half()))
    return Distillation(model, plan, parts, random_text(24, seed=1), STEPS, 3e-2, 0)


@torch.no_grad()
def held_out_kl_nats(run: Distillation, parts: Parts) -> float:
    """Return the KL of a model with the parts' weights put in place, without the student's own arithmetic."""
    full, changed = load_dequantized(run.model), load_dequantized(run.model)
    for layer, name in run.plan.items():
        tensor = parts.read(layer, name)
        assert tensor is not None
        changed.get_parameter(f"{layer}.weight").copy_(FORMATS.get(name).dequantize(tensor))
    tokens = torch.tensor(HELD_OUT)
    return kl_nats(full(tokens).logits, changed(tokens).logits).mean().item()


@pytest.mark.parametrize("format_name", ["int2-g32", "int8-channel"])
def test_rounded_linear_has_the_gradient_of_its_formula(format_name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 12)
    weight_format = FORMATS.get(format_name)
    tensor = weight_format.quantize(torch.randn(12, 64, generator=generator))
    layer = RoundedLinear("l", linear, tensor, weight_format)
    layer.rounded = True
    inputs, target = torch.randn(2, 5, 64, generator=generator, requires_grad=True), torch.randn(2, 5, 12, generator=generator)
    (layer(inputs) * target).sum().backward()
    log_change_OG = torch.zeros(tensor.scale_OG.shape, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    scale_OI = (tensor.scale_OG.float() * log_change_OG.exp()).repeat_interleave(64 // tensor.scale_OG.shape[1], 1)
    ((twin @ (tensor.codes_OI * scale_OI).T + linear.bias) * target).sum().backward()
    assert layer.log_change_OG.grad is not None and inputs.grad is not None
    assert torch.allclose(layer.log_change_OG.grad, log_change_OG.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(inputs.grad, twin.grad, rtol=1e-4, atol=1e-4)


def test_distill_mends_spoilt_scales(model: Path, tmp_path: Path) -> None:
    run = rounded(model, "int4-g32", tmp_path, noise=0.3)
    before = held_out_kl_nats(run, run.parts)
    trained, (decision,) = distill(run, tmp_path, progress=Quiet())
    assert held_out_kl_nats(run, trained) < 0.5 * before
    assert decision.numbers["after_kl_nats"] < 0.5 * decision.numbers["before_kl_nats"]
    for layer, name in run.plan.items():
        was, now = run.parts.read(layer, name), trained.read(layer, name)
        assert was is not None and now is not None
        assert torch.equal(was.codes_OI, now.codes_OI) and now.scale_OG.dtype == torch.float16 and (now.scale_OG > 0).all()
    forget(tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_distill_lowers_kl_of_plain_rounding_on_text_that_did_not_train(model: Path, tmp_path: Path) -> None:
    run = rounded(model, "int2-g32", tmp_path)
    trained, (decision,) = distill(run, tmp_path, progress=Quiet())
    assert held_out_kl_nats(run, trained) < 0.6 * held_out_kl_nats(run, run.parts)
    assert decision.numbers["after_kl_nats"] == pytest.approx(
        Student(replace(run, parts=trained)).stored_kl_nats(run.sequences[-run.num_validation :]), rel=1e-6
    )


def test_distill_is_never_worse_than_its_start(model: Path, tmp_path: Path) -> None:
    run = replace(rounded(model, "int4-g32", tmp_path), learning_rate=3.0)
    trained, (decision,) = distill(run, tmp_path, progress=Quiet())
    assert decision.numbers["after_kl_nats"] == decision.numbers["before_kl_nats"] and "as they were rounded" in decision.choice
    assert bytes_of(trained) == bytes_of(run.parts)


def test_distill_without_steps_gives_the_rounded_layers(model: Path, tmp_path: Path) -> None:
    run = replace(rounded(model, "int4-g32", tmp_path), num_steps=0, sequences=())
    assert distill(run, tmp_path, progress=Quiet()) == (run.parts, ())
    assert not (tmp_path / FOLDER).exists()


class Killed(Quiet):
    """Dies when so many steps are done."""

    def __init__(self, after: int):
        self._after = after

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for number, item in enumerate(items):
            if number == self._after:
                raise KeyboardInterrupt
            yield item


def bytes_of(parts: Parts) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in parts.directory.iterdir() if path.name != STATE}


def test_distill_continues_to_the_same_bytes_after_kills(model: Path, tmp_path: Path) -> None:
    run = rounded(model, "int3-g32", tmp_path)
    whole, decisions = distill(run, tmp_path / "whole", progress=Quiet())
    for after in (JOURNAL_STEPS + 3, JOURNAL_STEPS + 1):
        with pytest.raises(KeyboardInterrupt):
            distill(run, tmp_path / "cut", progress=Killed(after))
    torch.rand(7)  # what others draw has no part in it
    again, decisions_again = distill(run, tmp_path / "cut", progress=Quiet())
    assert bytes_of(again) == bytes_of(whole) and decisions_again == decisions


def test_distill_starts_anew_on_a_journal_of_other_settings_or_a_torn_one(model: Path, tmp_path: Path) -> None:
    run = replace(rounded(model, "int3-g32", tmp_path), num_steps=JOURNAL_STEPS)
    expected = bytes_of(distill(run, tmp_path / "whole", progress=Quiet())[0])
    distill(replace(run, learning_rate=1e-3), tmp_path / "other", progress=Quiet())
    assert bytes_of(distill(run, tmp_path / "other", progress=Quiet())[0]) == expected
    (tmp_path / "other" / FOLDER / STATE).write_bytes(b"torn")
    assert bytes_of(distill(run, tmp_path / "other", progress=Quiet())[0]) == expected


def test_distill_refuses_one_sample(model: Path, tmp_path: Path) -> None:
    run = replace(rounded(model, "int4-g32", tmp_path), sequences=random_text(1, seed=0))
    with pytest.raises(ConfigError, match=r"two calibration samples.*; 1 given"):
        distill(run, tmp_path, progress=Quiet())


def test_distill_refuses_layers_that_are_no_linear(model: Path, tmp_path: Path) -> None:
    run = rounded(model, "int4-g32", tmp_path)
    run.parts.write("model.experts.0", "int4-g32", QuantizedTensor(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1).half()))
    with pytest.raises(UnsupportedError, match=r"model\.experts\.0 is no torch\.nn\.Linear"):
        distill(replace(run, plan={**run.plan, "model.experts.0": "int4-g32"}), tmp_path, progress=Quiet())
