"""Data-free rounding against the layer-by-layer writer, byte by byte, in pieces, after a kill, and what it refuses."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.models.sources import CheckpointSource, VirtualSource, llama_shapes
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization import data_free
from model_optimizer.quantization.data_free import DataFreeJob, quantize_data_free
from model_optimizer.quantization.layers import read_layers


def make_job(model: Path, name: str = "int4-g32", max_shard_bytes: int = 2**30) -> DataFreeJob:
    layers = read_layers(model).linears
    plan = {layer.name: "int8-channel" if "down_proj" in layer.name else name for layer in layers}
    return DataFreeJob(CheckpointSource(model), "digest", json.loads((model / "config.json").read_bytes()), plan, max_shard_bytes)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.mark.parametrize(("piece", "max_shard_bytes"), [(2**23, 2**30), (1, 20_000), (640, 9_000)])
def test_quantize_data_free_stores_what_the_layer_writer_stores(
    piece: int, max_shard_bytes: int, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_free, "PIECE_ELEMENTS", piece)
    job, headers = make_job(untied, max_shard_bytes=max_shard_bytes), read_headers(untied)

    def rounded(layer: str) -> QuantizedTensor:
        return FORMATS.get(job.plan[layer]).quantize(read_tensor(headers[f"{layer}.weight"]))

    write_checkpoint(untied, tmp_path / "expected", job.plan, rounded)
    quantize_data_free(job, tmp_path / "found", progress=Quiet())
    expected, found = read_headers(tmp_path / "expected"), read_headers(tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, header in expected.items():
        left, right = read_tensor(header), read_tensor(found[name])
        assert left.dtype == right.dtype and torch.equal(left, right), name
    assert (tmp_path / "found" / "config.json").read_bytes() == (tmp_path / "expected" / "config.json").read_bytes()
    assert (len(files_of(found)) == 1) == (max_shard_bytes == 2**30)
    logits = load_dequantized(tmp_path / "found")(torch.tensor([[5, 6, 7]])).logits
    assert torch.isfinite(logits).all()


def files_of(headers: dict[str, TensorHeader]) -> set[str]:
    return {header.file.name for header in headers.values()}


class Killed(BaseException):
    """Stands for SIGKILL."""


class KillAt(Quiet):
    """Stop the world before shard `count`."""

    def __init__(self, count: int):
        self.count = count

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for index, item in enumerate(items):
            if index == self.count:
                raise Killed
            yield item


def test_quantize_data_free_continues_after_a_kill_with_the_same_bytes(untied: Path, tmp_path: Path) -> None:
    job = make_job(untied, max_shard_bytes=30_000)
    expected = quantize_data_free(job, tmp_path / "whole", progress=Quiet())
    with pytest.raises(Killed):
        quantize_data_free(job, tmp_path / "cut", progress=KillAt(3))
    kept = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "cut").glob("*.safetensors"))}
    damaged = next(iter(kept))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(kept) == 3 and quantize_data_free(job, tmp_path / "cut", progress=Quiet()) == expected
    assert [path for path in kept if path.stat().st_mtime_ns == kept[path]] == list(kept)[1:]
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes() for name in files)


def test_quantize_data_free_rounds_a_virtual_checkpoint(tmp_path: Path) -> None:
    shapes = llama_shapes(num_layers=2, hidden_size=64, intermediate_size=128, num_kv_features=32, vocab_size=260)
    source = VirtualSource(shapes, seed=5)
    plan = {name.removesuffix(".weight"): "int4-g64" for name in shapes if "_proj" in name}
    quantize_data_free(DataFreeJob(source, "seed 5", {"model_type": "llama"}, plan, 40_000), tmp_path, progress=Quiet())
    headers = read_headers(tmp_path)
    assert len(files_of(headers)) > 1
    rows = source.rows("model.layers.1.mlp.down_proj.weight", 0, 64)
    scale = read_tensor(headers["model.layers.1.mlp.down_proj.weight_scale"])
    assert torch.equal(scale, FORMATS.get("int4-g64").quantize(rows).scale_OG)
    with safe_open(headers["lm_head.weight"].file, framework="pt") as shard:
        assert torch.equal(shard.get_tensor("lm_head.weight"), source.rows("lm_head.weight", 0, 260))


@pytest.mark.parametrize(
    ("layer", "name", "message"),
    [
        ("model.norm", "int4-g32", r"model\.norm\.weight is no matrix of the source"),
        ("model.nothing", "int4-g32", r"model\.nothing\.weight is no matrix of the source"),
        ("model.layers.0.self_attn.q_proj", "int4-g128", "int4-g128 does not fit .*q_proj: in_features 64"),
    ],
)
def test_quantize_data_free_refuses_before_it_writes(layer: str, name: str, message: str, untied: Path, tmp_path: Path) -> None:
    job = DataFreeJob(CheckpointSource(untied), "digest", {}, {layer: name})
    with pytest.raises(UnsupportedError, match=message):
        quantize_data_free(job, tmp_path / "out", progress=Quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [it for it in FORMATS.names() if FORMATS.get(it).on_grid and FORMATS.get(it).activation is None])
def test_quantize_data_free_takes_every_format_that_needs_no_data(
    name: str, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, headers = read_layers(untied).linears, read_headers(untied)
    if any(FORMATS.get(name).check(layer.out_features, layer.in_features) for layer in layers):
        pytest.skip(f"{name} does not fit the tiny model")
    monkeypatch.setattr(data_free, "PIECE_ELEMENTS", 640)
    plan = {layer.name: name for layer in layers}
    job = DataFreeJob(CheckpointSource(untied), "digest", json.loads((untied / "config.json").read_bytes()), plan, 20_000)
    quantize_data_free(job, tmp_path / "found", progress=Quiet())
    write_checkpoint(
        untied, tmp_path / "expected", plan, lambda layer: FORMATS.get(name).quantize(read_tensor(headers[f"{layer}.weight"]))
    )
    expected, found = read_headers(tmp_path / "expected"), read_headers(tmp_path / "found")
    assert found.keys() == expected.keys()
    assert all(torch.equal(read_tensor(header), read_tensor(found[it])) for it, header in expected.items())
