"""Tensor sources: rows of a checkpoint and of a generator, and shards written from pieces."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import read_headers
from model_optimizer.models.shards import StatedTensor, plan_shards, write_index, write_shard
from model_optimizer.models.sources import CheckpointSource, VirtualSource, llama_shapes

SHAPES = {"a.weight": (5, 7), "b.weight": (11,), "c": ()}


def test_checkpoint_source_gives_rows_in_the_stored_type(tmp_path: Path) -> None:
    tensors = {"m": torch.arange(24.0).reshape(6, 4).bfloat16(), "s": torch.tensor(3.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    assert torch.equal(source.rows("m", 2, 5), tensors["m"][2:5]) and source.rows("m", 2, 5).dtype == torch.bfloat16
    assert source.rows("s", 0, 1).item() == 3.5


def test_checkpoint_source_refuses_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no safetensors weights"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize(("name", "step"), [("a.weight", 1), ("a.weight", 2), ("a.weight", 5), ("b.weight", 4)])
def test_virtual_source_gives_the_same_values_in_any_pieces(name: str, step: int) -> None:
    source = VirtualSource(SHAPES, seed=3)
    length = SHAPES[name][0]
    whole = source.rows(name, 0, length)
    pieces = [source.rows(name, start, min(start + step, length)) for start in range(0, length, step)]
    assert whole.shape == SHAPES[name] and whole.dtype == torch.bfloat16
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(VirtualSource(SHAPES, seed=3).rows(name, 0, length), whole)
    assert not torch.equal(VirtualSource(SHAPES, seed=4).rows(name, 0, length), whole)
    assert source.rows("c", 0, 1).shape == ()


def test_virtual_source_is_normal_and_its_tensors_differ() -> None:
    source = VirtualSource({"a": (400, 500), "b": (400, 500)}, dtype="F32", spread=0.02)
    values = source.rows("a", 0, 400)
    assert values.mean().abs().item() < 2e-4 and values.std().item() == pytest.approx(0.02, rel=0.01)
    assert torch.corrcoef(torch.stack([values.flatten(), source.rows("b", 0, 400).flatten()]))[0, 1].abs() < 0.01


def test_virtual_source_refuses_integer_types() -> None:
    with pytest.raises(ConfigError, match="no type 'I8'; known: F32, BF16, F16"):
        VirtualSource(SHAPES, dtype="I8")


def test_llama_shapes_of_70b_hold_the_known_number_of_parameters() -> None:
    source = VirtualSource(llama_shapes(80, 8192, 28672, 1024, 128256))
    assert (
        sum(header.num_parameters for header in source.headers.values()) == 70_553_706_496
    )  # Source: the safetensors index of Llama-3.1-70B: 141,107,412,992 bytes of bfloat16


def test_plan_shards_fills_in_order_and_gives_a_large_tensor_its_own() -> None:
    stated = [StatedTensor(name, "F32", (size,)) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1))]
    shards = plan_shards(stated, 16)
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [["a", "b"], ["c"], ["d"]]
    assert [shard.file for shard in shards] == [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    assert plan_shards(stated, 1000)[0].file == "model.safetensors"


@pytest.mark.parametrize("max_bytes", [64, 10**6])
def test_write_shard_round_trips_through_the_reference_reader(max_bytes: int, tmp_path: Path) -> None:
    tensors = {"x": torch.arange(40.0).reshape(8, 5).half(), "y": torch.arange(6), "z": torch.tensor(1.5)}
    stated = [StatedTensor("x", "F16", (8, 5)), StatedTensor("y", "I64", (6,)), StatedTensor("z", "F32", ())]

    def pieces(tensor: StatedTensor) -> Iterator[bytes]:
        content = tensors[tensor.name].numpy().tobytes()
        yield from (content[at : at + 3] for at in range(0, len(content), 3))

    shards = plan_shards(stated, max_bytes)
    for shard in shards:
        digest = write_shard(tmp_path, shard, pieces)
        assert digest == hashlib.sha256((tmp_path / shard.file).read_bytes()).hexdigest()
    write_index(tmp_path, shards)
    assert read_headers(tmp_path).keys() == tensors.keys()  # index, offsets and sizes are checked there
    loaded = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / shard.file).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert not list(tmp_path.glob("*.part"))
