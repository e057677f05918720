"""Look at an ONNX engine before a runtime does, so that a damaged or foreign one is refused in words that say what to do."""

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model_optimizer.errors import IntegrityError, UnsupportedError

if TYPE_CHECKING:
    import onnx

_STANDARD = ("", "ai.onnx")
_CONTRIB = ("com.microsoft",)
"""Domains whose operators ONNX Runtime itself brings. Source: ONNX Runtime, docs/ContribOperators.md."""
_MOST_NAMED = 3
_REBUILD = "build the engine again (`model-optimizer quantize ... --target-framework onnxruntime`)"


def check_graph(path: Path) -> None:
    """Make sure that a graph can be read, that its data is there, and that its operators are known.

    Raises:
        IntegrityError: the graph is cut short or no graph, or its data file is missing or too short.
        UnsupportedError: it has operators of a custom domain, or of another opset than it states.
    """
    model = _read(path)
    _check_data(model, path.parent)
    _check_opset(model, path)
    _check_operators(model, path)


def _read(path: Path) -> "onnx.ModelProto":
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise IntegrityError(f"{path} is cut short or no ONNX graph (onnxruntime cannot read it); {_REBUILD}") from error
    if not model.graph.node or not model.opset_import:
        raise IntegrityError(f"{path} is cut short: it holds no operator, or states no opset; {_REBUILD}")
    return model


def _check_data(model: "onnx.ModelProto", directory: Path) -> None:
    """Look for every byte that the graph refers to; nothing outside the engine's folder is looked at."""
    import onnx

    ends: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        name = place.get("location", "")
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise IntegrityError(f"{directory}: {tensor.name} lies at {name!r}, outside the engine's folder; {_REBUILD}")
        ends[name] = max(ends.get(name, 0), int(place.get("offset", 0)) + int(place.get("length", 0)))
    for name, end in ends.items():
        file = directory / name
        if not file.is_file():
            raise IntegrityError(f"{directory} lacks {name}, the weights of its graph; copy it beside the graph, or {_REBUILD}")
        if (size := file.stat().st_size) < end:
            raise IntegrityError(f"{file} is cut short: {size} bytes, and the graph refers to {end}; {_REBUILD}")


def _check_opset(model: "onnx.ModelProto", path: Path) -> None:
    from onnx import defs

    newest = defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in _STANDARD and opset.version > newest:
            raise UnsupportedError(
                f"{path} states opset {opset.version} and the newest that is known here is {newest}; {_REBUILD}"
            )


def _check_operators(model: "onnx.ModelProto", path: Path) -> None:
    from onnx import defs

    custom = sorted({f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in (*_STANDARD, *_CONTRIB)})
    if custom:
        named = ", ".join(custom[:_MOST_NAMED])
        raise UnsupportedError(
            f"{path} has custom operators ({named}), which nobody here brings; export it without them, or serve it with torch"
        )
    version = next((it.version for it in model.opset_import if it.domain in _STANDARD), 0)
    standard = {node.op_type for node in model.graph.node if node.domain in _STANDARD}
    unknown = []
    for name in sorted(standard):
        try:
            defs.get_schema(name, version)
        except defs.SchemaError:
            unknown.append(name)
    if unknown:
        named = ", ".join(unknown[:_MOST_NAMED])
        raise UnsupportedError(f"{path} states opset {version}, which has no {named}; {_REBUILD}")
