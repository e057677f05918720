"""The one-pass sensitivity against autograd, against leave-one-out truth, and after a kill."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.quantized import Sensitivity
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.sensitivity import BATCH_TOKENS, STATE, SensitivityInputs, measure_sensitivity, pieces

FORMAT_NAMES = ("int4-g32", "int4-g64", "int8-channel")


def write_calibration(directory: Path, num_records: int) -> CalibrationSource:
    words = (
        "wool",
        "lamb",
        "ewe",
        "fold",
        "hill",
        "dawn",
        "bell",
        "dog",
        "rain",
        "grass",
        "gate",
        "stone",
        "river",
        "cloud",
        "path",
    )
    source = np.random.default_rng(5)
    lines = [json.dumps({"text": " ".join(source.choice(words, 20))}) for _ in range(num_records)]
    path = directory / "calibration.jsonl"
    path.write_text("\n".join(lines))
    return CalibrationSource.of(CalibrationConfig(path=path, num_samples=64), directory)


def make_inputs(model: Path, calibration: CalibrationSource, **changes: object) -> SensitivityInputs:
    settings = {"formats": FORMAT_NAMES, "num_sequences": 24, "max_tokens": 64, "seed": 3} | changes
    return SensitivityInputs.model_validate(
        {"fingerprint": "test", "model": Tree.of(model), "calibration": calibration, **settings}
    )


@pytest.fixture(scope="module")
def inputs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> SensitivityInputs:
    return make_inputs(tiny_llama, write_calibration(tmp_path_factory.mktemp("calibration"), 40))


@pytest.fixture(scope="module")
def measured(inputs: SensitivityInputs, tmp_path_factory: pytest.TempPathFactory) -> Sensitivity:
    return measure_sensitivity(inputs, tmp_path_factory.mktemp("sensitivity"), progress=Quiet())


def test_pieces_take_the_beginning_of_every_sample_before_what_follows() -> None:
    samples = (tuple(range(10)), tuple(range(100, 104)), tuple(range(200, 206)))
    expected = ((0, 1, 2, 3), (100, 101, 102, 103), (200, 201, 202, 203), (4, 5, 6, 7), (204, 205), (8, 9))
    assert pieces(samples, 10, 4) == expected
    assert pieces(samples, 4, 4) == expected[:4]
    assert pieces(samples, 10, 8) == (tuple(range(8)), samples[1], samples[2])  # two tokens of eight are no piece


def sequences_of(inputs: SensitivityInputs) -> list[torch.Tensor]:
    samples = prepare(inputs.calibration, inputs.model.path).samples[: inputs.num_sequences]
    return [torch.tensor([tokens[: inputs.max_tokens]]) for tokens in samples]


def drawn_labels(log_probs_TV: torch.Tensor, seed: int) -> torch.Tensor:
    uniform_T = torch.rand(len(log_probs_TV), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cumulated_TV = log_probs_TV.double().exp().cumsum(-1)
    return (cumulated_TV <= uniform_T * cumulated_TV[:, -1:]).sum(-1)


def test_predicted_kl_equals_the_mixed_estimate_from_plain_autograd(inputs: SensitivityInputs, measured: Sensitivity) -> None:
    name = "model.layers.1.mlp.up_proj"
    model = load_dequantized(inputs.model.path)
    weight_OI = model.get_parameter(f"{name}.weight")
    errors_OI = {it: FORMATS.get(it).round_trip(weight_OI.detach()) - weight_OI.detach() for it in FORMAT_NAMES}
    quadratic, by_rows = dict.fromkeys(FORMAT_NAMES, 0.0), dict.fromkeys(FORMAT_NAMES, 0.0)
    sequences = sequences_of(inputs)
    for index, tokens_1T in enumerate(sequences):
        log_probs_TV = torch.log_softmax(model(tokens_1T).logits[0], -1)
        labels_T = drawn_labels(log_probs_TV.detach(), inputs.seed * 1_000_003 + index)
        loss = torch.nn.functional.nll_loss(log_probs_TV, labels_T, reduction="sum")
        gradient_OI = torch.autograd.grad(loss, weight_OI)[0]
        for it, error_OI in errors_OI.items():
            rows_O = (gradient_OI * error_OI).sum(1)
            quadratic[it] += rows_O.sum().item() ** 2
            by_rows[it] += rows_O.square().sum().item()
    num_tokens, share = sum(tokens_1T.numel() for tokens_1T in sequences), len(sequences) / (len(sequences) + 200)
    layer = next(layer for layer in measured.layers if layer.layer == name)
    assert measured.num_tokens == num_tokens
    for it in FORMAT_NAMES:
        expected = (share * quadratic[it] + (1 - share) * by_rows[it]) / 2 / num_tokens
        assert layer.predicted_kl_nats[it] == pytest.approx(expected, rel=1e-4)


def test_measure_sensitivity_gives_the_same_figures_in_other_batches(
    inputs: SensitivityInputs, measured: Sensitivity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 1)
    alone = measure_sensitivity(inputs, tmp_path, progress=Quiet())
    for one, many in zip(alone.layers, measured.layers, strict=True):
        assert one.predicted_kl_nats == pytest.approx(many.predicted_kl_nats, rel=1e-4)


def test_growth_turns_the_sum_into_the_kl_of_one_uniform_plan(
    tiny_llama: Path, inputs: SensitivityInputs, tmp_path: Path
) -> None:
    wide = inputs.model_copy(update={"formats": ("int2-g64",), "num_sequences": 4})
    measured = measure_sensitivity(wide, tmp_path, progress=Quiet())
    total = sum(layer.predicted_kl_nats["int2-g64"] for layer in measured.layers)
    reference, rounded = load_dequantized(tiny_llama), load_dequantized(tiny_llama)
    with torch.no_grad():
        for layer in measured.layers:
            weight_OI = rounded.get_parameter(f"{layer.layer}.weight")
            weight_OI.copy_(FORMATS.get("int2-g64").round_trip(weight_OI))
        found = []
        for tokens_1T in sequences_of(wide):
            log_p_TV, log_q_TV = (torch.log_softmax(it(tokens_1T).logits[0].double(), -1) for it in (reference, rounded))
            found.append((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1))
    assert measured.growth_per_nat != 0
    assert measured.total_kl_nats(total) == pytest.approx(torch.cat(found).mean().item(), rel=1e-4)


@torch.no_grad()
def leave_one_out_kl(inputs: SensitivityInputs) -> dict[tuple[str, str], float]:
    """Return the true mean KL per token with one layer quantized, on the same tokens."""
    model = load_dequantized(inputs.model.path)
    tokens_BT = torch.cat(sequences_of(inputs))

    def log_probs() -> torch.Tensor:
        return torch.log_softmax(model(tokens_BT).logits.double(), -1).flatten(0, 1)

    reference_NV = log_probs()
    truth = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            original_OI = module.weight.clone()
            for format_name in FORMAT_NAMES:
                module.weight.copy_(FORMATS.get(format_name).round_trip(original_OI))
                truth[name, format_name] = (reference_NV.exp() * (reference_NV - log_probs())).sum(-1).mean().item()
            module.weight.copy_(original_OI)
    return truth


def test_predicted_kl_agrees_with_leave_one_out_kl(inputs: SensitivityInputs, measured: Sensitivity) -> None:
    truth = leave_one_out_kl(inputs)
    predicted = {(layer.layer, name): value for layer in measured.layers for name, value in layer.predicted_kl_nats.items()}
    assert predicted.keys() == truth.keys() and len(truth) == 14 * 3
    pairs = np.array([(predicted[key], truth[key]) for key in truth])
    assert spearmanr(pairs[:, 0], pairs[:, 1]).statistic > 0.95
    assert 0.7 < np.median(pairs[:, 0] / pairs[:, 1]) < 1.3


def test_output_cosine_equals_the_cosine_of_real_outputs(inputs: SensitivityInputs, measured: Sensitivity) -> None:
    name = "model.layers.0.self_attn.q_proj"
    model = load_dequantized(inputs.model.path)
    module = model.get_submodule(name)
    caught: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0].detach()[0]))
    left = 256
    for tokens_1T in sequences_of(inputs):
        if left > 0:
            model(tokens_1T[:, :left])
            left -= tokens_1T.numel()
    inputs_NI, weight_OI = torch.cat(caught), module.weight.detach()
    layer = next(layer for layer in measured.layers if layer.layer == name)
    for format_name in FORMAT_NAMES:
        rounded_OI = FORMATS.get(format_name).round_trip(weight_OI)
        outputs = [(inputs_NI @ it.T).flatten() for it in (weight_OI, rounded_OI)]
        assert layer.output_cosine[format_name] == pytest.approx(torch.cosine_similarity(*outputs, dim=0).item(), abs=1e-5)
    assert layer.output_cosine["int8-channel"] > layer.output_cosine["int4-g64"] > 0.9
    assert layer.weight_variance == pytest.approx(weight_OI.numpy().var(), rel=1e-5)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


class KillAfter(Quiet):
    """Stop the world after `count` items of one label."""

    def __init__(self, label: str, count: int):
        self.label, self.count, self.seen = label, count, 0

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            if label == self.label:
                if self.seen == self.count:
                    raise Killed
                self.seen += 1
            yield item


def test_measure_sensitivity_continues_after_a_kill_with_the_same_numbers(
    inputs: SensitivityInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 200)
    whole = measure_sensitivity(inputs, tmp_path, progress=Quiet())
    with pytest.raises(Killed):
        measure_sensitivity(inputs, tmp_path, progress=KillAfter("sensitivity", 5))
    assert len((tmp_path / STATE).read_text().splitlines()) == 1 + 5
    rest = KillAfter("sensitivity", 1000)
    assert measure_sensitivity(inputs, tmp_path, progress=rest) == whole
    assert rest.seen > 0
    assert not (tmp_path / STATE).exists()


def test_measure_sensitivity_starts_again_when_the_journal_is_damaged(
    inputs: SensitivityInputs, measured: Sensitivity, tmp_path: Path
) -> None:
    (tmp_path / STATE).write_bytes(b"torn")
    assert measure_sensitivity(inputs, tmp_path, progress=Quiet()) == measured


def test_measure_sensitivity_refuses_a_format_before_any_forward_pass(inputs: SensitivityInputs, tmp_path: Path) -> None:
    counter = KillAfter("sensitivity", 0)
    with pytest.raises(UnsupportedError, match=r"in_features 64 is not divisible by group 128 \(remainder 64\)"):
        measure_sensitivity(inputs.model_copy(update={"formats": ("int4-g128",)}), tmp_path, progress=counter)
    assert counter.seen == 0
