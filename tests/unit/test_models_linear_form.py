"""Linear layers in the place of Conv1D and fused experts: the same function, and gradients that belong to one sequence each."""

from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES, write_architecture
from transformers import PreTrainedModel

from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.headers import read_headers
from model_optimizer.models.linear_form import RoutedExperts, linear_form
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.sequence_gradients import visit_objective

FUSED = ("gpt2", "mixtral", "qwen3-moe")
SEQUENCES = (tuple(range(4, 40)), tuple(range(60, 71)), tuple(range(90, 114)))


@pytest.fixture(scope="module", params=FUSED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture(FAMILIES[request.param](True), tmp_path_factory.mktemp(request.param))


def test_linear_form_computes_the_same(model: Path) -> None:
    tokens_BT = torch.randint(4, 260, (3, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fused, linear = (load(model)(tokens_BT, use_cache=False).logits for load in (load_dequantized, load_linear))
    torch.testing.assert_close(linear, fused, rtol=0, atol=1e-5)


def test_linear_form_depends_on_the_weights_that_it_names(model: Path) -> None:
    linear, tokens_BT = load_linear(model), torch.arange(4, 68)[None]
    names = [name for name, module in linear.named_modules() if isinstance(module, torch.nn.Linear) and "h.1" not in name]
    with torch.no_grad():
        before = linear(tokens_BT, use_cache=False).logits
        for name in names:
            if name != "lm_head":
                linear.get_parameter(f"{name}.weight").zero_()
        assert (linear(tokens_BT, use_cache=False).logits - before).abs().max() > 0.01


def test_linear_form_has_the_names_of_the_checkpoint(model: Path) -> None:
    linear, headers = load_dequantized(model), read_headers(model)
    transposed = linear_form(linear)
    assert {name for name, _ in linear.named_parameters()} == headers.keys()
    for name, parameter in linear.named_parameters():
        stored = headers[name].shape
        assert tuple(parameter.shape) == (stored[::-1] if name.removesuffix(".weight") in transposed else stored)


def gradients(model: PreTrainedModel, sequence: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter for one sequence alone, by plain automatic differentiation."""
    model.requires_grad_(True).zero_grad()
    model(input_ids=torch.tensor([sequence]), use_cache=False).logits.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


LEAVES = {"mixtral": ("w1", "w3", "w2"), "qwen3-moe": ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("family", list(LEAVES))
def test_gradients_of_experts_are_those_of_the_fused_model_sequence_by_sequence(family: str, tmp_path: Path) -> None:
    directory = write_architecture(FAMILIES[family](False), tmp_path)
    linear, fused = load_linear(directory).requires_grad_(False), load_dequantized(directory)
    block = "model.layers.1.block_sparse_moe" if family == "mixtral" else "model.layers.1.mlp"
    names = [f"{block}.experts.{number}.{leaf}" for number in range(4) for leaf in LEAVES[family]]
    found: dict[str, torch.Tensor] = {}
    visit_objective(linear, names, SEQUENCES, lambda logits, mask: (logits.square().sum(-1) * mask).sum(), found.__setitem__)
    assert list(found) and set(found) == set(names)
    for index, sequence in enumerate(SEQUENCES):
        expected = gradients(fused, sequence)
        gate_up_EOI = expected["model.layers.1.mlp.experts.gate_up_proj"]
        down_EOI = expected["model.layers.1.mlp.experts.down_proj"]
        for number in range(4):
            gate_OI, up_OI = gate_up_EOI[number].chunk(2)
            for leaf, gradient_OI in zip(LEAVES[family], (gate_OI, up_OI, down_EOI[number]), strict=True):
                mine_OI = found[f"{block}.experts.{number}.{leaf}"][index]
                torch.testing.assert_close(mine_OI, gradient_OI, rtol=1e-3, atol=1e-4 * gradient_OI.abs().max().item() + 1e-6)


def test_an_expert_without_tokens_has_a_gradient_of_zeros(tmp_path: Path) -> None:
    linear = load_linear(write_architecture(FAMILIES["mixtral"](False), tmp_path)).requires_grad_(False)
    names = [f"model.layers.0.block_sparse_moe.experts.{number}.w2" for number in range(4)]
    found: dict[str, torch.Tensor] = {}
    visit_objective(linear, names, ((7,),), lambda logits, mask: logits.sum(), found.__setitem__)
    assert [found[name].abs().max().item() > 0 for name in names].count(True) == 2  # one token, two experts


def test_routed_experts_hand_zeros_to_experts_beyond_a_sequence(tmp_path: Path) -> None:
    linear = load_linear(write_architecture(FAMILIES["mixtral"](False), tmp_path))
    blocks = [module for module in linear.modules() if isinstance(module, RoutedExperts)]
    seen: dict[int, torch.Tensor] = {}
    for number, expert in enumerate(blocks[0].experts):
        expert.register_forward_pre_hook(lambda _, arguments, number=number: seen.__setitem__(number, arguments[0]))
    hidden_BTD = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        blocks[0](hidden_BTD)
        _, _, chosen_NK = blocks[0].gate(hidden_BTD.reshape(-1, 64))
    for number in range(4):
        hit_BT = (chosen_NK == number).any(-1).reshape(2, 9)
        assert seen[number].shape == (2, int(hit_BT.sum(1).max()), 64)
        for entering_PD, hidden_TD, hit_T in zip(seen[number], hidden_BTD, hit_BT, strict=True):
            count = int(hit_T.sum())
            assert torch.equal(entering_PD[:count], hidden_TD[hit_T]) and not entering_PD[count:].any()
