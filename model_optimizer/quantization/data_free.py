"""Round a whole checkpoint to nearest without data and without ever holding a tensor: rows in, shards out.

Outputs of a matrix are rounded independently of each other, so that a few rows are in memory at a time, however large the
model. A shard that is whole and recorded with its digest is not written again after a kill. The source may be a directory or
a generator; what comes out is the compressed-tensors layout that transformers and vLLM load.

Shape letters: O output features, I input features, R rows of one piece, G groups along I.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from pydantic import BaseModel

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.compressed_tensors import quantization_section
from model_optimizer.formats.model_config import CONFIG, SECTION
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.journal import Journal
from model_optimizer.models.headers import TensorHeader
from model_optimizer.models.shards import Shard, StatedTensor, as_bytes, plan_shards, write_index, write_shard
from model_optimizer.models.sources import TensorSource
from model_optimizer.protocols import Progress
from model_optimizer.store import write_atomically

MAX_SHARD_BYTES = 4 * 2**30
PIECE_ELEMENTS = 2**23
"""Weights that are in memory at once: 32 MiB as float32, and a few copies of them."""
JOURNAL = "shards.journal"
_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


class _Done(BaseModel):
    """A finished shard."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DataFreeJob:
    """What is to be rounded and how."""

    source: TensorSource
    source_digest: str
    """Names the source's content, so that a killed job continues only on the same weights."""
    config: Mapping[str, object]
    """The model's config.json."""
    plan: Mapping[str, str]
    """Layer -> format name; tensors of other modules are copied as they are."""
    max_shard_bytes: int = MAX_SHARD_BYTES


def quantize_data_free(job: DataFreeJob, target: Path, *, progress: Progress) -> tuple[str, ...]:
    """Write the rounded checkpoint's shards, index and config to `target`; return the sha256 of each shard in order.

    Raises:
        UnsupportedError: a planned layer is absent, or a format does not fit it; nothing is written then.
        StorageError: the disk is full; the call can be repeated.
    """
    _refuse_unfit(job)
    stated = _stated(job)
    shards = plan_shards(stated, job.max_shard_bytes)
    target.mkdir(parents=True, exist_ok=True)
    total = sum(shard.num_bytes for shard in shards)
    progress.note(f"data-free rounding: {len(job.plan)} layers, {len(shards)} shards, {total / 2**30:.2f} GiB to write")
    journal = Journal(target / JOURNAL, _identity(job, shards), _Done)
    done = {record.file: record.sha256 for record in journal.records}
    scales: dict[str, list[torch.Tensor]] = {}

    def pieces(tensor: StatedTensor) -> Iterator[memoryview]:
        return _pieces(job, tensor, scales)

    for shard in progress.track(shards, "shards", len(shards)):
        path = target / shard.file
        if shard.file in done and path.is_file() and file_sha256(path) == done[shard.file]:
            continue
        done[shard.file] = write_shard(target, shard, pieces)
        journal.append(_Done(file=shard.file, sha256=done[shard.file]))
    write_index(target, shards)
    config = dict(job.config) | {SECTION: quantization_section(job.plan)}
    write_atomically(target / CONFIG, json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode())
    journal.path.unlink()
    return tuple(done[shard.file] for shard in shards)


def _identity(job: DataFreeJob, shards: tuple[Shard, ...]) -> str:
    """Return what a journal is for: the layout that is written and where it comes from."""
    layout = [[shard.file, *(tensor.name for tensor in shard.tensors)] for shard in shards]
    content = [job.source_digest, layout, sorted(job.plan.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _refuse_unfit(job: DataFreeJob) -> None:
    for layer, name in job.plan.items():
        header = job.source.headers.get(f"{layer}.weight")
        if header is None or len(header.shape) != 2:
            raise UnsupportedError(f"{layer}.weight is no matrix of the source, so it cannot be stored as {name}; leave it out")
        if reason := FORMATS.get(name).check(*header.shape):
            raise UnsupportedError(f"{name} does not fit {layer}: {reason}; choose another format or leave the layer out")


def _stated(job: DataFreeJob) -> list[StatedTensor]:
    """Return the tensors to write, a layer's words before its scales."""
    stated = []
    for name, header in job.source.headers.items():
        layer = name.removesuffix(".weight")
        weight_format = FORMATS.get(job.plan.get(layer, FULL_PRECISION))
        if name == layer or not weight_format.on_grid:
            stated.append(StatedTensor(name, header.dtype, header.shape))
            continue
        rows, columns = header.shape
        groups = columns // weight_format.group_size if weight_format.group_size else 1
        words = -(-columns * weight_format.bits // 32)
        stated += [
            StatedTensor(layer + _PACKED, "I32", (rows, words)),
            StatedTensor(layer + _SCALE, "F16", (rows, groups)),
            StatedTensor(layer + _SHAPE, "I64", (2,)),
        ]
    return stated


def _pieces(job: DataFreeJob, tensor: StatedTensor, scales: dict[str, list[torch.Tensor]]) -> Iterator[memoryview]:
    """Yield a tensor's bytes; scales are small and wait in `scales` from the layer's words until their turn."""
    layer, dot, suffix = tensor.name.rpartition(".")
    suffix = dot + suffix
    if tensor.name in job.source.headers:
        for rows in _rows(job.source, job.source.headers[tensor.name]):
            yield as_bytes(rows)
    elif suffix == _PACKED:
        weight_format = FORMATS.get(job.plan[layer])
        scales[layer] = []
        for rows_RI in _rows(job.source, job.source.headers[f"{layer}.weight"]):
            rounded = weight_format.quantize(rows_RI)
            scales[layer].append(rounded.scale_OG)
            yield as_bytes(pack_to_int32(rounded.codes_OI, weight_format.bits))
    elif suffix == _SCALE:
        if layer not in scales:  # the words lie in the shard before, which is done
            weight_format = FORMATS.get(job.plan[layer])
            found = [weight_format.quantize(rows_RI) for rows_RI in _rows(job.source, job.source.headers[f"{layer}.weight"])]
            scales[layer] = [rounded.scale_OG for rounded in found]
        for scale_RG in scales.pop(layer):
            yield as_bytes(scale_RG)
    else:
        yield as_bytes(torch.tensor(job.source.headers[f"{layer}.weight"].shape, dtype=torch.int64))


def _rows(source: TensorSource, header: TensorHeader) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in pieces of about PIECE_ELEMENTS values."""
    if not header.shape:
        yield source.rows(header.name, 0, 1)
        return
    width = max(1, header.num_parameters // max(1, header.shape[0]))
    step = max(1, PIECE_ELEMENTS // width)
    for start in range(0, header.shape[0], step):
        yield source.rows(header.name, start, min(start + step, header.shape[0]))
