"""OpenVINO on the CPU: runs `openvino_model.xml` of an engine directory, float32 or with integer weights.

The cache of a step is what its inference request put out; that request is not used again before the cache is spent, so that
nothing is copied between steps.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import LogitsRuntime, RuntimeFacts, Support
from model_optimizer.runtimes.decoder_model import ModelInput, stack_columns
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.registry import RUNTIMES, installed, require_version

if TYPE_CHECKING:
    import openvino

MODEL = "openvino_model.xml"
"""The graph; its weights lie beside it in a file of the same stem."""
SECTION = "model_optimizer"
"""Group of the model's runtime information that the engine's own entries stand in."""
DYNAMIC_GROUP, PRECISION = "dynamic_quantization_group", "precision"
"""Entries: how many inputs of a product share a step when they are rounded to int8, 0 = not rounded; formats of the weights."""
COMPUTED = ("float32", "int8", "int4", "int3", "int2")
"""Beginnings of the names of weight formats that an engine can hold."""
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(frozen=True, slots=True)
class Cache:
    """Key and value of every layer in turn, each [B, KV heads, columns, head dimension]."""

    parts: tuple[NDArray[np.float32], ...]
    owner: "openvino.InferRequest | None" = None
    """Whose output memory the parts lie in; None = their own."""


class OpenVinoModel:
    """A compiled model with an explicit cache."""

    def __init__(self, compiled: "openvino.CompiledModel", weight_bytes: int):
        self._compiled = compiled
        self._weight_bytes = weight_bytes
        self._free: list[openvino.InferRequest] = []
        inputs = {port.get_any_name(): port.get_partial_shape() for port in compiled.inputs}
        self._past = [name for name in inputs if name.startswith(_PAST)]
        self._heads = [(inputs[name][1].get_length(), inputs[name][3].get_length()) for name in self._past]
        self._logits = compiled.output("logits")
        self._present = [compiled.output(_PRESENT + name.removeprefix(_PAST)) for name in self._past]
        self._vocab_size = self._logits.get_partial_shape()[2].get_length()

    @property
    def vocab_size(self) -> int:
        return int(self._vocab_size)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def forward(self, batch: ModelInput, cache: Cache | None) -> tuple[NDArray[np.float32], Cache]:
        """Return logits from `logits_from` on and the grown cache."""
        past = self._empty(len(batch.input_ids_BS)) if cache is None else cache.parts
        request = self._free.pop() if self._free else self._compiled.create_infer_request()
        feeds = {
            "input_ids": batch.input_ids_BS,
            "attention_mask": batch.attention_mask_BP,
            "position_ids": batch.position_ids_BS,
            "logits_from": np.array([batch.logits_from], np.int64),
            **dict(zip(self._past, past, strict=True)),
        }
        request.infer({name: np.ascontiguousarray(array) for name, array in feeds.items()}, share_inputs=True)
        self._release(cache)
        logits_BSV = request.get_tensor(self._logits).data.copy()
        grown = tuple(cast("NDArray[np.float32]", request.get_tensor(port).data) for port in self._present)
        return logits_BSV, Cache(grown, request)

    def select(self, cache: Cache, rows: Sequence[int], first_column: int) -> Cache:
        """Keep rows and the columns from `first_column` on."""
        kept = tuple(np.ascontiguousarray(part[list(rows), :, first_column:]) for part in cache.parts)
        self._release(cache)
        return Cache(kept)

    def join(self, caches: Sequence[Cache]) -> Cache:
        """Stack rows, padding shorter caches on the left with zeros."""
        joined = tuple(stack_columns(parts) for parts in zip(*(cache.parts for cache in caches), strict=True))
        for cache in caches:
            self._release(cache)
        return Cache(joined)

    def cache_bytes(self, cache: Cache) -> int:
        return sum(part.nbytes for part in cache.parts)

    def close(self) -> None:
        """Drop requests, model and weights."""
        self._free.clear()
        self._compiled = cast("openvino.CompiledModel", None)

    def _release(self, cache: Cache | None) -> None:
        if cache is not None and cache.owner is not None:
            self._free.append(cache.owner)

    def _empty(self, rows: int) -> tuple[NDArray[np.float32], ...]:
        return tuple(np.zeros((rows, heads, 0, dim), np.float32) for heads, dim in self._heads)


class OpenVinoFactory:
    """Open OpenVINO engines."""

    def supports(self, strategy: Strategy) -> Support:
        unknown = [name for name in strategy.weights.formats if not name.startswith(COMPUTED)]
        if unknown:
            return Support(False, f"openvino computes {', '.join(COMPUTED)} weights, not {', '.join(unknown)}")
        return installed("openvino", install="model-optimizer-pipeline[openvino]")

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Load the engine on the CPU with one thread per usable core.

        Raises:
            ConfigError: no `openvino_model.xml` there.
            UnsupportedError: OpenVINO is missing or has another version than the engine's.
        """
        version = require_version(engine, "openvino")
        if not (directory / MODEL).is_file():
            raise ConfigError(f"{directory} holds no {MODEL}; give the directory of a compiled engine")
        model, compiled = compile_engine(directory)
        precision = model.get_rt_info([SECTION, PRECISION]).astype(str)
        notes = ("each step writes a new cache beside the old one",)
        facts = RuntimeFacts("openvino", version, "cpu", precision, memory.max_batch, memory.max_model_len, notes)
        return DecodingRuntime(OpenVinoModel(compiled, constant_bytes(model)), facts, memory)


def compile_engine(directory: Path) -> "tuple[openvino.Model, openvino.CompiledModel]":
    """Return an engine as it was stored, and compiled for this CPU."""
    import openvino

    core = openvino.Core()
    model = core.read_model(directory / MODEL)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": model.get_rt_info([SECTION, DYNAMIC_GROUP]).astype(str),
    }
    return model, core.compile_model(model, "CPU", settings)


def constant_bytes(model: "openvino.Model") -> int:
    """Return the bytes of a model's weights."""
    constants = (op for op in model.get_ops() if op.get_type_name() == "Constant")
    return sum(op.get_element_type().bitwidth * math.prod(op.get_output_shape(0)) // 8 for op in constants)


RUNTIMES.register("openvino")(OpenVinoFactory())
