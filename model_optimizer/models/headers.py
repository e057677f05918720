"""Safetensors headers read by hand: names, types, shapes and places of tensors, without any weight.

Knows the file format and nothing about architectures. What a header claims is checked before use.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from model_optimizer.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""Source: the limit of the reference implementation, safetensors/src/tensor.rs, MAX_HEADER_SIZE."""
ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of one shard."""

    name: str
    dtype: str
    """The name that safetensors uses, e.g. `F32`, `BF16`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """First byte of its data in the file."""
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, _Entry])


def read_header(path: Path) -> tuple[TensorHeader, ...]:
    """Return the tensors of one safetensors file in the order of their data.

    Raises:
        ConfigError: the file is truncated, its header is no JSON or too long, tensors overlap or leave gaps, or a size does
            not follow from type and shape.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        return parse_header(path, size, stream.read(header_bytes(path, size, stream.read(8))))


def header_bytes(path: Path, size: int, first: bytes) -> int:
    """Return how long the header of a file of `size` bytes is, which begins with `first`; the 8 bytes of the length not counted.

    Raises:
        ConfigError: the file cannot hold it, or it is too long.
    """
    length = int.from_bytes(first[:8], "little")
    if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise ConfigError(f"{path} is no whole safetensors file: {size} bytes, header of {length}; copy it again")
    return length


def parse_header(path: Path, size: int, raw: bytes) -> tuple[TensorHeader, ...]:
    """Return the tensors that the header `raw` of a file of `size` bytes describes, in the order of their data.

    Raises:
        ConfigError: as `read_header`, or a name stands twice.
    """
    length = len(raw)
    try:
        data = json.loads(raw, object_pairs_hook=_once)
        if isinstance(data, dict):
            data.pop("__metadata__", None)
        entries = _HEADER.validate_python(data)
    except (UnicodeDecodeError, ValueError, ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} has an unreadable safetensors header; copy the file again") from error
    tensors, position = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        _check_entry(path, name, entry, position)
        tensors.append(TensorHeader(name, entry.dtype, entry.shape, path, 8 + length + start, end - start))
        position = end
    if 8 + length + position != size:
        raise ConfigError(f"{path} holds {size} bytes where its header describes {8 + length + position}; copy it again")
    return tuple(tensors)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object of its pairs; of two values for one name, readers would take different ones."""
    if len(made := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice")
    return made


def _check_entry(path: Path, name: str, entry: _Entry, position: int) -> None:
    """Refuse a tensor that overlaps, leaves a gap, or whose size contradicts its shape."""
    start, end = entry.data_offsets
    if entry.dtype not in ITEM_BITS:
        raise ConfigError(f"{path}: tensor {name} has the unknown type {entry.dtype!r}; known: {', '.join(ITEM_BITS)}")
    if start != position:
        fault = "overlaps its neighbour" if start < position else "leaves a gap before it"
        raise ConfigError(f"{path}: tensor {name} starts at byte {start}, expected {position}: it {fault}; copy the file again")
    expected = math.prod(entry.shape) * ITEM_BITS[entry.dtype] // 8
    if min(entry.shape, default=0) < 0 or end - start != expected:
        raise ConfigError(
            f"{path}: tensor {name} of {entry.dtype} {list(entry.shape)} has {end - start} bytes, not {expected}; copy it again"
        )


class _IndexMetadata(BaseModel):
    total_size: int | None = None


class _ShardIndex(BaseModel):
    """model.safetensors.index.json: which shard holds which tensor."""

    metadata: _IndexMetadata = _IndexMetadata()
    weight_map: dict[str, str]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return every tensor of a model directory by name, shard by shard; {} where it holds no weights.

    Without an index that is `model.safetensors` or, where it is absent too, every safetensors file.

    Raises:
        ConfigError: a shard is damaged, missing or lies elsewhere, two shards hold one tensor, or the index does not match.
    """
    index = _read_index(directory) if (directory / INDEX).is_file() else None
    tensors: dict[str, TensorHeader] = {}
    for path in _shard_paths(directory, index):
        for tensor in read_header(path):
            if twin := tensors.get(tensor.name):
                raise ConfigError(
                    f"{directory}: tensor {tensor.name} lies in both {twin.file.name} and {path.name}; fetch the model again"
                )
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(directory, index, tensors)
    return tensors


def _read_index(directory: Path) -> _ShardIndex:
    try:
        return _ShardIndex.model_validate_json((directory / INDEX).read_bytes())
    except ValidationError as error:
        raise ConfigError(
            f"{directory / INDEX} is unreadable: it maps `weight_map` to tensor -> shard; fetch it again"
        ) from error


def _shard_paths(directory: Path, index: _ShardIndex | None) -> tuple[Path, ...]:
    if index is None:
        single = directory / SINGLE
        return (single,) if single.is_file() else tuple(sorted(directory.glob("*.safetensors")))
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{directory / INDEX} names {name!r}, which lies outside the model directory")
        if not (directory / name).is_file():
            raise ConfigError(f"{directory / INDEX} names {name}, which is absent; fetch the missing shard")
    return tuple(directory / name for name in names)


def _check_index(directory: Path, index: _ShardIndex, tensors: dict[str, TensorHeader]) -> None:
    """Refuse an index whose names, places or total size differ from what the shards hold."""
    found = {name: tensor.file.name for name, tensor in tensors.items()}
    faults = {
        "missing from the shards": sorted(index.weight_map.keys() - found.keys()),
        "absent from the index": sorted(found.keys() - index.weight_map.keys()),
        "in another shard than stated": sorted(name for name, file in index.weight_map.items() if found.get(name, file) != file),
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise ConfigError(f"{directory / INDEX}: {', '.join(names[:_NAMES_SHOWN])}{more}: {fault}; fetch the model again")
    total = sum(tensor.num_bytes for tensor in tensors.values())
    if index.metadata.total_size not in (None, total):
        raise ConfigError(
            f"{directory / INDEX} states total_size {index.metadata.total_size}, the shards hold {total} bytes; fetch it again"
        )
