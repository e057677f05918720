"""One block at a time: nothing stays, what is captured is shared; the arithmetic of the pre-flight; the journal of states."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import Quiet
from model_optimizer.quantization import preflight
from model_optimizer.quantization.blocks import run_block
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.hidden_states import HiddenStates, WalkJournal
from model_optimizer.quantization.preflight import announce, estimate_walk
from model_optimizer.quantization.squares import PANEL_ROWS, add_square, mirror
from model_optimizer.quantization.walk import Walk, plan_walk


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(16)))
    source = CalibrationSource.of(CalibrationConfig(path=path), path.parent)
    model = write_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=4, tied=False)
    return plan_walk(model, source, num_sequences=6, max_tokens=24)


def resident_bytes(walk: Walk) -> int:
    tensors = [*walk.model.decoder.parameters()]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")


def test_resident_holds_one_block_and_nothing_after(walk: Walk) -> None:
    block_bytes = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64)
    assert resident_bytes(walk) == 0
    for number in (0, 3):
        with walk.model.resident(number):
            assert resident_bytes(walk) == block_bytes
    assert resident_bytes(walk) == 0


def test_capture_and_blocks_give_the_hidden_states_of_the_whole_model(walk: Walk, tmp_path: Path) -> None:
    entering: dict[int, torch.Tensor] = {}
    calls = walk.model.capture(walk.sequences, entering.__setitem__)
    assert resident_bytes(walk) == 0
    assert len({id(call) for call in calls}) == len({len(tokens) for tokens in walk.sequences})  # equal calls are one
    model = load_dequantized(walk.model.header("model.norm.weight").file.parent)
    for index, tokens in enumerate(walk.sequences):
        hidden = entering[index]
        for number in range(4):
            with walk.model.resident(number) as block:
                hidden = run_block(block, hidden, calls[index][number])
        with torch.no_grad():
            expected = model.base_model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        assert torch.equal(entering[index], expected.hidden_states[0])
        torch.testing.assert_close(model.base_model.norm(hidden), expected.last_hidden_state, rtol=1e-5, atol=1e-5)


def test_streamed_model_refuses_renamed_tensors_by_name(walk: Walk, tmp_path: Path) -> None:
    source = walk.model.header("model.norm.weight").file
    tensors = load_file(source)
    tensors["model.layers.1.ln.weight"] = tensors.pop("model.layers.1.input_layernorm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source.parent / "config.json").read_bytes())
    from model_optimizer.quantization.blocks import StreamedModel

    with pytest.raises(UnsupportedError, match=r"does not store model\.layers\.1\.input_layernorm\.weight .*1 such tensors"):
        StreamedModel(tmp_path, walk.stack)


def test_estimate_walk_counts_weights_and_moments(walk: Walk) -> None:
    weights = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    squares = 4 * (3 * 64**2 + 128**2)
    estimate = estimate_walk(walk, num_passes=2, flops_per_s=1e9)
    assert estimate.flops == walk.num_tokens * (2 * 2 * weights + squares)
    assert estimate.seconds == estimate.flops / 1e9
    assert estimate.block_bytes == weights + squares + 4 * 6 * max(map(len, walk.sequences)) * 128


class Notes(Quiet):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.mark.parametrize(("long_s", "num_notes"), [(1e9, 1), (0.0, 2)])
def test_announce_tries_two_blocks_before_a_long_walk(
    long_s: float, num_notes: int, walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LONG_S", long_s)
    notes = Notes()
    estimate = announce(walk, 1, notes)
    assert len(notes.lines) == num_notes and f"4 blocks x {walk.num_tokens} tokens" in notes.lines[0]
    assert estimate.seconds > 0 and resident_bytes(walk) == 0
    assert num_notes == 1 or "a dry run of 2 blocks" in notes.lines[1]


def test_hidden_states_resume_where_they_were_left(tmp_path: Path) -> None:
    states, journal = HiddenStates(tmp_path, "hidden", (3, 1), 4), WalkJournal(tmp_path / "walk.json")
    assert journal.resume((states,)) is None
    values = [torch.randn(1, 3, 4), torch.randn(1, 1, 4)]
    with states.writing(5) as writer:
        for value in values:
            writer.write(value)
    journal.advance(5, {"hidden": writer.checksum})
    assert WalkJournal(tmp_path / "walk.json").resume((states,)) == 5
    assert all(torch.equal(left, right) for left, right in zip(states.read(5), values, strict=True))
    content = bytearray(states.path(5).read_bytes())
    content[7] ^= 1
    states.path(5).write_bytes(content)
    assert WalkJournal(tmp_path / "walk.json").resume((states,)) is None


@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(1, 3), (50, 64), (7, 1500)])
def test_add_square_and_mirror_give_the_sum_of_products(num_tokens: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    parts = [torch.randn(num_tokens, num_inputs, generator=generator) for _ in range(3)]
    sum_II = torch.zeros(num_inputs, num_inputs)
    for inputs_NI in parts:
        add_square(sum_II, inputs_NI)
    if num_inputs > 2 * PANEL_ROWS:
        assert sum_II[:PANEL_ROWS, 2 * PANEL_ROWS :].count_nonzero() == 0, "the upper triangle's blocks are left out"
    expected_II = sum(inputs_NI.double().T @ inputs_NI.double() for inputs_NI in parts)
    assert torch.equal(mirror(sum_II), sum_II.T)
    torch.testing.assert_close(sum_II.double(), expected_II, rtol=1e-5, atol=1e-4)
