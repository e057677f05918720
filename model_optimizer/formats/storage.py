"""Which tensors a layer on a grid is stored as, in the layouts of compressed-tensors.

    pack-quantized    weight_packed (int32 words along the input), weight_scale, weight_zero_point (int32 words along the
                      output, where the grid is not symmetric), weight_shape
    int-quantized     weight (int8), weight_scale, input_scale (where the input's step is frozen)
    float-quantized   weight (float8_e4m3fn), weight_scale, input_scale

Law: `from_parts(f, to_parts(f, t)) == t`, and what `stored_parts` states is what `to_parts` gives.

Shape letters: O output features, I input features, G groups along I.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor, WeightFormat

WEIGHT, PACKED, SHAPE = ".weight", ".weight_packed", ".weight_shape"
SCALE, ZERO, INPUT_SCALE = ".weight_scale", ".weight_zero_point", ".input_scale"
SUFFIXES = (PACKED, SCALE, ZERO, SHAPE, INPUT_SCALE)
"""Ends of names that only stored layers have; `.weight` is a plain one's too, and there the type tells."""
CODE_TYPES = ("I8", "F8_E4M3")
"""Types of a `.weight` that only codes have."""
STORAGES = ("pack-quantized", "int-quantized", "float-quantized")
_NAMES = {torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16", torch.float32: "F32"}
_ITEM_BYTES = {"I8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a stored layer, as its header will show it."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _ITEM_BYTES[self.dtype]


def stored_parts(weight_format: WeightFormat, out_features: int, in_features: int) -> tuple[StoredPart, ...]:
    """Return the tensors of a layer in the order in which they can be made: codes first.

    Raises:
        UnsupportedError: the format has another layout.
    """
    _require_known(weight_format)
    groups = num_groups(weight_format, in_features)
    scale = StoredPart(SCALE, _NAMES[weight_format.scale_dtype], (out_features, groups))
    if weight_format.storage == "pack-quantized":
        words = _num_words(in_features, weight_format.bits)
        zeros = () if weight_format.symmetric else (_zero_part(weight_format, out_features, groups),)
        return StoredPart(PACKED, "I32", (out_features, words)), scale, *zeros, StoredPart(SHAPE, "I64", (2,))
    codes = StoredPart(WEIGHT, _NAMES[weight_format.code_dtype], (out_features, in_features))
    frozen = (StoredPart(INPUT_SCALE, "F32", (1,)),) if weight_format.activation == "static-tensor" else ()
    return codes, scale, *frozen


def stored_bytes(weight_format: WeightFormat, out_features: int, in_features: int) -> int:
    """Return codes, scales and zero points as stored; shape records are not counted."""
    parts = stored_parts(weight_format, out_features, in_features)
    return sum(part.num_bytes for part in parts if part.suffix != SHAPE)


def num_groups(weight_format: WeightFormat, in_features: int) -> int:
    """Return how many scales a row has."""
    return in_features // weight_format.group_size if weight_format.group_size else 1


def to_parts(weight_format: WeightFormat, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a layer is stored as, by suffix.

    Raises:
        UnsupportedError: the format has another layout, or wants a frozen input step that is absent.
    """
    _require_known(weight_format)
    small = small_parts(weight_format, tensor, (tensor.codes_OI.shape[0], tensor.codes_OI.shape[1]))
    return {**dict([codes_part(weight_format, tensor)]), **small}


def codes_part(weight_format: WeightFormat, tensor: QuantizedTensor) -> tuple[str, torch.Tensor]:
    """Return suffix and content of what holds the codes; rows do not depend on each other."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    if weight_format.storage == "pack-quantized":
        return PACKED, pack_to_int32(tensor.codes_OI, weight_format.bits).contiguous()
    return WEIGHT, tensor.codes_OI.contiguous()


def small_parts(weight_format: WeightFormat, tensor: QuantizedTensor, shape_OI: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return every part but the codes, which are not read, of a matrix of `shape_OI`."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    parts = {SCALE: tensor.scale_OG.contiguous()}
    if tensor.zero_OG is not None:
        parts[ZERO] = pack_to_int32(tensor.zero_OG, weight_format.bits, packed_dim=0).contiguous()
    if weight_format.storage == "pack-quantized":
        parts[SHAPE] = torch.tensor(shape_OI, dtype=torch.int64)
    if weight_format.activation == "static-tensor":
        if tensor.input_scale is None:
            raise UnsupportedError(f"{weight_format.name} stores a frozen step of the layer's input, and none was measured")
        parts[INPUT_SCALE] = tensor.input_scale.float().reshape(1).clone()  # one step may serve several layers
    return parts


def from_parts(weight_format: WeightFormat, parts: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """Return the exact codes, scales and zero points.

    Raises:
        KeyError: the suffix of a part that is absent.
        IntegrityError: a part has another shape than the format gives it.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    scale_OG = parts[SCALE]
    _require_fit(weight_format, parts)
    if weight_format.storage != "pack-quantized":
        frozen = parts[INPUT_SCALE] if weight_format.activation == "static-tensor" else None
        return QuantizedTensor(parts[WEIGHT], scale_OG, input_scale=frozen)
    shape = torch.Size(parts[SHAPE].tolist())
    codes_OI = unpack_from_int32(parts[PACKED], weight_format.bits, shape)
    if weight_format.symmetric:
        return QuantizedTensor(codes_OI, scale_OG)
    zero_OG = unpack_from_int32(parts[ZERO], weight_format.bits, torch.Size((shape[0], scale_OG.shape[1])), packed_dim=0)
    return QuantizedTensor(codes_OI, scale_OG, zero_OG.contiguous())


def _require_fit(weight_format: WeightFormat, parts: Mapping[str, torch.Tensor]) -> None:
    packed = weight_format.storage == "pack-quantized"
    out_features, in_features = parts[SHAPE].tolist() if packed else parts[WEIGHT].shape
    for part in stored_parts(weight_format, int(out_features), int(in_features)):
        seen = tuple(parts[part.suffix].shape)
        if part.suffix != INPUT_SCALE and seen != part.shape:
            raise IntegrityError(
                f"{part.suffix.lstrip('.')} has shape {seen}; {out_features} x {in_features} weights in {weight_format.name} "
                f"have {part.shape}; quantize again"
            )


def _zero_part(weight_format: WeightFormat, out_features: int, groups: int) -> StoredPart:
    return StoredPart(ZERO, "I32", (_num_words(out_features, weight_format.bits), groups))


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _require_known(weight_format: WeightFormat) -> None:
    if weight_format.storage not in STORAGES:
        raise UnsupportedError(
            f"{weight_format.name} is stored as {weight_format.storage}; compressed-tensors has {', '.join(STORAGES)}"
        )
