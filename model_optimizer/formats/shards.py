"""Read the safetensors shards of a Hugging Face directory, header first, one tensor at a time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model_optimizer.errors import IntegrityError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where a tensor lies and what it is, without its values."""

    shard: str
    dtype: str
    """safetensors' name, e.g. `F32`, `BF16`, `I32`."""
    shape: tuple[int, ...]
    num_bytes: int


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return the header of every tensor by name, in file order.

    Raises:
        IntegrityError: no checkpoint here, or index and shards disagree; the message names what is missing or extra.
    """
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise IntegrityError(f"{directory} holds neither {SINGLE} nor {INDEX}; give a directory with safetensors weights")
        return _shard_headers(directory, SINGLE)
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    stated: dict[str, str] = index["weight_map"]
    shards = sorted(set(stated.values()))
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise IntegrityError(f"{directory / INDEX} names shards that are absent: {', '.join(missing)}; fetch them again")
    found = {name: header for shard in shards for name, header in _shard_headers(directory, shard).items()}
    wrong = sorted(name for name in stated.keys() | found.keys() if name not in found or stated.get(name) != found[name].shard)
    if wrong:
        raise IntegrityError(f"{directory / INDEX} and its shards disagree on {len(wrong)} tensors: {', '.join(wrong[:5])}")
    total = index.get("metadata", {}).get("total_size")
    actual = sum(header.num_bytes for header in found.values())
    if total is not None and total != actual:
        raise IntegrityError(f"{directory / INDEX} says total_size {total}, the shards hold {actual} bytes")
    return found


def read_tensor(directory: Path, header: TensorHeader, name: str) -> torch.Tensor:
    """Return one tensor in its stored dtype."""
    with safe_open(directory / header.shard, framework="pt") as stream:
        tensor: torch.Tensor = stream.get_tensor(name)
        return tensor


def iterate_tensors(directory: Path, headers: dict[str, TensorHeader]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor named in `headers`, opening each shard once."""
    for shard in sorted({header.shard for header in headers.values()}):
        with safe_open(directory / shard, framework="pt") as stream:
            for name, header in headers.items():
                if header.shard == shard:
                    yield name, stream.get_tensor(name)


def _shard_headers(directory: Path, shard: str) -> dict[str, TensorHeader]:
    """Parse the JSON header of one file. Source: the safetensors format, 8-byte little-endian length then JSON."""
    try:
        with safe_open(directory / shard, framework="pt"):
            pass  # lets the library check offsets against the file's length
    except SafetensorError as error:
        raise IntegrityError(f"{directory / shard} is no intact safetensors file: {error}") from error
    with (directory / shard).open("rb") as stream:
        entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {
        name: TensorHeader(shard, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries.items()
        if name != "__metadata__"
    }
