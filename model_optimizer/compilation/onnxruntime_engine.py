"""Build an ONNX Runtime engine: weights into the graph, fusions of its level, and what the runtime executes of it."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from model_optimizer.artifacts.compiled import FusedOp, Layout, TensorFacts
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.fusion import Fusion, fuse, fusions_of
from model_optimizer.compilation.fusion_cuda import form_on_cuda, place_on_cuda
from model_optimizer.compilation.fusion_gain import measured_gains
from model_optimizer.compilation.fusion_merge import merged_into
from model_optimizer.compilation.worker import ENGINE, LAYOUT, BuildSpec, fresh_engine, graph_with_weights
from model_optimizer.formats.registry import FULL_PRECISION
from model_optimizer.runtimes.backends.onnxruntime import LEVEL, PRECISION, open_model
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.ort_models import CPU, CUDA
from model_optimizer.store import write_atomically

INTEGER_KERNELS = ("MatMulNBits",)
"""What computes from codes; its float counterpart is another operator."""


def build_onnxruntime(spec: BuildSpec) -> None:
    """Write `output/engine/` and `output/layout.json`."""
    engine = fresh_engine(spec)
    fusions = fusions_of(spec.level, quantized=spec.checkpoint is not None)
    if spec.device == CUDA:
        fusions = (*fusions, Fusion("on_cuda", 0, place_on_cuda))
    if not fusions:
        model, fused = graph_with_weights(spec, engine)
        _save(model, engine, spec)
        layout = _layout(model, fused, spec)
    else:
        with tempfile.TemporaryDirectory(dir=spec.output) as name:
            plain, fused = graph_with_weights(spec, Path(name))
            model, counts = fuse(plain, Path(name), fusions, engine)
            _save(model, engine, spec)
            made = [it for it in fusions if counts[it.name]] if spec.device == CPU else []
            gains = measured_gains(plain, Path(name), made, spec)
        layout = _layout(model, fused, spec).model_copy(update={"fusions": counts, "gains": gains})
    write_atomically(spec.output / LAYOUT, layout.model_dump_json(indent=1).encode())


def _save(model: onnx.ModelProto, engine: Path, spec: BuildSpec) -> None:
    known = {entry.key: entry.value for entry in model.metadata_props}
    computed = form_on_cuda(spec.level).dtype if spec.device == CUDA else FULL_PRECISION
    precision = computed if spec.precision == FULL_PRECISION else spec.precision
    onnx.helper.set_model_props(model, known | {LEVEL: str(spec.level), PRECISION: precision})
    onnx.save(model, engine / MODEL)


def _layout(model: onnx.ModelProto, fused: tuple[FusedOp, ...], spec: BuildSpec) -> Layout:
    """Describe the engine, and what ONNX Runtime executes when it runs one token."""
    kernels = executed_kernels(spec.output / ENGINE, spec.output / "profile")
    return Layout(
        level=spec.level,
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        tensors=tuple(_facts(value) for value in (*model.graph.input, *model.graph.output)),
        fused=tuple(_seen(op, kernels) for op in fused),
        num_ops=dict(sorted(Counter(node.op_type for node in model.graph.node).items())),
        num_executed_ops=dict(sorted(Counter(kernels.values()).items())),
    )


def _facts(value: onnx.ValueInfoProto) -> TensorFacts:
    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return TensorFacts(name=value.name, dtype=onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name, shape=dims)


def _seen(op: FusedOp, kernels: Mapping[str, str]) -> FusedOp:
    """Return an entry with the kernel that computed its layer from codes in the trial run, where one did."""
    for node in (op.name, merged_into(op.name)):
        if kernels.get(node) in INTEGER_KERNELS:
            return op.model_copy(update={"executed_by": node})
    return op


def executed_kernels(engine: Path, profile_prefix: Path) -> dict[str, str]:
    """Load an engine, run one token from an empty cache, and return node name -> kind of every kernel that ran."""
    model, session = open_model(engine, profile_prefix=profile_prefix)
    one = np.ones((1, 1), np.int64)
    model.forward(ModelInput(one, one, np.zeros_like(one)), None)
    profile = Path(session.end_profiling())
    events = json.loads(profile.read_bytes())
    profile.unlink()
    ran = [event for event in events if "op_name" in event.get("args", {}) and event["name"].endswith(_KERNEL)]
    return {event["name"].removesuffix(_KERNEL): event["args"]["op_name"] for event in ran}


_KERNEL = "_kernel_time"
"""What ONNX Runtime's profile puts behind a node's name."""
