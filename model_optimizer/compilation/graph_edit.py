"""Edit a drawn ONNX graph: find who gives and who reads a value, put one node in the place of several, drop what is unread.

Every node of our graphs bears a name of its own, by which it is found.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from model_optimizer.compilation.external_data import DataWriter, read_array

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""
INLINE_BYTES = 1024
"""Weights up to here stand in the graph itself: axes and shapes have to, for they are read before data files are."""


class GraphEdit:
    """A graph under edit; `model` gives the result. Weights that are made on the way are kept in memory till they are written."""

    def __init__(self, model: onnx.ModelProto, folder: Path):
        """Take a graph whose data file lies in `folder`; the given graph is not changed."""
        self._model = model
        self.folder = folder
        self.nodes = list(model.graph.node)
        self.inputs, self.outputs = (_copies(values) for values in (model.graph.input, model.graph.output))
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._made: dict[str, NDArray[np.generic]] = {}
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}

    def giver(self, value: str) -> onnx.NodeProto | None:
        """Return the node that gives a value; None for inputs and weights."""
        return next((node for node in self.nodes if value in node.output), None)

    def readers(self, value: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return [node for node in self.nodes if value in node.input]

    def of_kind(self, *kinds: str) -> list[onnx.NodeProto]:
        """Return the nodes of some kinds, in order."""
        return [node for node in self.nodes if node.op_type in kinds]

    def replace(self, old: Sequence[onnx.NodeProto], new: onnx.NodeProto) -> None:
        """Put `new` where the last of `old` stands, and drop those."""
        names = {node.name for node in old}
        last = max(index for index, node in enumerate(self.nodes) if node.name in names)
        self.nodes[last] = new
        self.nodes = [node for index, node in enumerate(self.nodes) if index == last or node.name not in names]

    def put_behind(self, node: onnx.NodeProto, new: onnx.NodeProto) -> None:
        """Put `new` right behind a node."""
        at = next(index for index, other in enumerate(self.nodes) if other.name == node.name)
        self.nodes.insert(at + 1, new)

    def put_first(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Put nodes before all others."""
        self.nodes[:0] = list(nodes)

    def array(self, name: str) -> NDArray[np.generic]:
        """Return a weight's values."""
        return self._made[name] if name in self._made else read_array(self.initializers[name], self.folder)

    def add(self, name: str, array: NDArray[np.generic]) -> str:
        """Add a weight, and return its name."""
        self._made[name] = array
        return name

    def weight_names(self) -> tuple[str, ...]:
        """Return the names of all weights, made on the way or not."""
        return tuple(dict.fromkeys((*self.initializers, *self._made)))

    def replace_weight(self, name: str, array: NDArray[np.generic]) -> None:
        """Give a weight other values, or another type."""
        self.initializers.pop(name, None)
        self._made[name] = array

    def write(self, target: Path) -> onnx.ModelProto:
        """Write every weight that is read to the data file in `target`, and return the graph that reads them."""
        self._drop_unread()
        read = {name for node in self.nodes for name in node.input}
        given = {value.name for value in self.inputs}
        graph = helper.make_graph(self.nodes, self._model.graph.name, self.inputs, self.outputs)
        with DataWriter(target) as data:
            for name, tensor in self.initializers.items():
                external = tensor.data_location == onnx.TensorProto.EXTERNAL
                if name in read | given:
                    graph.initializer.append(data.add(name, read_array(tensor, self.folder)) if external else tensor)
            for name, array in self._made.items():
                if name in read:
                    small = array.nbytes <= INLINE_BYTES
                    graph.initializer.append(numpy_helper.from_array(array, name) if small else data.add(name, array))
        opsets = {entry.domain: entry.version for entry in self._model.opset_import} | {CONTRIB: 1}
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
            ir_version=self._model.ir_version,
        )
        helper.set_model_props(model, self.metadata)
        return model

    def _drop_unread(self) -> None:
        """Drop nodes that nothing reads, from the end on."""
        wanted = {value.name for value in self.outputs}
        kept = []
        for node in reversed(self.nodes):
            if wanted.intersection(node.output):
                wanted.update(node.input)
                kept.append(node)
        self.nodes = kept[::-1]


def attributes_of(node: onnx.NodeProto) -> dict[str, object]:
    """Return a node's attributes by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _copies(values: Iterable[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    copies = []
    for value in values:
        copies.append(onnx.ValueInfoProto())
        copies[-1].CopyFrom(value)
    return copies
