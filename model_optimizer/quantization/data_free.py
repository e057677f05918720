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
from pydantic import BaseModel

from model_optimizer.artifacts.base import StageInputs, Tree, file_sha256
from model_optimizer.artifacts.exported import RoundedModel
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.compressed_tensors import HEAD, copy_companions, quantization_section
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.formats.storage import codes_part, num_groups, small_parts, stored_parts
from model_optimizer.journal import Journal
from model_optimizer.models.headers import TensorHeader
from model_optimizer.models.shards import Shard, StatedTensor, as_bytes, plan_shards, write_index, write_shard
from model_optimizer.models.sources import CheckpointSource, TensorSource
from model_optimizer.protocols import Progress
from model_optimizer.quantization.coverage import measure_coverage, require_coverage
from model_optimizer.quantization.layers import find_layers, require_fit
from model_optimizer.store import file_refs, write_atomically

MAX_SHARD_BYTES = 4 * 2**30
PIECE_ELEMENTS = 2**23
"""Weights that are in memory at once: 32 MiB as float32, and a few copies of them."""
JOURNAL = "shards.journal"
CHECKPOINT = "checkpoint"


class _Done(BaseModel):
    """A finished shard."""

    file: str
    sha256: str


class DataFreeInputs(StageInputs):
    """Everything that rounding without data reads."""

    model: Tree
    format: str
    max_shard_bytes: int = MAX_SHARD_BYTES


def round_model(inputs: DataFreeInputs, workspace: Path, *, progress: Progress) -> RoundedModel:
    """Round every linear layer of a model to nearest in one format, streamed; the checkpoint is whole and loads as it is.

    Raises:
        ConfigError: an unknown format.
        UnsupportedError: the format needs data or does not fit a layer, or the model keeps matrices in another form.
        IntegrityError: what was written is not what was planned.
    """
    model, found = inputs.model.path, find_layers(inputs.model.path)
    layers = found.linears
    if FORMATS.get(inputs.format).activation == "static-tensor":
        raise UnsupportedError(f"{inputs.format} freezes the step of every layer's input, which only calibration data give")
    if aside := [layer.name for layer in layers if layer.transposed]:
        raise UnsupportedError(f"{aside[0]} is stored as [inputs, outputs], which is not streamed; give calibration data")
    require_fit(layers, inputs.format)
    tied = bool(read_config(model).tie_word_embeddings)
    job = DataFreeJob(
        source=CheckpointSource(model),
        source_digest=inputs.model.digest,
        config=json.loads((model / CONFIG).read_text(encoding="utf-8")),
        plan={layer.name: inputs.format for layer in layers} | dict.fromkeys(found.routers, FULL_PRECISION),
        left_out=frozenset([f"{HEAD}.weight"] if tied else []),
        max_shard_bytes=inputs.max_shard_bytes,
    )
    quantize_data_free(job, workspace / CHECKPOINT, progress=progress)
    copy_companions(model, workspace / CHECKPOINT)
    coverage = measure_coverage(model, workspace / CHECKPOINT, layers, dict(job.plan), tied)
    require_coverage(coverage, dict(job.plan))
    decision = Decision(
        subject="calibration",
        choice="none",
        because="rounding to nearest needs no data; no layer was weighed, and no damage predicted",
        numbers={"num_layers": len(layers), "true_bits_per_weight": coverage.true_bits_per_weight},
    )
    return RoundedModel(
        checkpoint=CHECKPOINT,
        format=inputs.format,
        coverage=coverage,
        files=file_refs(workspace, workspace / CHECKPOINT),
        decisions=(decision,),
    )


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
    left_out: frozenset[str] = frozenset()
    """Tensors that are not written: a head that is tied to the embedding."""


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
    rounding = _Rounding(job)
    for shard in progress.track(shards, "shards", len(shards)):
        path = target / shard.file
        if shard.file in done and path.is_file() and file_sha256(path) == done[shard.file]:
            continue
        done[shard.file] = write_shard(target, shard, rounding.pieces)
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
    """Return the tensors to write, a layer's codes before its scales."""
    stated = []
    for name, header in job.source.headers.items():
        layer = name.removesuffix(".weight")
        weight_format = FORMATS.get(job.plan.get(layer, FULL_PRECISION))
        if name in job.left_out:
            continue
        if name == layer or not weight_format.on_grid:
            stated.append(StatedTensor(name, header.dtype, header.shape))
            continue
        parts = stored_parts(weight_format, *header.shape)
        stated += [StatedTensor(layer + part.suffix, part.dtype, part.shape) for part in parts]
    return stated


class _Rounding:
    """Gives the bytes of the tensors to write; scales and zero points wait from their layer's codes until their turn."""

    def __init__(self, job: DataFreeJob):
        self._job = job
        self._small: dict[str, dict[str, torch.Tensor]] = {}
        self._codes: dict[str, str] = {}
        self._others: dict[str, tuple[str, str]] = {}
        for layer, name in job.plan.items():
            if not FORMATS.get(name).on_grid:
                continue
            codes, *others = (part.suffix for part in stored_parts(FORMATS.get(name), 1, 1))
            self._codes[layer + codes] = layer
            self._others |= {layer + suffix: (layer, suffix) for suffix in others}

    def pieces(self, tensor: StatedTensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes, a few rows at a time."""
        if tensor.name in self._codes:
            for codes in self._round(self._codes[tensor.name]):
                yield as_bytes(codes)
        elif tensor.name in self._others:
            layer, suffix = self._others[tensor.name]
            if suffix not in self._small.get(layer, {}):  # the codes lie in the shard before, which is done
                for _ in self._round(layer):
                    pass
            yield as_bytes(self._small[layer].pop(suffix))
        else:
            for rows in _rows(self._job.source, self._job.source.headers[tensor.name]):
                yield as_bytes(rows)

    def _round(self, layer: str) -> Iterator[torch.Tensor]:
        """Yield the layer's codes as stored, and keep its small parts."""
        header, weight_format = self._job.source.headers[f"{layer}.weight"], FORMATS.get(self._job.plan[layer])
        small = []
        for rows_RI in _rows(self._job.source, header):
            rounded = weight_format.quantize(rows_RI)
            small.append(QuantizedTensor(rounded.codes_OI[:0], rounded.scale_OG, rounded.zero_OG))
            yield codes_part(weight_format, rounded)[1]
        self._small[layer] = small_parts(weight_format, _joined(weight_format, small, header), (header.shape[0], header.shape[1]))


def _joined(weight_format: WeightFormat, pieces: list[QuantizedTensor], header: TensorHeader) -> QuantizedTensor:
    """Return the scales and zero points of all rows."""
    scale_OG = torch.cat([piece.scale_OG for piece in pieces])
    zeros = [piece.zero_OG for piece in pieces if piece.zero_OG is not None]
    assert scale_OG.shape == (header.shape[0], num_groups(weight_format, header.shape[1])), header.name
    return QuantizedTensor(pieces[0].codes_OI, scale_OG, torch.cat(zeros) if zeros else None)


def _rows(source: TensorSource, header: TensorHeader) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in pieces of about PIECE_ELEMENTS values."""
    if not header.shape:
        yield source.rows(header.name, 0, 1)
        return
    width = max(1, header.num_parameters // max(1, header.shape[0]))
    step = max(1, PIECE_ELEMENTS // width)
    for start in range(0, header.shape[0], step):
        yield source.rows(header.name, start, min(start + step, header.shape[0]))
