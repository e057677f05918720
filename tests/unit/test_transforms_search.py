"""What the transforms choose: against brute force, closed forms and explicit matrices."""

from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES
from scipy.linalg import hadamard
from transform_fixtures import FORMAT, OUTLIERS, SETTINGS, moments_in, transform_inputs, write_outlying, write_text

from model_optimizer.artifacts.base import Tree
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.moments import read_moment
from model_optimizer.quantization.transforms.anatomy import Rows, read_anatomy
from model_optimizer.quantization.transforms.awq import ALPHAS, JOURNAL, channel_scale
from model_optimizer.quantization.transforms.base import Folding, Job, TransformInputs, divide_rows
from model_optimizer.quantization.transforms.hadamard import Rotation
from model_optimizer.quantization.transforms.peaks import measure_peaks
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.quantization.transforms.search import output_error
from model_optimizer.quantization.transforms.smoothquant import smoothing_scale
from model_optimizer.store import Store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outlying(FAMILIES["mistral"](False), tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    return write_text(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def job(model: Path, calibration: CalibrationSource, store: Store, workspace: Path, inputs: TransformInputs | None = None) -> Job:
    stored, headers = moments_in(store, calibration, Tree.of(model)), read_headers(model)
    return Job(
        inputs or transform_inputs(model, calibration).model_copy(update={"transform": "awq"}),
        read_anatomy(model),
        workspace,
        lambda layer: read_moment(stored.directory, stored.artifact, layer),
        lambda name: read_tensor(headers[name]).float(),
        Quiet(),
    )


def folded(model: Path, calibration: CalibrationSource, store: Store, workspace: Path, name: str) -> tuple[Job, Folding]:
    inputs = transform_inputs(model, calibration).model_copy(update={"transform": name})
    work = job(model, calibration, store, workspace, inputs)
    return work, TRANSFORMS.get(name).fold(work)


def test_read_anatomy_finds_edges_and_heads(model: Path) -> None:
    anatomy = read_anatomy(model)
    block = anatomy.blocks[1]
    assert [len(edge.readers) for edge in block.edges] == [3, 2, 1]  # grouped heads: no edge from v to o
    assert block.edges[2].source == Rows("model.layers.1.mlp.up_proj", 0, 128)
    assert (block.heads.values, block.heads.head_dim) == (Rows("model.layers.1.self_attn.v_proj", 0, 32), 16)
    assert (anatomy.embedding, anatomy.head, anatomy.tied) == ("model.embed_tokens", "lm_head", False)
    assert anatomy.final_norm.offset == 0.0


def test_read_anatomy_tells_norms_apart(tmp_path: Path) -> None:
    gemma = read_anatomy(write_outlying(FAMILIES["gemma3"](True), tmp_path / "g"))
    sources = [edge.source for edge in gemma.blocks[0].edges]
    assert [(source.name.rpartition(".")[2], source.offset) for source in sources if not isinstance(source, Rows)] == [
        ("input_layernorm", 1.0),
        ("pre_feedforward_layernorm", 1.0),
    ]
    assert len(gemma.blocks[0].odd) == 2 and gemma.tied
    phi = read_anatomy(write_outlying(FAMILIES["phi3"](False), tmp_path / "p")).blocks[0]
    assert phi.edges[-1].source == Rows("model.layers.0.mlp.gate_up_proj", 128, 256)
    assert phi.heads.values == Rows("model.layers.0.self_attn.qkv_proj", 96, 128)


def test_awq_takes_the_alpha_of_least_error_by_brute_force(
    model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    work, folding = folded(model, calibration, store, tmp_path, "awq")
    weight_format, readers = FORMATS.get(FORMAT), ("gate_proj", "up_proj")
    moment_II = work.moment("model.layers.0.mlp.gate_proj").double()
    weight_OI = torch.cat([work.weight(f"model.layers.0.mlp.{leaf}.weight") for leaf in readers])
    errors = []
    for alpha in [step / 20 for step in range(20)]:
        scale_I = moment_II.diagonal().float() ** (alpha / 2)
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        change_OI = (weight_format.round_trip(weight_OI * scale_I) / scale_I - weight_OI).double()
        errors.append(torch.trace(change_OI @ moment_II @ change_OI.T).item())
    best = errors.index(min(errors))
    assert best > 0 and errors[best] < 0.9 * errors[0]
    expected_I = moment_II.diagonal().float() ** (best / 40)
    expected_I = expected_I / (expected_I.max() * expected_I.min()).sqrt()
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert torch.allclose(work.weight(norm) / folding.apply(norm, work.weight(norm)), expected_I, rtol=1e-4)
    up = "model.layers.0.mlp.gate_proj.weight"
    assert torch.allclose(folding.apply(up, work.weight(up)), work.weight(up) * expected_I, rtol=1e-4)


def test_awq_continues_after_a_kill(model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path) -> None:
    work, whole = folded(model, calibration, store, tmp_path / "whole", "awq")
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 6
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / JOURNAL).write_bytes(b"".join(lines[:4]) + b'{"reader": "model')
    _, again = folded(model, calibration, store, tmp_path / "cut", "awq")
    assert (tmp_path / "cut" / JOURNAL).read_bytes() == b"".join(lines)
    for name in whole.edits:
        assert torch.equal(whole.apply(name, work.weight(name)), again.apply(name, work.weight(name)))


def test_channel_scale_gives_inverse_extremes_and_survives_unseen_inputs() -> None:
    moment_II = torch.diag(torch.tensor([4.0, 1.0, 0.25, 0.0]))
    scale_I = channel_scale(moment_II, 0.5)
    assert scale_I.max() * scale_I.min() == pytest.approx(1.0)
    assert scale_I[0] / scale_I[1] == pytest.approx(2**0.5) and torch.isfinite(scale_I).all()
    assert channel_scale(moment_II, 0.0).eq(1).all() and ALPHAS[0] == 0.0 and len(ALPHAS) == 20
    assert channel_scale(torch.zeros(3, 3), 0.7).tolist() == pytest.approx([1.0] * 3)


def test_divide_rows_leaves_other_rows() -> None:
    edited = divide_rows(torch.tensor([2.0, 4.0]), 1)(torch.ones(4, 3))
    assert edited[:, 0].tolist() == [1.0, 0.5, 0.25, 1.0]
    assert divide_rows(torch.tensor([2.0]), 0)(torch.ones(2)).tolist() == [0.5, 1.0]


def test_output_error_is_the_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    change_OI, inputs_NI = torch.randn(5, 8, generator=generator), torch.randn(64, 8, generator=generator)
    expected = (inputs_NI @ change_OI.T).square().sum().item() / 64
    assert output_error(change_OI, inputs_NI.T @ inputs_NI / 64) == pytest.approx(expected, rel=1e-5)


def test_measure_peaks_gives_the_largest_magnitudes_of_the_whole_model(
    model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    layers = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj")
    peaks = measure_peaks(job(model, calibration, store, tmp_path), layers)
    whole = load_dequantized(model)
    seen: dict[str, list[torch.Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        whole.get_submodule(layer).register_forward_pre_hook(
            lambda _, arguments, layer=layer: seen[layer].append(arguments[0].abs().amax((0, 1)))
        )
    for tokens in prepare(calibration, model).samples[: SETTINGS.moments_sequences]:
        with torch.no_grad():
            whole(torch.tensor([tokens[: SETTINGS.moments_tokens]]))
    for layer in layers:
        assert torch.allclose(peaks[layer], torch.stack(seen[layer]).amax(0), rtol=1e-5)
    assert not list(tmp_path.glob("*.bin"))


def test_smoothing_scale_is_the_papers() -> None:
    scale_I = smoothing_scale(torch.tensor([16.0, 1.0]), torch.tensor([4.0, 1.0]), 0.5)
    assert scale_I.tolist() == [2.0, 1.0]
    assert smoothing_scale(torch.tensor([16.0]), torch.tensor([4.0]), 1.0).item() == 16.0


def test_smoothquant_balances_activations_and_weights(
    model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    work, folding = folded(model, calibration, store, tmp_path, "smoothquant")
    layers = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    peak_I = measure_peaks(work, (layers[0],))[layers[0]]
    norm = "model.layers.0.input_layernorm.weight"
    scale_I = work.weight(norm) / folding.apply(norm, work.weight(norm))
    after_I = torch.stack([folding.apply(f"{it}.weight", work.weight(f"{it}.weight")).abs().amax(0) for it in layers]).amax(0)
    assert torch.allclose(peak_I / scale_I, after_I, rtol=1e-4)  # a = 0.5: both sides meet at sqrt(max|x| max|w|)
    (warning,) = folding.warnings
    assert "no planned format rounds activations" in warning


@pytest.mark.parametrize("width", [1, 7, 16, 24, 576])
def test_rotation_is_orthogonal_and_undone(width: int) -> None:
    rotation = Rotation.random(width, seed=3)
    matrix_DD = rotation.forward(torch.eye(width)).double()
    assert torch.allclose(matrix_DD @ matrix_DD.T, torch.eye(width, dtype=torch.float64), atol=1e-6)
    rows = torch.randn(3, 2, 5 * width, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.backward(rotation.forward(rows)), rows, atol=1e-5)
    again = Rotation.random(width, seed=3)
    assert torch.equal(again.forward(torch.eye(width)).double(), matrix_DD)
    assert width == 1 or not torch.equal(Rotation.random(width, seed=4).forward(torch.eye(width)).double(), matrix_DD)


def test_rotation_is_signs_times_hadamard_kron_orthogonal() -> None:
    rotation = Rotation.random(24, seed=0)
    power_PP = torch.tensor(hadamard(8).tolist()).double() / 8**0.5
    expected_DD = torch.diag(rotation.signs_D) @ torch.kron(power_PP, rotation.odd_MM.contiguous())
    assert torch.allclose(rotation.forward(torch.eye(24)).double(), expected_DD, atol=1e-6)
    assert rotation.odd_MM.shape == (3, 3)


def test_rotate_heads_takes_the_best_seed_by_brute_force(
    model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    work, folding = folded(model, calibration, store, tmp_path, "rotate-heads")
    output = "model.layers.0.self_attn.o_proj"
    weights = {name: work.weight(f"model.layers.0.self_attn.{name}_proj.weight") for name in "vo"}
    moments = {name: work.moment(f"model.layers.0.self_attn.{name}_proj") for name in "vo"}
    errors = []
    for seed in range(SETTINGS.rotation_seeds):
        matrix_DD = Rotation.random(16, seed).forward(torch.eye(16))
        of_value, of_output = torch.block_diag(*[matrix_DD] * 2), torch.block_diag(*[matrix_DD] * 4)
        rotated = {"v": of_value.T @ weights["v"], "o": weights["o"] @ of_output}
        rounded = {name: FORMATS.get(FORMAT).round_trip(rotated[name]) for name in "vo"}
        changes = {"v": of_value @ rounded["v"] - weights["v"], "o": rounded["o"] @ of_output.T - weights["o"]}
        shares = [output_error(changes[name], moments[name]) / output_error(weights[name], moments[name]) for name in "vo"]
        errors.append(sum(shares))
    plain = sum(
        output_error(FORMATS.get(FORMAT).round_trip(weights[name]) - weights[name], moments[name])
        / output_error(weights[name], moments[name])
        for name in "vo"
    )
    assert min(errors) < plain
    best = Rotation.random(16, errors.index(min(errors)))
    stored = f"{output}.weight"
    assert torch.allclose(folding.apply(stored, weights["o"]), best.forward(weights["o"]), atol=1e-6)
    decision = folding.decisions[0]
    assert 0 < decision.numbers["output_error_left_ratio"] < 1 and "2 of 2 blocks" in decision.choice
    assert OUTLIERS[0] < 16
