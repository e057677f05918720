"""ONNX weights in one file beside the graph: written tensor by tensor, read back by offset, never all in memory."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx
from numpy.typing import NDArray

MODEL = "model.onnx"
"""The graph; its data file is named after it."""
ALIGNMENT = 4096
"""Offsets are multiples of a memory page, so that a runtime can map tensors instead of copying them."""


class DataWriter:
    """Append tensors to `<directory>/<name>`; use as a context manager."""

    def __init__(self, directory: Path, name: str = f"{MODEL}.data"):
        self._name = name
        self._stream = (directory / name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()

    def add(
        self, name: str, array: NDArray[np.generic], *, shape: tuple[int, ...] | None = None, data_type: int | None = None
    ) -> onnx.TensorProto:
        """Write an array and return the initializer that refers to it; shape and type are said where NumPy has not the type."""
        self._stream.write(bytes(-self._stream.tell() % ALIGNMENT))
        offset = self._stream.tell()
        content = np.ascontiguousarray(array)
        self._stream.write(content.data)
        tensor = onnx.TensorProto(
            name=name,
            dims=shape or array.shape,
            data_type=data_type or onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, value in {"location": self._name, "offset": offset, "length": content.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def read_array(tensor: onnx.TensorProto, directory: Path) -> NDArray[np.generic]:
    """Return the values of an initializer, mapped from its data file or decoded from the graph."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    place: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    path = directory / place["location"]
    return np.memmap(path, dtype, "r", offset=int(place["offset"]), shape=tuple(tensor.dims))
