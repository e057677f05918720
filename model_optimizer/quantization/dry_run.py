"""Try a long quantization on two blocks first, so that a fault of format or loader shows in seconds and not after hours.

The model that is tried is the source's first and last block under its own configuration, with the leading rows of embedding
and head: it is quantized by the method that was asked for, written, reloaded and run. Only the calibration text is missing:
every input counts alike.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import IntegrityError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized, read_state
from model_optimizer.formats.model_config import CONFIG, read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.models.shards import Shard, StatedTensor, as_bytes, write_shard
from model_optimizer.models.sources import CheckpointSource
from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import find_stack
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.coverage import measure_coverage, require_coverage
from model_optimizer.quantization.layers import LinearLayer, read_layers, tie_groups, weight_reader
from model_optimizer.quantization.preflight import DRY_BLOCKS, LONG_S, forecast
from model_optimizer.quantization.registry import METHODS

ROWS = 64
"""Rows of embedding and head that the tried model has."""
TOKENS = 16
"""Tokens that it runs on."""


def try_if_long(
    model: Path, recipe: WeightRecipe, config: QuantizationConfig, workspace: Path, *, progress: Progress
) -> tuple[Decision, ...]:
    """Try two blocks where the whole is predicted to take longer than LONG_S; return what was decided, or nothing."""
    layers = read_layers(model).linears
    if find_stack(layers).num_blocks < DRY_BLOCKS:
        return ()
    predicted = forecast(layers, recipe, config)
    if predicted.total_s <= LONG_S:
        return ()
    progress.note(f"about {predicted.total_s:.0f} s by arithmetic; first and last block are tried first")
    return (try_two_blocks(model, recipe, workspace, progress=progress),)


def try_two_blocks(model: Path, recipe: WeightRecipe, workspace: Path, *, progress: Progress) -> Decision:
    """Quantize, write, reload and run the first and the last block; nothing stays in `workspace`.

    Raises:
        UnsupportedError: method or format cannot take a layer of these blocks.
        IntegrityError: what comes back is not what was planned, or computes no finite number.
    """
    start = time.monotonic()
    workspace.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=workspace, prefix=".dry-run-") as folder:
        source, checkpoint = Path(folder) / "source", Path(folder) / "checkpoint"
        write_two_blocks(model, source)
        layers = read_layers(source)
        plan = _spread(layers.linears, recipe.formats)
        tensors = _quantized(source, layers.linears, plan, recipe)
        write_checkpoint(source, checkpoint, plan | dict.fromkeys(layers.routers, FULL_PRECISION), tensors.__getitem__)
        tied = bool(read_config(source).tie_word_embeddings)
        require_coverage(measure_coverage(source, checkpoint, layers.linears, plan, tied), plan)
        _require_same(checkpoint, layers.linears, plan, tensors)
    seconds = time.monotonic() - start
    progress.note(f"dry run: first and last block quantized, written, reloaded and run in {seconds:.1f} s")
    return Decision(
        subject="dry run",
        choice="first and last block quantized, written, reloaded and run",
        because="the walk over all blocks is long, and a fault of format or loader should show before it",
        numbers={"num_layers": len(layers.linears), "num_formats": len(set(plan.values()))},
    )


def write_two_blocks(model: Path, target: Path) -> None:
    """Write the first and the last block of a plain checkpoint as a model of its own, with ROWS tokens."""
    source, config = CheckpointSource(model), read_config(model)
    stack = find_stack(read_layers(model).linears)
    kept = {0: 0, stack.num_blocks - 1: min(1, stack.num_blocks - 1)}
    names: dict[str, tuple[str, int]] = {}
    stated = []
    for name, header in source.headers.items():
        renamed = _renamed(name, stack.name, kept)
        if renamed is None:
            continue
        shape = header.shape
        if not name.startswith(f"{stack.name}.") and shape[:1] == (config.vocab_size,):
            shape = (min(ROWS, shape[0]), *shape[1:])
        names[renamed] = (name, shape[0] if shape else 1)
        stated.append(StatedTensor(renamed, header.dtype, shape))

    def pieces(tensor: StatedTensor) -> Iterator[memoryview]:
        name, height = names[tensor.name]
        yield as_bytes(source.rows(name, 0, height))

    if config.to_dict().get("layer_types"):
        config.layer_types = [config.layer_types[block] for block in kept]
    config.num_hidden_layers = len(kept)
    config.vocab_size = min(ROWS, config.vocab_size)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    target.mkdir(parents=True, exist_ok=True)
    config.to_json_file(target / CONFIG, use_diff=False)
    write_shard(target, Shard("model.safetensors", tuple(stated)), pieces)


def _renamed(tensor: str, stack: str, kept: dict[int, int]) -> str | None:
    """Return a tensor's name in the small model; None where its block is left out."""
    if not tensor.startswith(f"{stack}."):
        return tensor
    number, _, rest = tensor.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{kept[int(number)]}.{rest}" if int(number) in kept else None


def _spread(layers: tuple[LinearLayer, ...], formats: tuple[str, ...]) -> dict[str, str]:
    """Return a plan in which every format of the recipe occurs, as far as there are groups for them."""
    groups = tie_groups(layers)
    return {layer.name: formats[index % len(formats)] for index, group in enumerate(groups) for layer in group}


def _quantized(
    source: Path, layers: tuple[LinearLayer, ...], plan: dict[str, str], recipe: WeightRecipe
) -> dict[str, QuantizedTensor]:
    """Return every layer as the method rounds it when all inputs count alike."""
    method, read = METHODS.get(recipe.method), weight_reader(source, layers)
    found = {}
    for layer in layers:
        weight_format = FORMATS.get(plan[layer.name])
        moment_II = torch.eye(layer.in_features) if method.needs_moments else None
        tensor = method.quantize(read(layer.name), weight_format, moment_II)
        frozen = weight_format.activation == "static-tensor"
        found[layer.name] = replace(tensor, input_scale=torch.ones(1)) if frozen else tensor
    return found


def _require_same(
    checkpoint: Path, layers: tuple[LinearLayer, ...], plan: dict[str, str], tensors: dict[str, QuantizedTensor]
) -> None:
    """Refuse a checkpoint that gives other weights than were stored, or a model that computes no finite number."""
    state = read_state(checkpoint)
    for layer in layers:
        stored_OI = FORMATS.get(plan[layer.name]).dequantize(tensors[layer.name])
        if not torch.equal(state[f"{layer.name}.weight"], stored_OI.T if layer.transposed else stored_OI):
            raise IntegrityError(f"dry run: {layer.name} as {plan[layer.name]} comes back changed; this is a fault of the format")
    del state
    with torch.no_grad():
        logits = load_dequantized(checkpoint)(torch.arange(TOKENS)[None] % ROWS).logits
    if not torch.isfinite(logits).all():
        raise IntegrityError("dry run: the two blocks compute values that are not finite when they are reloaded")
