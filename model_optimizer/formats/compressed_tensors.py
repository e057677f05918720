"""Write and read checkpoints in the compressed-tensors layout that transformers and vLLM load as they are.

Integer layers are `pack-quantized`: `weight_packed` (int32 words), `weight_scale` (float16 [O, G]) and
`weight_shape`. Every other tensor is copied in its source dtype; a tied head stays tied, without a key.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import save

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.models.headers import INDEX, TensorHeader, read_headers
from model_optimizer.models.weights import iterate_tensors, read_tensor
from model_optimizer.store import write_atomically

PACKED = ".weight_packed"
HEAD = "lm_head"


def write_checkpoint(source: Path, target: Path, plan: Mapping[str, str], quantized: Callable[[str], QuantizedTensor]) -> None:
    """Write `source` to `target` with every linear layer of `plan` (layer -> format name) stored so.

    `quantized(layer)` gives codes and scales of a layer whose format has a grid; it is called once per
    such layer, shard by shard, so that one shard is in memory at a time.
    """
    target.mkdir(parents=True, exist_ok=True)
    headers = read_headers(source)
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if read_config(source).tie_word_embeddings:
        headers.pop(f"{HEAD}.weight", None)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in sorted({header.file.name for header in headers.values()}):
        tensors = dict(_stored_tensors([header for header in headers.values() if header.file.name == shard], plan, quantized))
        write_atomically(target / shard, save(tensors, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(target / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
    _copy_companions(source, target)
    if any(FORMATS.get(name).on_grid for name in plan.values()):
        config[SECTION] = quantization_section(plan)
    write_atomically(target / CONFIG, json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode())


def _stored_tensors(
    headers: Collection[TensorHeader], plan: Mapping[str, str], quantized: Callable[[str], QuantizedTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iterate_tensors(headers):
        layer = name.removesuffix(".weight")
        weight_format = FORMATS.get(plan.get(layer, FULL_PRECISION))
        if name == layer or not weight_format.on_grid:
            yield name, tensor
            continue
        packed = quantized(layer)
        yield layer + PACKED, pack_to_int32(packed.codes_OI, weight_format.bits).contiguous()
        yield layer + ".weight_scale", packed.scale_OG.contiguous()
        yield layer + ".weight_shape", torch.tensor(packed.codes_OI.shape, dtype=torch.int64)


def _copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation and other small files: all but weights, the config and code."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py", ".lock")
        if path.is_file() and not weights and path.name not in (CONFIG, INDEX, "artifact.json"):
            shutil.copyfile(path, target / path.name)


def quantization_section(plan: Mapping[str, str]) -> dict[str, object]:
    """Return the `quantization_config` of a plan: one group per format.

    One format targets the class `Linear` minus `ignore`; several formats name their layers exactly.
    """
    names = sorted({name for name in plan.values() if FORMATS.get(name).on_grid})
    groups = {}
    for number, name in enumerate(names):
        layers = sorted(layer for layer, chosen in plan.items() if chosen == name)
        groups[f"group_{number}"] = {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"] if len(names) == 1 else layers,
            "weights": _weight_arguments(name),
        }
    kept = sorted(layer for layer, name in plan.items() if not FORMATS.get(name).on_grid)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [HEAD, *(layer for layer in kept if layer != HEAD)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weight_arguments(name: str) -> dict[str, object]:
    weight_format = FORMATS.get(name)
    return {
        "num_bits": weight_format.bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if weight_format.group_size is None else "group",
        "group_size": weight_format.group_size,
        "observer": "minmax",
    }


def read_checkpoint_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return every tensor by name of a checkpoint in the store; damage there is no fault of the user's input.

    Raises:
        IntegrityError: no weights, a damaged shard, or an index that does not match.
    """
    try:
        headers = read_headers(directory)
    except ConfigError as error:
        raise IntegrityError(f"damaged checkpoint: {error}") from error
    if not headers:
        raise IntegrityError(f"{directory} holds no safetensors weights; delete the store entry and run again")
    return headers


def read_plan(directory: Path) -> dict[str, str]:
    """Return layer -> format name for every packed layer of a checkpoint; {} for a plain one.

    Raises:
        IntegrityError: packed tensors without a description in config.json, or the reverse.
    """
    packed = [name.removesuffix(PACKED) for name in read_checkpoint_headers(directory) if name.endswith(PACKED)]
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    groups = config.get(SECTION, {}).get("config_groups", {}).values()
    rules = [(target, _format_name(group["weights"])) for group in groups for target in group["targets"]]
    plan = {}
    for layer in packed:
        names = [name for target, name in rules if _matches(target, layer)]
        if not names:
            raise IntegrityError(
                f"{directory / CONFIG} does not say how {layer} is quantized (its {SECTION} was lost or edited), "
                f"yet the weights hold {layer}{PACKED}; restore config.json or quantize again"
            )
        plan[layer] = names[0]
    return plan


def _matches(target: str, layer: str) -> bool:
    return target in ("Linear", layer) or (target.startswith("re:") and re.match(target[3:], layer) is not None)


def _format_name(weights: Mapping[str, object]) -> str:
    """Return our name of a scheme's weight arguments."""
    for name in FORMATS.names():
        known = FORMATS.get(name)
        if (
            known.on_grid
            and (known.bits, known.group_size) == (weights["num_bits"], weights["group_size"])
            and weights["symmetric"]
        ):
            return name
    raise IntegrityError(f"no known weight format has {weights['num_bits']} bits and group {weights['group_size']}")


def read_quantized_layer(directory: Path, headers: Mapping[str, TensorHeader], layer: str, format_name: str) -> QuantizedTensor:
    """Return the exact codes and scales of one packed layer."""
    try:
        packed, scale_OG, shape = (read_tensor(headers[layer + suffix]) for suffix in (PACKED, ".weight_scale", ".weight_shape"))
    except KeyError as error:
        raise IntegrityError(f"{directory}: the packed layer {layer} lacks the tensor {error}; quantize again") from error
    codes_OI = unpack_from_int32(packed, FORMATS.get(format_name).bits, torch.Size(shape.tolist()))
    return QuantizedTensor(codes_OI, scale_OG)


def read_quantized_layers(directory: Path) -> Iterator[tuple[str, QuantizedTensor, str]]:
    """Yield (layer, codes and scales, format name) of every packed layer, one at a time."""
    headers = read_checkpoint_headers(directory)
    for layer, name in read_plan(directory).items():
        yield layer, read_quantized_layer(directory, headers, layer, name), name
