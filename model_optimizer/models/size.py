"""How large a model is before anything is imported, from headers alone."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from model_optimizer.errors import UnsupportedError
from model_optimizer.models.headers import read_headers
from model_optimizer.models.resolve import _locate, find_resolved
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store

_GGUF_LINEAR = (".attn_q.", ".attn_k.", ".attn_v.", ".attn_output.", ".ffn_gate.", ".ffn_up.", ".ffn_down.")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the headers say."""

    num_parameters: int
    directory: Path | None
    """Where the safetensors lie; None where a run writes them first."""
    linear_OI: tuple[tuple[str, int, int], ...] = ()
    """(name, output width, input width) of every decoder matrix, where there is no directory to read them from."""


def find_size(ref: ModelRef, base: Path, store: Store) -> ModelSize | None:
    """Return the size of a referenced model; None for a hub id that was not fetched yet, or without the extra `gguf`.

    Raises:
        ConfigError: the reference leads nowhere, or a header is wrong.
    """
    if resolved := find_resolved(ref, base, store):
        tensors = read_headers(resolved.tree.path).values()
        return ModelSize(sum(it.num_parameters for it in tensors), resolved.tree.path)
    place = _locate(ref, base)
    return None if place is None or place.is_dir() else _gguf_size(place)


def _gguf_size(file: Path) -> ModelSize | None:
    try:
        from gguf import GGUFReader
    except ImportError:
        return None
    try:
        tensors = GGUFReader(file).tensors
    except (ValueError, IndexError) as error:
        raise UnsupportedError(f"{file} cannot be read as GGUF ({error}); export it again") from error
    shapes = {tensor.name: tuple(int(size) for size in tensor.shape) for tensor in tensors}  # innermost dimension first
    linear = tuple(
        (name.removesuffix(".weight"), shape[1], shape[0])
        for name, shape in shapes.items()
        if len(shape) == 2 and any(part in name for part in _GGUF_LINEAR)
    )
    return ModelSize(sum(prod(shape) for shape in shapes.values()), None, linear)
