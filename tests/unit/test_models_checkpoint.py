"""Reading shards and refusing damaged or dangerous model directories (QA-047)."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model_optimizer.errors import ConfigError
from model_optimizer.models.check import check_model_directory
from model_optimizer.models.headers import INDEX, read_header, read_headers
from model_optimizer.models.parts import is_linear
from model_optimizer.models.weights import iterate_tensors, read_rows, read_tensor


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same model in three shards with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number in range(3):
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, model / shard)
        places |= dict.fromkeys(names[number::3], shard)
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return model


def _edit_index(model: Path, **changes: object) -> None:
    index = json.loads((model / INDEX).read_text())
    (model / INDEX).write_text(json.dumps(index | changes))


def _header(model: Path, entries: dict[str, object], data: bytes) -> None:
    raw = json.dumps(entries).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_check_model_directory_returns_every_tensor_when_sound(sharded: Path) -> None:
    tensors = check_model_directory(sharded)
    assert len(tensors) == 20  # embedding, final norm, 2 x (7 linears + 2 norms); the head is tied
    assert sum(tensor.num_parameters for tensor in tensors.values()) == 260 * 64 + 64 + 2 * (
        2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 128
    )


def test_check_model_directory_names_the_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00003\.safetensors, which is absent"):
        check_model_directory(sharded)


def test_check_model_directory_names_the_tensor_that_the_index_lacks(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    _edit_index(sharded, weight_map={name: shard for name, shard in places.items() if name != "model.norm.weight"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: absent from the index"):
        check_model_directory(sharded)


def test_check_model_directory_names_the_misplaced_tensor(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    shards = sorted(set(places.values()))
    other = next(shard for shard in shards if shard != places["model.norm.weight"])
    _edit_index(sharded, weight_map=places | {"model.norm.weight": other})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: in another shard than stated"):
        check_model_directory(sharded)


def test_check_model_directory_tells_both_sizes_when_total_size_is_wrong(sharded: Path) -> None:
    total = json.loads((sharded / INDEX).read_text())["metadata"]["total_size"]
    _edit_index(sharded, metadata={"total_size": 1})
    with pytest.raises(ConfigError, match=f"total_size 1, the shards hold {total} bytes"):
        check_model_directory(sharded)


def test_check_model_directory_refuses_a_shard_outside(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    _edit_index(sharded, weight_map=places | {"model.norm.weight": "../secret.safetensors"})
    with pytest.raises(ConfigError, match="outside the model directory"):
        check_model_directory(sharded)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_check_model_directory_says_what_is_missing(model: Path, file: str, message: str) -> None:
    (model / file).unlink()
    with pytest.raises(ConfigError, match=message):
        check_model_directory(model)


def test_check_model_directory_refuses_pickle_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle weights only \(pytorch_model.bin\)"):
        check_model_directory(model)


def test_check_model_directory_refuses_custom_code(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}))
    with pytest.raises(ConfigError, match="auto_map"):
        check_model_directory(model)


def test_check_model_directory_refuses_a_config_that_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        check_model_directory(model)


def test_read_header_refuses_a_truncated_file(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="copy it again"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x01\x02", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 100_000_001) + b" " * 9]
)
def test_read_header_refuses_a_length_that_cannot_be(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="no whole safetensors file"):
        read_header(model / "model.safetensors")


@pytest.mark.parametrize("raw", [b"no json", b"[1]", b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_read_header_refuses_what_is_no_header(model: Path, raw: bytes) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ConfigError, match="unreadable safetensors header"):
        read_header(model / "model.safetensors")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}, "overlaps"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}, "leaves a gap"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 8]}, "4 bytes, not 8"),
        ({"dtype": "F33", "shape": [1], "data_offsets": [4, 8]}, "unknown type 'F33'"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [4, 8]}, "4 bytes, not 4"),
    ],
)
def test_read_header_refuses_wrong_places_and_sizes(model: Path, second: dict[str, object], message: str) -> None:
    _header(model, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": second}, bytes(8))
    with pytest.raises(ConfigError, match=message):
        read_header(model / "model.safetensors")


def test_read_headers_refuses_a_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    shutil.copyfile(sharded / "model-00001-of-00003.safetensors", sharded / "other.safetensors")
    with pytest.raises(ConfigError, match=r"lies in both model-00001-of-00003\.safetensors and other\.safetensors"):
        read_headers(sharded)


def test_read_headers_reads_the_single_file_alone_where_there_is_no_index(model: Path) -> None:
    expected = read_headers(model)
    shutil.copyfile(model / "model.safetensors", model / "consolidated.safetensors")
    assert read_headers(model) == expected


def test_iterate_tensors_yields_what_was_saved(sharded: Path, tiny_llama: Path) -> None:
    expected = load_file(tiny_llama / "model.safetensors")
    found = dict(iterate_tensors(read_headers(sharded).values()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_read_tensor_and_read_rows_agree_with_the_file(sharded: Path, tiny_llama: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    header, expected = read_headers(sharded)[name], load_file(tiny_llama / "model.safetensors")[name]
    assert torch.equal(read_tensor(header), expected)
    assert torch.equal(read_rows(header, 5), expected[:5])


def test_is_linear_holds_for_the_decoder_linears_only(tiny_llama: Path) -> None:
    shapes = {name.removesuffix(".weight"): it.shape for name, it in read_headers(tiny_llama).items() if is_linear(it)}
    assert len(shapes) == 14
    assert shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert shapes["model.layers.1.mlp.down_proj"] == (64, 128)
    assert not any("embed" in name or "head" in name or "norm" in name for name in shapes)
    assert np.sum([rows * columns for rows, columns in shapes.values()]) == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
