"""ONNX Runtime: runs `model.onnx` of an engine directory, with float or integer weights, on what it was built for."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.protocols import LogitsRuntime, RuntimeFacts, Support
from model_optimizer.runtimes.decoder_model import DecoderModel
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.onnx_graph import check_graph
from model_optimizer.runtimes.ort_models import (
    CACHE,
    CPU,
    CUDA,
    DEVICE,
    IN_PLACE,
    MAX_POSITION,
    BoundOrtModel,
    InPlaceOrtModel,
    OrtModel,
)
from model_optimizer.runtimes.ort_replay import ReplayedOrtModel
from model_optimizer.runtimes.registry import RUNTIMES, framework_version, installed, require_version

if TYPE_CHECKING:
    import onnx
    import onnxruntime

MODEL = "model.onnx"
LEVEL = "optimization_level"
"""Metadata key of the engine: 0 leaves the graph as it is, 1 lets the runtime fuse."""
PRECISION = "precision"
"""Metadata key of the engine: formats of its weights."""
COMPUTED = ("float32", "int8", "int4", "int3", "int2")
"""Beginnings of the names of weight formats that an engine can hold; int3 codes are held in 4 bits."""
PROVIDERS = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}
"""Device -> who runs a graph's nodes there."""
PAGE_TOKENS = 16
"""Columns by which a cache grows where no plan says."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a session runs on, and whether steps can be recorded there."""

    device: str = CPU
    recorded: bool = False


ON_CPU = Place()


class OnnxRuntimeFactory:
    """Open ONNX engines."""

    def supports(self, strategy: Strategy) -> Support:
        unknown = [name for name in strategy.weights.formats if not name.startswith(COMPUTED)]
        if unknown:
            return Support(False, f"onnxruntime computes {', '.join(COMPUTED)} weights, not {', '.join(unknown)}")
        return installed("onnx", "onnxruntime", install="onnx onnxruntime")

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Load the engine on the device that its graph names, the CPU with one thread per usable core.

        Raises:
            ConfigError: no `model.onnx` there.
            UnsupportedError: ONNX Runtime is missing or has another version than the engine's, does not know its device, or the
                graph has operators that it does not know.
            IntegrityError: the graph or its data is cut short.
        """
        version = require_version(engine, distribution())
        if not (directory / MODEL).is_file():
            raise ConfigError(f"{directory} holds no {MODEL}; give the directory of a compiled engine")
        check_graph(directory / MODEL)
        properties, weight_bytes = _described(directory)
        in_place = properties.get(CACHE) == IN_PLACE
        if in_place and memory.max_model_len > int(properties[MAX_POSITION]):
            raise ConfigError(
                f"max_model_len is {memory.max_model_len}; this engine knows {properties[MAX_POSITION]} positions; "
                "ask for no more, or build it with compile.level: 1"
            )
        kept = "keys and values are written in place" if in_place else "each step writes a new cache beside the old one"
        kept += "; decode steps are recorded, each with a cache of its own" if _place(properties).recorded else ""
        device = properties.get(DEVICE, CPU)
        held = "a tied float32 head is held twice: as rows and packed" if device == CPU else "logits come back to the CPU"
        precision = properties.get(PRECISION, "float32")
        facts = RuntimeFacts("onnxruntime", version, device, precision, memory.max_batch, memory.max_model_len, (kept, held))
        session = open_session(directory / MODEL, int(properties.get(LEVEL, "1")), place=_place(properties))
        return DecodingRuntime(_model(session, properties, weight_bytes, memory.page_tokens), facts, memory)


def open_model(
    directory: Path, *, profile_prefix: Path | None = None
) -> "tuple[DecoderModel[Any], onnxruntime.InferenceSession]":
    """Return an engine's model and its session, without a runtime around it; see `open_session`."""
    properties, weight_bytes = _described(directory)
    session = open_session(directory / MODEL, int(properties.get(LEVEL, "1")), profile_prefix, _place(properties))
    return _model(session, properties, weight_bytes, PAGE_TOKENS), session


def _place(properties: dict[str, str]) -> Place:
    device = properties.get(DEVICE, CPU)
    return Place(device, recorded=device == CUDA and properties.get(CACHE) == IN_PLACE)


def _model(
    session: "onnxruntime.InferenceSession", properties: dict[str, str], weight_bytes: int, page_tokens: int
) -> "DecoderModel[Any]":
    device = properties.get(DEVICE, CPU)
    if properties.get(CACHE) == IN_PLACE:
        kind = InPlaceOrtModel if device == CPU else ReplayedOrtModel
        return kind(session, weight_bytes, page_tokens, device)
    return OrtModel(session, weight_bytes) if device == CPU else BoundOrtModel(session, weight_bytes, device)


def distribution() -> str:
    """Return which of its two packages ONNX Runtime comes from: the one with the GPU, where that is installed."""
    try:
        metadata.version("onnxruntime-gpu")
    except metadata.PackageNotFoundError:
        return "onnxruntime"
    return "onnxruntime-gpu"


def require_device(device: str) -> None:
    """Check that the installed ONNX Runtime runs graphs on a device.

    Raises:
        UnsupportedError: it does not, or is not installed.
    """
    version = framework_version(distribution())
    import onnxruntime

    known = onnxruntime.get_available_providers()
    if PROVIDERS[device] not in known:
        raise UnsupportedError(
            f"onnxruntime {version} has no {PROVIDERS[device]} ({', '.join(known)}), which engines for {device} need; "
            "run `pip uninstall onnxruntime` and `pip install onnxruntime-gpu`, or set compile.onnxruntime_device: cpu"
        )


def _described(directory: Path) -> tuple[dict[str, str], int]:
    """Return what an engine's graph says of itself, and the bytes of its weights."""
    import onnx

    graph = onnx.load(directory / MODEL, load_external_data=False)
    properties = {entry.key: entry.value for entry in graph.metadata_props}
    if properties.get(DEVICE, CPU) == CPU:
        return properties, resident_weight_bytes(graph)
    return properties, sum(size for _, size in _initializer_bytes(graph))


def open_session(
    path: Path, level: int, profile_prefix: Path | None = None, place: Place = ON_CPU
) -> "onnxruntime.InferenceSession":
    """Return a session; level 0 leaves the graph as it is. `profile_prefix` makes it log every kernel it runs.

    Raises:
        UnsupportedError: the device cannot be used.
    """
    import onnxruntime

    if place.device == CUDA:
        require_device(CUDA)
        _load_cuda_libraries()

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
    if place.device == CPU:
        return onnxruntime.InferenceSession(str(path), options, providers=[PROVIDERS[CPU]])
    stated = {"use_tf32": "0", "enable_cuda_graph": str(int(place.recorded))}
    session = onnxruntime.InferenceSession(str(path), options, providers=[(PROVIDERS[CUDA], stated), PROVIDERS[CPU]])
    if PROVIDERS[CUDA] not in session.get_providers():
        raise UnsupportedError(
            f"onnxruntime {onnxruntime.__version__} could not start {PROVIDERS[CUDA]}: no GPU is usable here, or libraries of "
            "CUDA or cuDNN are missing; see `nvidia-smi`, and install them with `pip install onnxruntime-gpu[cuda,cudnn]`"
        )
    return session


def _load_cuda_libraries() -> None:
    """Load CUDA and cuDNN where Python packages brought them: torch's, else their own."""
    if util.find_spec("torch") is not None:
        import torch

        if torch.version.cuda is not None:
            return
    import onnxruntime

    onnxruntime.preload_dlls()


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
