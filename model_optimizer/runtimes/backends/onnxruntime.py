"""ONNX Runtime on the CPU: runs `model.onnx` of an engine directory, float32 or with integer weights.

The cache stays in the runtime's own tensors between steps; it passes through NumPy only when rows join
or leave.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import LogitsRuntime, RuntimeFacts, Support
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.registry import RUNTIMES, installed, require_version

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Cache = tuple["onnxruntime.OrtValue", ...]
"""Key and value of every layer in turn, each [B, KV heads, columns, head dimension]."""
MODEL = "model.onnx"
LEVEL = "optimization_level"
"""Metadata key of the engine: 0 leaves the graph as it is, 1 lets the runtime fuse."""
PRECISION = "precision"
"""Metadata key of the engine: formats of its weights."""
COMPUTED = ("float32", "int8", "int4", "int3", "int2")
"""Beginnings of the names of weight formats that an engine can hold; int3 codes are held in 4 bits."""
_PAST, _PRESENT = "past_key_values.", "present."


class OrtModel:
    """An inference session with its own tensors as cache."""

    def __init__(self, session: "onnxruntime.InferenceSession", weight_bytes: int):
        self._session = session
        self._weight_bytes = weight_bytes
        self._past = [tensor.name for tensor in session.get_inputs() if tensor.name.startswith(_PAST)]
        self._outputs = ["logits", *[_PRESENT + name.removeprefix(_PAST) for name in self._past]]
        shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
        self._heads = [(int(shapes[name][1]), int(shapes[name][3])) for name in self._past]
        self._vocab_size = int(next(tensor.shape[2] for tensor in session.get_outputs() if tensor.name == "logits"))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def forward(self, batch: ModelInput, cache: Cache | None) -> tuple[NDArray[np.float32], Cache]:
        """Return logits from `logits_from` on and the grown cache."""
        rows = len(batch.input_ids_BS)
        past = self._empty(rows) if cache is None else cache
        feeds = {
            "input_ids": _value(batch.input_ids_BS),
            "attention_mask": _value(batch.attention_mask_BP),
            "position_ids": _value(batch.position_ids_BS),
            "logits_from": _value(np.array([batch.logits_from], np.int64)),
            **dict(zip(self._past, past, strict=True)),
        }
        logits, *present = self._session.run_with_ort_values(self._outputs, feeds)
        return cast("NDArray[np.float32]", logits.numpy()), tuple(present)

    def select(self, cache: Cache, rows: Sequence[int], first_column: int) -> Cache:
        """Keep rows and the columns from `first_column` on."""
        return tuple(_value(part.numpy()[list(rows), :, first_column:]) for part in cache)

    def join(self, caches: Sequence[Cache]) -> Cache:
        """Stack rows, padding shorter caches on the left with zeros."""
        return tuple(_value(_stack([part.numpy() for part in parts])) for parts in zip(*caches, strict=True))

    def cache_bytes(self, cache: Cache) -> int:
        return sum(4 * int(np.prod(part.shape())) for part in cache)

    def close(self) -> None:
        """Drop session and weights."""
        self._session = cast("onnxruntime.InferenceSession", None)

    def _empty(self, rows: int) -> Cache:
        return tuple(_value(np.zeros((rows, heads, 0, dim), np.float32)) for heads, dim in self._heads)


def _value(array: NDArray[np.generic]) -> "onnxruntime.OrtValue":
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _stack(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    width = max(part.shape[2] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, 0), (width - part.shape[2], 0), (0, 0))) for part in parts])


class OnnxRuntimeFactory:
    """Open ONNX engines."""

    def supports(self, strategy: Strategy) -> Support:
        unknown = [name for name in strategy.weights.formats if not name.startswith(COMPUTED)]
        if unknown:
            return Support(False, f"onnxruntime computes {', '.join(COMPUTED)} weights, not {', '.join(unknown)}")
        return installed("onnx", "onnxruntime", install="onnx onnxruntime")

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Load the engine on the CPU with one thread per usable core.

        Raises:
            ConfigError: no `model.onnx` there.
            UnsupportedError: ONNX Runtime is missing or has another version than the engine's.
        """
        version = require_version(engine, "onnxruntime")
        if not (directory / MODEL).is_file():
            raise ConfigError(f"{directory} holds no {MODEL}; give the directory of a compiled engine")
        import onnx

        graph = onnx.load(directory / MODEL, load_external_data=False)
        properties = {entry.key: entry.value for entry in graph.metadata_props}
        session = open_session(directory / MODEL, int(properties.get(LEVEL, "1")))
        notes = ("each step writes a new cache beside the old one", "a tied float32 head is held twice: as rows and packed")
        precision = properties.get(PRECISION, "float32")
        facts = RuntimeFacts("onnxruntime", version, "cpu", precision, memory.max_batch, memory.max_model_len, notes)
        return DecodingRuntime(OrtModel(session, resident_weight_bytes(graph)), facts, memory)


def open_session(path: Path, level: int, profile_prefix: Path | None = None) -> "onnxruntime.InferenceSession":
    """Return a CPU session; level 0 leaves the graph as it is. `profile_prefix` makes it log every kernel it runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if level else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # every step has another shape: patterns would only pile up
    options.log_severity_level = 3
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def resident_weight_bytes(model: "onnx.ModelProto") -> int:
    """Return the bytes of all initializers, counting those twice that a Gemm packs while another node reads rows.

    Source: ONNX Runtime drops a weight after packing it only where no other node uses it.
    """
    num_users = Counter(name for node in model.graph.node for name in set(node.input))
    packed = {node.input[1] for node in model.graph.node if node.op_type == "Gemm"}
    sizes = dict(_initializer_bytes(model))
    return sum(sizes.values()) + sum(size for name, size in sizes.items() if name in packed and num_users[name] > 1)


def _initializer_bytes(model: "onnx.ModelProto") -> Iterator[tuple[str, int]]:
    from onnx.helper import tensor_dtype_to_np_dtype

    for tensor in model.graph.initializer:
        yield tensor.name, int(np.prod(tensor.dims, dtype=np.int64)) * tensor_dtype_to_np_dtype(tensor.data_type).itemsize


RUNTIMES.register("onnxruntime")(OnnxRuntimeFactory())
