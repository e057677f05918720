"""Convert the ONNX graph of an engine to OpenVINO's own format, and say what the CPU executes of it."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from model_optimizer.artifacts.compiled import FusedOp, Layout, TensorFacts
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.registry import ROUNDED_ACCURACY_LEVEL
from model_optimizer.compilation.worker import LAYOUT, BuildSpec, fresh_engine, graph_with_weights
from model_optimizer.runtimes.backends.openvino import DYNAMIC_GROUP, PRECISION, SECTION, compile_engine
from model_optimizer.runtimes.backends.openvino import MODEL as ENGINE_MODEL
from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    import openvino

DEFAULTED_INPUT = "logits_from"
"""OpenVINO turns an input that has a default into a constant; every step gives this one, so the default goes."""

FREE = "free"
"""Name of a free dimension; OpenVINO keeps none."""


def build_openvino(spec: BuildSpec) -> None:
    """Write `output/engine/` and `output/layout.json`."""
    import onnx
    import openvino

    engine = fresh_engine(spec)
    with tempfile.TemporaryDirectory(dir=spec.output) as name:
        graph, fused = graph_with_weights(spec, Path(name))
        kept = [tensor for tensor in graph.graph.initializer if tensor.name != DEFAULTED_INPUT]
        del graph.graph.initializer[:]
        graph.graph.initializer.extend(kept)
        onnx.save(graph, Path(name) / MODEL)
        model = openvino.Core().read_model(Path(name) / MODEL)
        group = spec.block_size if spec.accuracy_level == ROUNDED_ACCURACY_LEVEL else 0
        model.set_rt_info(str(group), [SECTION, DYNAMIC_GROUP])
        model.set_rt_info(spec.precision, [SECTION, PRECISION])
        openvino.save_model(model, engine / ENGINE_MODEL, compress_to_fp16=False)
        layout = _layout(model, compile_engine(engine)[1], fused, spec)
    write_atomically(spec.output / LAYOUT, layout.model_dump_json(indent=1).encode())


def _layout(model: "openvino.Model", compiled: "openvino.CompiledModel", fused: tuple[FusedOp, ...], spec: BuildSpec) -> Layout:
    """Describe the engine, and what the CPU plugin made of it."""
    ops = compiled.get_runtime_model().get_ordered_ops()
    executed = Counter(op.get_rt_info()["layerType"].astype(str) for op in ops)
    products = {op.get_friendly_name() for op in ops if _reads_codes(op)}
    return Layout(
        level=spec.level,
        inputs=tuple(port.get_any_name() for port in model.inputs),
        outputs=tuple(port.get_any_name() for port in model.outputs),
        tensors=tuple(_facts(port) for port in (*model.inputs, *model.outputs)),
        fused=tuple(op.model_copy(update={"executed_by": op.name}) if op.name in products else op for op in fused),
        num_ops=dict(sorted(Counter(op.get_type_name() for op in model.get_ops()).items())),
        num_executed_ops=dict(sorted(executed.items())),
    )


def _reads_codes(op: "openvino.Node") -> bool:
    """Say whether an executed product reads an integer matrix; one that was unpacked when compiled reads float32."""
    if op.get_rt_info()["layerType"].astype(str) != "FullyConnected":
        return False
    kind = op.input_value(1).get_element_type()
    return bool(kind.is_integral())


def _facts(port: "openvino.Output") -> TensorFacts:
    shape = port.get_partial_shape()
    dims = tuple(FREE if dim.is_dynamic else dim.get_length() for dim in shape)
    return TensorFacts(name=port.get_any_name(), dtype=port.get_element_type().to_string(), shape=dims)
