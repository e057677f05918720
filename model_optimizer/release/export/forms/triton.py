"""A model repository of the Triton Inference Server: `<family>/config.pbtxt` and `<family>/1/`.

An ONNX engine goes to the onnxruntime backend, which executes one step of the decoder: tokens and the cache in, logits and
the grown cache out. A checkpoint goes to the vllm backend, which takes and gives text.
Source: model_config.proto and the model repository's layout in the server's documentation; vllm_backend's README.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field

from model_optimizer.compilation.support import FRAMEWORKS, Device, refuse_unsupported, schemes_of
from model_optimizer.errors import UnsupportedError
from model_optimizer.release.export.source import FORMS, Source, read_settings
from model_optimizer.runtimes.backends.vllm import Vllm
from model_optimizer.runtimes.managed.dialect import Launch
from model_optimizer.runtimes.options import ManagedOptions
from model_optimizer.spec import Spec

if TYPE_CHECKING:
    import onnx

MODEL = "model.onnx"
VERSION = "1"
_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "BFLOAT16": "TYPE_BF16",
    "DOUBLE": "TYPE_FP64",
    "INT8": "TYPE_INT8",
    "INT16": "TYPE_INT16",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "UINT16": "TYPE_UINT16",
    "UINT32": "TYPE_UINT32",
    "UINT64": "TYPE_UINT64",
    "BOOL": "TYPE_BOOL",
    "STRING": "TYPE_STRING",
}
"""ONNX element type -> Triton's DataType. Source: onnxruntime backend, ConvertFromOnnxDataType."""
_PLACES = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
_NOT_ENGINE_ARGUMENTS = ("--host", "--port", "--served-model-name")


class TritonSettings(Spec):
    repository: str = Field(
        default="/models", pattern="^/", description="where the server will see the repository; vllm is told this path"
    )


class TritonForm:
    """Write the repository of one bundle."""

    def write(self, source: Source, target: Path, settings: Mapping[str, str]) -> tuple[str, ...]:
        """Write `<family>/config.pbtxt` and what its backend loads.

        Raises:
            UnsupportedError: no backend of the server executes the bundle's engine, or a tensor's type is none of its types.
        """
        stated = read_settings(TritonSettings, settings)
        runtime = source.metadata.runtime
        if runtime not in _WRITERS:
            raise UnsupportedError(
                f"{source.name} holds an engine of {runtime}; exported to Triton are {', '.join(_WRITERS)}; "
                "serve it with `model-optimizer serve`, or release it for one of these runtimes"
            )
        model = target / source.family
        (model / VERSION).mkdir(parents=True)
        return _WRITERS[runtime](source, model, stated)


def _write_onnx(source: Source, model: Path, _settings: TritonSettings) -> tuple[str, ...]:
    """Copy the graph with its data files; describe its tensors as the graph itself does."""
    import onnx

    graph = onnx.load(source.engine / MODEL, load_external_data=False)
    for name in (MODEL, *_data_files(graph)):
        shutil.copyfile(source.engine / name, model / VERSION / name)
    known = {tensor.name for tensor in graph.graph.initializer}
    inputs = [tensor for tensor in graph.graph.input if tensor.name not in known]
    text = [_head(source, "onnxruntime", _PLACES[source.metadata.device.kind])]
    text += [_tensors("input", inputs), _tensors("output", list(graph.graph.output))]
    (model / "config.pbtxt").write_text("\n".join(text), encoding="utf-8")
    return (
        "one request is one step of the decoder: the client tokenizes, keeps the cache, and chooses the next token",
        f"the engine was verified with onnxruntime {source.metadata.framework_version}; take a server whose backend has it",
    )


def _write_vllm(source: Source, model: Path, settings: TritonSettings) -> tuple[str, ...]:
    """Copy the checkpoint; give the engine the limits of the memory plan."""
    doubts = _doubts(source)
    checkpoint = model / VERSION / "checkpoint"
    checkpoint.mkdir()
    for path in source.checkpoint_files():
        shutil.copyfile(path, checkpoint / path.name)
    place = f"{settings.repository.rstrip('/')}/{source.family}/{VERSION}/checkpoint"
    arguments = {"model": place, **_engine_arguments(source)}
    (model / VERSION / "model.json").write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
    (model / "config.pbtxt").write_text(_head(source, "vllm", "KIND_MODEL") + "\n", encoding="utf-8")
    told = (f"the repository must be mounted at {settings.repository}, which 1/model.json names", *doubts)
    runtime = source.metadata.runtime
    if runtime == "vllm":
        return told
    return *told, f"vllm executes the checkpoint in place of the {runtime} engine that was verified; check its output"


def _doubts(source: Source) -> tuple[str, ...]:
    """Return what was never tried of the bundle's weights under vllm.

    Raises:
        UnsupportedError: vllm does not execute them on the device that the bundle was made for.
    """
    place = "cpu" if source.metadata.device.kind == "cpu" else source.metadata.compute_capability
    if place is None:  # a checkpoint is bound to no kind of GPU
        return ()
    return refuse_unsupported(FRAMEWORKS.get("vllm"), schemes_of(source.weights), Device.named(place))


def _engine_arguments(source: Source) -> dict[str, str | int | float]:
    """Return what our own managed vLLM is told, as arguments of its engine: their names are its flags with underscores."""
    launch = Launch(program=Path("vllm"), model=Path("model"), plan=source.plan, options=ManagedOptions(), port=0, key="")
    _, _, _, *flags = Vllm().command(launch)
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {name[2:].replace("-", "_"): _value(value) for name, value in pairs if name not in _NOT_ENGINE_ARGUMENTS}


def _value(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _head(source: Source, backend: str, kind: str) -> str:
    """Return what every configuration begins with; shapes name every dimension, so the server batches nothing by itself."""
    batching = "max_batch_size: 0\n" if backend == "onnxruntime" else ""
    stated = {"bundle": source.name, "manifest_sha256": source.manifest_sha256}
    parameters = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}' for key, value in stated.items()
    )
    return (
        f'name: "{source.family}"\nbackend: "{backend}"\n{batching}instance_group [ {{ count: 1 kind: {kind} }} ]\n{parameters}'
    )


def _tensors(role: str, tensors: "list[onnx.ValueInfoProto]") -> str:
    rows = ",\n".join(f"  {{ name: {json.dumps(it.name)} data_type: {_type(it)} dims: [ {_dims(it)} ] }}" for it in tensors)
    return f"{role} [\n{rows}\n]\n"


def _type(tensor: "onnx.ValueInfoProto") -> str:
    import onnx

    name = str(onnx.TensorProto.DataType.Name(tensor.type.tensor_type.elem_type))
    if name not in _TYPES:
        raise UnsupportedError(f"tensor {tensor.name} is {name}, which Triton has no type for; it has {', '.join(_TYPES)}")
    return _TYPES[name]


def _dims(tensor: "onnx.ValueInfoProto") -> str:
    """Return sizes, -1 for a free dimension."""
    shape = tensor.type.tensor_type.shape.dim
    return ", ".join(str(dim.dim_value) if dim.HasField("dim_value") else "-1" for dim in shape)


def _data_files(graph: "onnx.ModelProto") -> tuple[str, ...]:
    """Return the names of the files that hold tensors beside the graph."""
    stated = (entry.value for tensor in graph.graph.initializer for entry in tensor.external_data if entry.key == "location")
    return tuple(sorted(set(cast("tuple[str, ...]", tuple(stated)))))


_WRITERS: dict[str, Callable[[Source, Path, TritonSettings], tuple[str, ...]]] = {
    "onnxruntime": _write_onnx,
    "vllm": _write_vllm,
    "torch": _write_vllm,
}
"""By the runtime of the bundle's engine; torch's engine is the checkpoint itself."""
FORMS.register("triton")(TritonForm())
