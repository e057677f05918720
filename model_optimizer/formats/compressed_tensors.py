"""Write and read checkpoints in the compressed-tensors layout that transformers and vLLM load as they are.

Layers on a grid are stored as `formats/storage.py` says. Every other tensor is copied in its source dtype; a tied head stays
tied, without a key.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.formats.base import Activation, QuantizedTensor, WeightFormat
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.formats.storage import CODE_TYPES, PACKED, STORAGES, WEIGHT, from_parts, stored_parts, to_parts
from model_optimizer.models.headers import INDEX, TensorHeader, read_headers
from model_optimizer.models.weights import iterate_tensors, read_tensor
from model_optimizer.store import write_atomically

MIXED = "mixed-precision"
"""What compressed-tensors calls a checkpoint whose groups differ in layout."""
HEAD = "lm_head"
EXPERTS = r"re:.*\.experts\.\d+\..*"
"""Every layer of every expert; they share a format."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


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
    copy_companions(source, target)
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
        for suffix, part in to_parts(weight_format, quantized(layer)).items():
            yield layer + suffix, part


def copy_companions(source: Path, target: Path) -> None:
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
            "format": FORMATS.get(name).storage,
            "input_activations": _activation_arguments(FORMATS.get(name)),
            "output_activations": None,
            "targets": ["Linear"] if len(names) == 1 else _targets(layers),
            "weights": _weight_arguments(FORMATS.get(name)),
        }
    storages = {FORMATS.get(name).storage for name in names}
    kept = sorted(layer for layer, name in plan.items() if not FORMATS.get(name).on_grid)
    return {
        "quant_method": "compressed-tensors",
        "format": storages.pop() if len(storages) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [HEAD, *(layer for layer in kept if layer != HEAD)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(layers: Collection[str]) -> list[str]:
    """Return exact names, and one expression for all experts, by which transformers tells the group that is theirs."""
    named = [layer for layer in layers if not _EXPERT.search(layer)]
    return [*named, EXPERTS] if len(named) < len(layers) else named


def _weight_arguments(weight_format: WeightFormat) -> dict[str, object]:
    return {
        "num_bits": weight_format.bits,
        "type": _number(weight_format),
        "symmetric": weight_format.symmetric,
        "dynamic": False,
        "strategy": "channel" if weight_format.group_size is None else "group",
        "group_size": weight_format.group_size,
        "observer": "minmax",
    }


def _activation_arguments(weight_format: WeightFormat) -> dict[str, object] | None:
    """Return how inputs are rounded, in the words of compressed-tensors."""
    if weight_format.activation is None:
        return None
    dynamic = weight_format.activation == "dynamic-token"
    return {
        "num_bits": 8,
        "type": _number(weight_format),
        "symmetric": True,
        "dynamic": dynamic,
        "strategy": "token" if dynamic else "tensor",
        "group_size": None,
        "observer": None if dynamic else "minmax",
    }


def _number(weight_format: WeightFormat) -> str:
    return "float" if weight_format.code_dtype.is_floating_point else "int"


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
    """Return layer -> format name for every layer of a checkpoint that is stored as codes; {} for a plain one.

    Raises:
        IntegrityError: codes that config.json does not describe, or describes as another format than stored.
    """
    headers = read_checkpoint_headers(directory)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    groups = config.get(SECTION, {}).get("config_groups", {}).values()
    rules = [(target, group) for group in groups for target in group["targets"]]
    plan = {}
    for tensor in _code_tensors(headers):
        layer = tensor.name.removesuffix(PACKED).removesuffix(WEIGHT)
        matching = [group for target, group in rules if _matches(target, layer)]
        if not matching:
            raise IntegrityError(
                f"{directory / CONFIG} does not say how {layer} is quantized (its {SECTION} was lost or edited), "
                f"yet the weights hold {tensor.name} of type {tensor.dtype}; restore config.json or quantize again"
            )
        plan[layer] = _format_name(matching[0])
        _require_described(directory, tensor, plan[layer])
    return plan


def _code_tensors(headers: Mapping[str, TensorHeader]) -> Iterator[TensorHeader]:
    """Yield what holds the codes of each layer: packed words, or a matrix whose type no plain weight has."""
    for name, header in headers.items():
        if name.endswith(PACKED) or (name.endswith(WEIGHT) and header.dtype in CODE_TYPES):
            yield header


def _require_described(directory: Path, tensor: TensorHeader, format_name: str) -> None:
    codes = stored_parts(FORMATS.get(format_name), 1, 1)[0]
    if not tensor.name.endswith(codes.suffix) or tensor.dtype != codes.dtype:
        raise IntegrityError(
            f"{directory / CONFIG} describes {tensor.name} as {format_name}, which is stored as {codes.suffix} of type "
            f"{codes.dtype}, yet the weights hold {tensor.dtype}; restore config.json or quantize again"
        )


def _matches(target: str, layer: str) -> bool:
    return target in ("Linear", layer) or (target.startswith("re:") and re.match(target[3:], layer) is not None)


def _format_name(group: Mapping[str, Mapping[str, object] | None]) -> str:
    """Return our name of a group's scheme."""
    weights, inputs = group["weights"] or {}, group.get("input_activations")
    wanted = (weights["num_bits"], weights.get("group_size"), weights["symmetric"], weights["type"], _activation(inputs))
    for name in FORMATS.names():
        known = FORMATS.get(name)
        scheme = (known.bits, known.group_size, known.symmetric, _number(known), known.activation)
        if known.on_grid and known.storage in STORAGES and scheme == wanted:
            return name
    bits, size, symmetric, number, activation = wanted
    raise IntegrityError(
        f"no known weight format has {bits} bits of type {number} and group {size}, "
        f"{'symmetric' if symmetric else 'asymmetric'}, with inputs rounded: {activation or 'no'}"
    )


def _activation(inputs: Mapping[str, object] | None) -> Activation | str | None:
    if inputs is None:
        return None
    known = {(True, "token"): "dynamic-token", (False, "tensor"): "static-tensor"}
    return known.get((inputs["dynamic"] is True, str(inputs["strategy"])), f"{inputs['strategy']}, dynamic {inputs['dynamic']}")


def read_quantized_layer(directory: Path, headers: Mapping[str, TensorHeader], layer: str, format_name: str) -> QuantizedTensor:
    """Return the exact codes, scales and zero points of one layer that is stored as codes."""
    weight_format = FORMATS.get(format_name)
    suffixes = [part.suffix for part in stored_parts(weight_format, 1, 1)]
    if absent := [layer + suffix for suffix in suffixes if layer + suffix not in headers]:
        raise IntegrityError(f"{directory}: the packed layer {layer} lacks the tensor {absent[0]!r}; quantize again")
    try:
        return from_parts(weight_format, {suffix: read_tensor(headers[layer + suffix]) for suffix in suffixes})
    except IntegrityError as error:
        raise IntegrityError(f"{directory}: {layer}: {error}") from error


def read_quantized_layers(directory: Path) -> Iterator[tuple[str, QuantizedTensor, str]]:
    """Yield (layer, codes and scales, format name) of every layer that is stored as codes, one at a time."""
    headers = read_checkpoint_headers(directory)
    for layer, name in read_plan(directory).items():
        yield layer, read_quantized_layer(directory, headers, layer, name), name
