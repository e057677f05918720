"""PyTorch: runs a Hugging Face directory, plain or compressed-tensors, in float32.

Covered architectures run in the native paged runtime (`runtimes/torch/`), all others through transformers with a padded
cache. Quantized weights are unpacked at load: right in value, not smaller in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import UnsupportedError
from model_optimizer.protocols import LogitsRuntime, RuntimeFacts, Support
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.native_options import COMPILED_REGIONS, NativeOptions
from model_optimizer.runtimes.options import TUNABLES, RuntimeOptions
from model_optimizer.runtimes.registry import RUNTIMES, installed, require_version

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

_log = logging.getLogger(__name__)
LAYOUT = "layout.json"
"""Lies in the engine's directory where the level matters when it is opened."""
_INITIAL_PAGES = 64
"""Pages at the start; more come as requests need them, up to the plan's."""


class TorchModel:
    """A causal language model and its `DynamicCache`, [B, KV heads, columns, head dimension] per layer."""

    def __init__(self, model: PreTrainedModel):
        self._model = model

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def weight_bytes(self) -> int:
        tensors = (*self._model.parameters(), *self._model.buffers())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def forward(self, batch: ModelInput, cache: DynamicCache | None) -> tuple[NDArray[np.float32], DynamicCache]:
        """Return logits from `logits_from` on and the grown cache."""
        import torch
        from transformers import DynamicCache

        device = self._model.device
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(batch.input_ids_BS).to(device),
                attention_mask=torch.from_numpy(batch.attention_mask_BP).to(device),
                position_ids=torch.from_numpy(batch.position_ids_BS).to(device),
                past_key_values=DynamicCache() if cache is None else cache,
                use_cache=True,
                logits_to_keep=batch.input_ids_BS.shape[1] - batch.logits_from,
            )
        return cast("NDArray[np.float32]", output.logits.float().cpu().numpy()), output.past_key_values

    def select(self, cache: DynamicCache, rows: Sequence[int], first_column: int) -> DynamicCache:
        """Keep rows and the columns from `first_column` on."""
        return _cache_of([(keys[rows, :, first_column:], values[rows, :, first_column:]) for keys, values in _layers(cache)])

    def join(self, caches: Sequence[DynamicCache]) -> DynamicCache:
        """Stack rows, padding shorter caches on the left with zeros."""
        per_layer = zip(*[_layers(cache) for cache in caches], strict=True)
        return _cache_of([(_stack([keys for keys, _ in layer]), _stack([values for _, values in layer])) for layer in per_layer])

    def cache_bytes(self, cache: DynamicCache) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in _layers(cache))

    def close(self) -> None:
        """Drop the weights."""
        self._model = cast("PreTrainedModel", None)


def _layers(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from transformers.cache_utils import DynamicLayer

    layers = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise UnsupportedError(
                f"the model keeps a {type(layer).__name__} cache; the torch runtime batches attention caches only"
            )
        layers.append((layer.keys, layer.values))
    return layers


def _cache_of(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    width = max(part.shape[2] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in parts])


def open_padded(directory: Path, memory: KvPlan, version: str, reason: str) -> LogitsRuntime:
    """Open any causal model that transformers knows, in float32, its cache padded to the longest row.

    `reason` says why it is not run natively.
    """
    import torch

    from model_optimizer.formats.compressed_tensors import read_plan
    from model_optimizer.formats.loading import load_dequantized
    from model_optimizer.formats.registry import FORMATS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = read_plan(directory)
    notes: tuple[str, ...] = (f"run by transformers with a padded cache: {reason}",)
    if plan:
        notes += ("quantized weights were unpacked to float32 at load",)
    if any(FORMATS.get(name).activation for name in plan.values()):
        notes += ("inputs are rounded to 8 bits as the checkpoint says; products stay float32",)
    model = load_dequantized(directory)
    torch.nn.Module.to(model, device)
    facts = RuntimeFacts("torch", version, device, "float32", memory.max_batch, memory.max_model_len, notes)
    return DecodingRuntime(TorchModel(model), facts, memory)


def _level(directory: Path) -> int:
    """Return the level at which an engine is opened; 0 where its layout.json is absent, or another program's or engine's."""
    if not (directory / LAYOUT).is_file():
        return 0
    try:
        layout = Layout.model_validate_json((directory / LAYOUT).read_bytes())
    except ValidationError:
        return 0
    return layout.level if COMPILED_REGIONS in layout.fusions else 0


class TorchFactory:
    """Open Hugging Face directories with torch: natively where the architecture is covered, else through transformers."""

    section = "native"

    def __init__(self, options: NativeOptions | None = None):
        """Take what was stated for the native runtime; None: nothing was."""
        self._options = options

    def tuned(self, options: RuntimeOptions) -> TorchFactory:
        return TorchFactory(options.native)

    def supports(self, strategy: Strategy) -> Support:
        return installed("torch", "transformers", install="torch transformers")

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Load the model on the GPU where there is one, else on the CPU.

        On the CPU, whose memory others need too, pages grow up to the plan as requests need them; on the GPU they are set
        aside at once.

        Raises:
            UnsupportedError: torch is missing or has another version than the engine's; or options or the plan's KV precision
                need the native runtime, which does not cover the model.
        """
        version = require_version(engine, "torch")
        import torch

        from model_optimizer.runtimes.torch.config import read_model_config
        from model_optimizer.runtimes.torch.engine import open_native

        try:
            read_model_config(directory)
        except UnsupportedError as error:
            if memory.precision != "float32":
                raise UnsupportedError(
                    f"the plan keeps keys and values in {memory.precision}, and {error}; set memory.kv_precision: auto"
                ) from error
            if _level(directory):
                raise UnsupportedError(f"only the native runtime is compiled, and {error}; set compile.level: 1") from error
            if self._options is not None:
                raise UnsupportedError(f"options were stated for the native runtime, and {error}; leave `native` out") from error
            _log.warning("%s; transformers runs it, slower and with more memory", error)
            return open_padded(directory, memory, version, str(error))
        options = self._options or NativeOptions()
        if "initial_pages" not in options.model_fields_set:
            on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
            options = options.model_copy(update={"initial_pages": _INITIAL_PAGES if on_cpu else None})
        return open_native(directory, memory, options, level=_level(directory))


FACTORY = TorchFactory()
RUNTIMES.register("torch")(FACTORY)
TUNABLES.register("torch")(FACTORY)
