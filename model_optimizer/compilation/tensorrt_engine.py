"""Build a TensorRT engine from an exported graph: strongly typed, with the checkpoint's own codes, for this GPU or another one.

One path for `tensorrt` (10, 11) and `tensorrt_rtx`; the latter builds for GPUs of other machines, and needs none itself.
"""

import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from model_optimizer.artifacts.compiled import FusedOp, Layout
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.gpu_results import GpuKey, gpu_key, read_timings, write_timings
from model_optimizer.compilation.tensorrt_log import BUILT, PHASE, layers_of, seen_integer
from model_optimizer.compilation.worker import LAYOUT, BuildSpec, Range, ShapeProfile, TensorRtBuild, fresh_engine
from model_optimizer.errors import CompileError, UnsupportedError
from model_optimizer.store import write_atomically

PLAN = "model.plan"
LIBRARIES = ("tensorrt", "tensorrt_rtx")
NEEDED = (
    "TensorRT is not installed: `pip install tensorrt-rtx` for GeForce, RTX and builds without a GPU, "
    "or NVIDIA's own `tensorrt` package for data-centre GPUs; or use `onnxruntime`, `openvino` or `torch`"
)
ELSEWHERE = (
    "on H100, H200 and B200 install NVIDIA's own `tensorrt` package and build there, or use `onnxruntime` with CUDA "
    "(`pip install onnxruntime-gpu`), `vllm` or `torch`"
)
"""What to take where TensorRT-RTX does not know the GPU."""


def library() -> ModuleType:
    """Return TensorRT or TensorRT-RTX, whichever is installed.

    Raises:
        UnsupportedError: neither is.
    """
    import importlib
    from importlib import util

    for name in LIBRARIES:
        if util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise UnsupportedError(NEEDED)


def build_tensorrt(spec: BuildSpec) -> None:
    """Write `output/engine/model.plan` and `output/layout.json`.

    Raises:
        UnsupportedError: TensorRT is missing, or cannot build for the GPU that is asked for.
        CompileError: the graph was not understood, or no engine came of it.
    """
    import onnx

    assert spec.tensorrt is not None, "a TensorRT build says what it is for"
    library()
    engine = fresh_engine(spec)
    with tempfile.TemporaryDirectory(dir=spec.output) as name:
        graph = Path(name) / MODEL
        fused: tuple[FusedOp, ...] = ()
        if spec.checkpoint is None:
            graph = spec.source / MODEL
        else:
            from model_optimizer.compilation.dequantized import dequantized_graph  # loads torch

            model, fused = dequantized_graph(spec.source, spec.checkpoint, Path(name), spec.form.dtype)
            onnx.save(model, graph)
        plan, log = build_plan(graph, spec.tensorrt)
    write_atomically(engine / PLAN, plan)
    write_atomically(spec.output / LAYOUT, _layout(log, fused, spec).model_dump_json(indent=1).encode())


def build_plan(graph: Path, wanted: TensorRtBuild) -> tuple[bytes, tuple[str, ...]]:
    """Return the serialized engine of an ONNX graph, and the builder's log.

    Raises:
        UnsupportedError: the library cannot build for that GPU.
        CompileError: says which node was not understood, or the builder's last words.
    """
    trt = library()
    check_gpu(trt, wanted.gpu)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(_typed(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise CompileError(f"TensorRT {trt.__version__} does not read the graph: {parser.get_error(0).desc()}", graph)
    config = builder.create_builder_config()
    config.builder_optimization_level = wanted.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = _monitor(trt)
    _aim(trt, config, wanted.gpu)
    _loosen(trt, config, wanted)
    for profile in wanted.profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    key = gpu_key(trt.__name__, trt.__version__, wanted.gpu)
    cache = _timing_cache(config, wanted.timing_cache, key)
    started, spent = time.monotonic(), time.process_time()
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise CompileError(f"TensorRT {trt.__version__} built no engine: {logger.lines[-1]}", graph)
    print(BUILT.format(seconds=time.monotonic() - started, cpu_seconds=time.process_time() - spent), flush=True)
    if wanted.timing_cache is not None and cache is not None:
        write_timings(wanted.timing_cache, key, bytes(config.get_timing_cache().serialize()))
    return bytes(serialized), tuple(logger.lines)


def _logger(trt: Any) -> Any:
    """Return a logger that keeps what it is told in `lines`."""

    class Kept(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: object, message: str) -> None:
            self.lines.append(message)

    return Kept()


def _monitor(trt: Any) -> Any:
    """Return a monitor that prints each phase of a build as it begins, for whoever reads the log of the process."""
    started = time.monotonic()

    class Printed(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            print(f"{PHASE}{name} ({num_steps} steps) after {time.monotonic() - started:.1f} s", flush=True)

        def step_complete(self, name: str, step: int) -> bool:
            return True

        def phase_finish(self, name: str) -> None:
            pass

    return Printed()


def _typed(trt: Any) -> int:
    """Return the flag for strong typing, which TensorRT-RTX has no other of."""
    flags = trt.NetworkDefinitionCreationFlag.__members__
    return 1 << int(flags["STRONGLY_TYPED"]) if "STRONGLY_TYPED" in flags else 0


def check_gpu(trt: Any, gpu: str | None) -> None:
    """Make sure that the library builds for a GPU, named or this machine's.

    Raises:
        UnsupportedError: it only builds for the GPU that it runs on, or does not know this one, or there is none.
    """
    capability = gpu_key(trt.__name__, trt.__version__, gpu).compute_capability
    if trt.__name__ != "tensorrt_rtx":
        if gpu is not None:
            raise UnsupportedError(
                f"TensorRT {trt.__version__} builds for this machine's GPU alone; install tensorrt-rtx to build for {gpu}"
            )
        return
    known = sorted(name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    if capability not in known:
        raise UnsupportedError(
            f"TensorRT-RTX {trt.__version__} does not build for {capability}; it knows {', '.join(known)}; {ELSEWHERE}"
        )


def _aim(trt: Any, config: Any, gpu: str | None) -> None:
    """Build for a GPU that is named; `check_gpu` has said that the library can."""
    if gpu is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.__members__[gpu.upper()], 0)


def _loosen(trt: Any, config: Any, wanted: TensorRtBuild) -> None:
    """Let other versions and GPUs load the engine, where that is asked for.

    Raises:
        UnsupportedError: the library does not take the wish, which it says by forgetting it.
    """
    if wanted.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)  # the later library brings its own
    if wanted.hardware_compatible:
        level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        config.hardware_compatibility_level = level
        if config.hardware_compatibility_level != level:
            raise UnsupportedError(
                f"{trt.__name__} {trt.__version__} builds no engines that later GPUs load too; leave "
                "compile.tensorrt_hardware_compatible out and build one for each with compile.tensorrt_gpu"
            )


def _profile(builder: Any, network: Any, wanted: ShapeProfile) -> Any:
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        shapes = [_shape(tensor.name, tuple(tensor.shape), wanted, place) for place in ("least", "usual", "most")]
        profile.set_shape(tensor.name, *shapes)
    return profile


def _shape(name: str, shape: tuple[int, ...], wanted: ShapeProfile, place: str) -> tuple[int, ...]:
    """Return one input's shape at one end of a profile."""

    def at(span: Range) -> int:
        return {"least": span.least, "usual": span.usual, "most": span.most}[place]

    batch, sequence, past = at(wanted.batch), at(wanted.sequence), at(wanted.past)
    if name == "attention_mask":
        return batch, past + sequence
    if name == "logits_from":
        return (1,)
    return (batch, sequence) if len(shape) == 2 else (batch, shape[1], past, shape[3])


def _timing_cache(config: Any, path: Path | None, key: GpuKey) -> Any:
    """Return the cache of kernel timings that the build reads and adds to, where one is asked for.

    Raises:
        IntegrityError: the file is damaged, or holds timings of another GPU, driver or library.
    """
    if path is None:
        return None
    cache = config.create_timing_cache(read_timings(path, key))
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _layout(log: tuple[str, ...], fused: tuple[FusedOp, ...], spec: BuildSpec) -> Layout:
    import onnx

    graph = onnx.load(spec.source / MODEL, load_external_data=False).graph
    layers = layers_of(log)
    return Layout(
        level=spec.level,
        inputs=tuple(value.name for value in graph.input),
        outputs=tuple(value.name for value in graph.output),
        fused=(*seen_integer(fused, layers), *layers),
        num_ops=dict(sorted(Counter(node.op_type for node in graph.node).items())),
        num_executed_ops=dict(sorted(Counter(layer.kind for layer in layers).items())),
    )
