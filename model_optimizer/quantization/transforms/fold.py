"""From a checkpoint to an equivalent one that rounds better: transforms in turn, each a store entry of its own."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.moments import Moments
from model_optimizer.artifacts.transformed import Transformed
from model_optimizer.decisions import Decision
from model_optimizer.formats.model_config import CONFIG
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import INDEX, TensorHeader, read_headers
from model_optimizer.models.shards import StatedTensor, as_bytes, plan_shards, write_index, write_shard
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Progress
from model_optimizer.quantization.moments import read_moment
from model_optimizer.quantization.transforms.anatomy import Anatomy, read_anatomy
from model_optimizer.quantization.transforms.base import Folding, Job, TransformInputs
from model_optimizer.quantization.transforms.equivalence import logits_error_ratio, require_equivalent
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.store import Store, file_refs, stage_key, write_atomically

KIND = "transformed"
CHECKPOINT = "model"
MAX_SHARD_BYTES = 4 * 2**30
_LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py", ".lock", ".part")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

MomentsOf = Callable[[Tree], Stored[Moments]]
"""The moments of a model's layer inputs from the store."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What is quantized in place of the source, and how it came to be."""

    model: Tree
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()


def transforms_of(method: str, rotation: str) -> tuple[str, ...]:
    """Return the transforms that a quantization method and a rotation ask for, in the order in which they apply."""
    rotations = {"none": (), "heads": ("rotate-heads",), "residual": ("rotate-residual", "rotate-heads")}[rotation]
    return (*rotations, *((method,) if method in TRANSFORMS.names() else ()))


def fold_all(inputs: TransformInputs, names: tuple[str, ...], store: Store, moments: MomentsOf, progress: Progress) -> Folded:
    """Apply transforms in turn, each on what the one before gave; without any the model itself is meant.

    Raises:
        UnsupportedError: the architecture has no place for a fold, or a fold changed the function.
    """
    folded = Folded(inputs.model)
    for name in names:
        here = inputs.model_copy(update={"model": folded.model, "transform": name})
        stored = store.produce(
            KIND,
            stage_key(here),
            Transformed,
            lambda workspace, here=here: transform(here, workspace, moments=moments, progress=progress),  # type: ignore[misc]
        )
        made = stored.artifact
        folded = Folded(
            Tree.of(stored.directory / made.checkpoint),
            (*folded.decisions, *made.decisions),
            (*folded.warnings, *made.warnings),
        )
    return folded


def transform(inputs: TransformInputs, workspace: Path, *, moments: MomentsOf, progress: Progress) -> Transformed:
    """Write the transformed checkpoint, and prove on a few tokens that it computes the same.

    Raises:
        UnsupportedError: the architecture has no place for the fold, or its logits are not those of the source.
    """
    anatomy = read_anatomy(inputs.model.path)
    workspace.mkdir(parents=True, exist_ok=True)
    folding = TRANSFORMS.get(inputs.transform).fold(_job(inputs, anatomy, workspace, moments, progress))
    target = workspace / CHECKPOINT
    write_folded(inputs.model.path, target, folding, anatomy, _rounded(inputs))
    error_ratio = logits_error_ratio(inputs.model.path, target, anatomy)
    require_equivalent(error_ratio, inputs.transform, inputs.model.path)
    added_bytes = sum(header.num_bytes for name, header in read_headers(target).items() if name in folding.added)
    return Transformed(
        transform=inputs.transform,
        checkpoint=CHECKPOINT,
        num_edited_tensors=len(folding.edits),
        added_bytes=added_bytes,
        logits_error_ratio=error_ratio,
        files=file_refs(workspace, target),
        decisions=tuple(folding.decisions),
        warnings=tuple(warning.format(added_mb=added_bytes / 1e6) for warning in folding.warnings),
    )


def _job(inputs: TransformInputs, anatomy: Anatomy, workspace: Path, moments: MomentsOf, progress: Progress) -> Job:
    headers = read_headers(inputs.model.path)
    found: list[Stored[Moments]] = []

    def moment(layer: str) -> torch.Tensor:
        if not found:
            found.append(moments(inputs.model))
        return read_moment(found[0].directory, found[0].artifact, layer)

    def weight(name: str) -> torch.Tensor:
        return read_tensor(headers[name]).float()

    return Job(inputs, anatomy, workspace, moment, weight, progress)


def _rounded(inputs: TransformInputs) -> frozenset[str]:
    """Return the weights that will be rounded: those must be exact, whatever type the source has."""
    return frozenset(f"{layer}.weight" for layer, name in inputs.plan.items() if FORMATS.get(name).on_grid)


def write_folded(source: Path, target: Path, folding: Folding, anatomy: Anatomy, exact: frozenset[str]) -> None:
    """Write a checkpoint with all edits applied, one tensor in memory at a time; the config comes last.

    Edited weights in `exact` are stored as float32, all else in the source's type: what is rounded next must not be rounded
    twice, and what is stored as it is must not grow.
    """
    target.mkdir(parents=True, exist_ok=True)
    headers = read_headers(source)
    origins = {name: header for name, header in headers.items() if not (anatomy.tied and name == f"{anatomy.head}.weight")}
    origins |= {name: headers[original] for name, original in folding.added.items()}
    stated = [StatedTensor(name, _dtype(name, header, folding, exact), header.shape) for name, header in origins.items()]

    def pieces(tensor: StatedTensor) -> Iterator[memoryview]:
        stored = read_tensor(origins[tensor.name])
        if tensor.name in folding.edits:
            stored = folding.apply(tensor.name, stored).to(_DTYPES[tensor.dtype])
        yield as_bytes(stored)

    shards = plan_shards(stated, MAX_SHARD_BYTES)
    for shard in shards:
        write_shard(target, shard, pieces)
    write_index(target, shards)
    _copy_companions(source, target)
    config: Mapping[str, object] = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if folding.untied:
        config = {**config, "tie_word_embeddings": False}
    write_atomically(target / CONFIG, json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode())


def _dtype(name: str, header: TensorHeader, folding: Folding, exact: frozenset[str]) -> str:
    return "F32" if name in folding.edits and name in exact else header.dtype


def _copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation settings and other small files."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _LEFT_OUT and path.name not in (CONFIG, INDEX, "artifact.json"):
            shutil.copyfile(path, target / path.name)
