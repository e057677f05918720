"""Write a Hugging Face model as one GGUF file, tensor by tensor: whole or not at all, the same bytes every time.

The header is written by the `gguf` library; tensors follow at the places it states. A killed write goes on after the last
tensor that is recorded with its digest.
"""

import hashlib
import importlib.util
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from pydantic import BaseModel

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.disk import explained, require_writable
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.gguf import architecture, vocabulary
from model_optimizer.formats.gguf.architecture import (
    ROPE_FACTORS,
    Decoder,
    Place,
    paired_rows,
    places,
    read_decoder,
    rope_factors,
)
from model_optimizer.formats.gguf.base import Bytes, Floats
from model_optimizer.formats.gguf.recipes import Choice, Recipe, choose, recipe_named
from model_optimizer.formats.gguf.registry import BLOCKS
from model_optimizer.formats.gguf.vocabulary import read_vocabulary
from model_optimizer.formats.model_config import CONFIG
from model_optimizer.journal import Journal
from model_optimizer.models.headers import TensorHeader
from model_optimizer.models.sources import CheckpointSource, TensorSource
from model_optimizer.protocols import Progress

PIECE_WEIGHTS = 1 << 22
"""Weights that are read at once: 16 MiB as float32."""
ALIGNMENT = 32
"""Source: gguf.GGUF_DEFAULT_ALIGNMENT; where a tensor may begin."""
SERVED_BESIDE = (
    CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.*", "vocab.json", "merges.txt",
)  # fmt: skip
QUANTIZATION_VERSION = 2
"""Source: ggml.h, GGML_QNT_VERSION."""


@dataclass(frozen=True, slots=True)
class GgufJob:
    """What is to be written and how."""

    model: Path
    """Directory of config.json and tokenizer."""
    source: TensorSource
    source_digest: str
    """Names the source's content, so that a killed job continues only on the same weights."""
    recipe: str
    name: str
    """The model's name, as the file states it."""
    importance: Mapping[str, Floats] = field(default_factory=dict)
    """Layer -> weight of the squared error of each of its inputs; layers that are absent weigh all alike."""


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What was written."""

    num_bytes: int
    sha256: str
    bits_per_weight: float
    types: dict[str, int]
    """Number of tensors by block type."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    place: Place
    shape: tuple[int, ...]
    choice: Choice

    @property
    def num_bytes(self) -> int:
        *heights, width = self.shape
        return math.prod(heights) * BLOCKS.get(self.choice.type).row_bytes(width)


class _Done(BaseModel):
    """A finished tensor."""

    name: str
    sha256: str


def write_gguf(job: GgufJob, target: Path, *, progress: Progress) -> GgufSummary:
    """Write `target`; while that goes on, `<target>.part` and a journal lie beside it.

    Raises:
        ConfigError: an unknown recipe, or a configuration that lacks a field.
        UnsupportedError: the extra `gguf` is missing, or architecture, tokenizer or a tensor is not covered; nothing is written.
        StorageError: the disk is full; the call can be repeated.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(
            "writing GGUF needs the extra `gguf`; install it with `pip install 'model-optimizer-pipeline[gguf]'`"
        )
    recipe, decoder = recipe_named(job.recipe), read_decoder(job.model)
    tensors = _plan(job.source.headers, recipe, decoder)
    total = sum(tensor.num_bytes for tensor in tensors)
    part, journal_path = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.journal")
    require_writable(target.parent, total)
    with explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        head = _head(job, recipe, decoder, tensors, target.with_name(f"{target.name}.head"))
        identity = hashlib.sha256(head + job.source_digest.encode() + _importance_digest(job)).hexdigest()
        journal = Journal(journal_path, identity, _Done)
        with part.open("r+b" if part.exists() and journal.records else "w+b") as stream:
            _write_tensors(job, (stream, head), tensors, journal, progress)
        digest = file_sha256(part)
        part.replace(target)
        journal_path.unlink()
    return GgufSummary(
        num_bytes=target.stat().st_size,
        sha256=digest,
        bits_per_weight=8 * total / sum(math.prod(tensor.shape) for tensor in tensors),
        types=dict(sorted(Counter(tensor.choice.type for tensor in tensors).items())),
        warnings=_warnings(decoder, tensors),
    )


def served_beside(model: Path) -> dict[str, Path]:
    """Return by name the files of a model directory that a server in front of llama.cpp reads: configuration and tokenizer."""
    return {path.name: path for pattern in SERVED_BESIDE for path in sorted(model.glob(pattern)) if path.is_file()}


def planned_types(model: Path, recipe: str) -> tuple[dict[str, int], int]:
    """Return how many weights would get each block type, and the bytes of all tensors; no weight is read."""
    weights: Counter[str] = Counter()
    tensors = _plan(CheckpointSource(model).headers, recipe_named(recipe), read_decoder(model))
    for tensor in tensors:
        weights[tensor.choice.type] += math.prod(tensor.shape)
    return dict(weights), sum(tensor.num_bytes for tensor in tensors)


def _plan(headers: Mapping[str, TensorHeader], recipe: Recipe, decoder: Decoder) -> tuple[_Tensor, ...]:
    """Return every tensor in file order with its type."""
    planned = []
    for place in places(decoder, tuple(headers)):
        shape = headers[place.source].shape
        choice = choose(recipe, place.name, shape, decoder.num_hidden_layers, decoder.tie_word_embeddings)
        planned.append(_Tensor(place, shape, choice))
    if (factors := rope_factors(decoder)) is not None:
        planned.append(_Tensor(Place("", ROPE_FACTORS), factors.shape, Choice("F32", "F32")))
    return tuple(planned)


def _head(job: GgufJob, recipe: Recipe, decoder: Decoder, tensors: tuple[_Tensor, ...], scratch: Path) -> bytes:
    """Return everything before the first tensor, padded; the library writes it to a file only."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(scratch, decoder.architecture)
    writer.add_type("model")
    writer.add_name(job.name)
    writer.add_file_type(recipe.file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    architecture.state(decoder, writer)
    vocabulary.state(read_vocabulary(job.model, decoder.vocab_size), writer)
    for tensor in tensors:
        number = GGMLQuantizationType(BLOCKS.get(tensor.choice.type).number)
        writer.add_tensor_info(tensor.place.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    head = scratch.read_bytes()
    scratch.unlink()
    return head + bytes(-len(head) % ALIGNMENT)


def _write_tensors(
    job: GgufJob, to: tuple[IO[bytes], bytes], tensors: tuple[_Tensor, ...], journal: Journal[_Done], progress: Progress
) -> None:
    """Write head and tensors in order; those that the journal holds and that are intact stay."""
    stream, head = to
    stream.seek(0)
    stream.write(head)
    done = [(record.name, record.sha256) for record in journal.records]
    intact = True
    for index, tensor in enumerate(progress.track(tensors, f"gguf {job.recipe}", len(tensors))):
        padding = -tensor.num_bytes % ALIGNMENT
        if intact and index < len(done):
            found = hashlib.sha256(stream.read(tensor.num_bytes)).hexdigest()
            if done[index] == (tensor.place.name, found):
                stream.seek(padding, os.SEEK_CUR)
                continue
            stream.seek(-tensor.num_bytes, os.SEEK_CUR)
        intact = False
        digest = hashlib.sha256()
        for piece in _pieces(job, tensor):
            stream.write(piece.data)
            digest.update(piece.data)
        stream.write(bytes(padding))
        stream.flush()
        os.fsync(stream.fileno())
        journal.append(_Done(name=tensor.place.name, sha256=digest.hexdigest()))
    stream.truncate()


def _pieces(job: GgufJob, tensor: _Tensor) -> Iterator[Bytes]:
    """Yield a tensor's bytes, a few rows at a time."""
    block, place = BLOCKS.get(tensor.choice.type), tensor.place
    if place.name == ROPE_FACTORS:
        factors = rope_factors(read_decoder(job.model))
        assert factors is not None, "planned only where there are some"
        yield block.quantize(factors[None])
        return
    importance_I = job.importance.get(place.source.removesuffix(".weight")) if len(tensor.shape) > 1 else None
    for rows_RI in _rows(job.source, tensor):
        yield block.quantize(rows_RI, importance_I)


def _rows(source: TensorSource, tensor: _Tensor) -> Iterator[Floats]:
    """Yield rows as float32; a vector is one row, and what is reordered is read whole."""
    name, height = tensor.place.source, tensor.shape[0]
    if len(tensor.shape) == 1 or tensor.place.num_pairs_of is not None:
        whole = source.rows(name, 0, height)
        order = slice(None) if tensor.place.num_pairs_of is None else paired_rows(height, tensor.place.num_pairs_of)
        values: Floats = whole.float().numpy()[order]
        yield values.reshape(-1, tensor.shape[-1])
        return
    step = max(1, PIECE_WEIGHTS // tensor.shape[-1])
    for start in range(0, height, step):
        yield source.rows(name, start, min(start + step, height)).float().numpy()


def _importance_digest(job: GgufJob) -> bytes:
    digest = hashlib.sha256()
    for layer, importance_I in sorted(job.importance.items()):
        digest.update(layer.encode() + importance_I.astype("<f4").tobytes())
    return digest.digest()


def _warnings(decoder: Decoder, tensors: tuple[_Tensor, ...]) -> tuple[str, ...]:
    """Return what a reader should know: types that the row width did not allow, and a context that was cut."""
    replaced = Counter((it.choice.wanted, it.choice.type, it.shape[-1]) for it in tensors if it.choice.wanted != it.choice.type)
    found = [
        f"{count} tensors are {type_} instead of {wanted}: rows of {width} are not divisible by {BLOCKS.get(wanted).block_size}"
        for (wanted, type_, width), count in sorted(replaced.items())
    ]
    if decoder.context_length < decoder.max_position_embeddings:
        found.append(
            f"the context is stated as {decoder.context_length}, the sliding window: "
            "beyond it llama.cpp would attend to all tokens"
        )
    return tuple(found)
