"""Put a checkpoint's integer weights into an exported graph as DequantizeLinear: standard ONNX, codes and scales unchanged.

    weight [I, O] = DequantizeLinear(codes [I, O], scales), one scale per output or per block of inputs

What TensorRT reads; ONNX Runtime computes the same graph slowly, which is how it is checked without a GPU.

Shape letters: O outputs, I inputs, G groups.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from model_optimizer.artifacts.compiled import FusedOp
from model_optimizer.compilation.external_data import MODEL, DataWriter, read_array
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.compressed_tensors import read_quantized_layers
from model_optimizer.formats.registry import FORMATS

MOST_NIBBLE_BITS = 4
"""Codes of so many bits are held in int4, wider ones in int8."""


def dequantized_graph(export: Path, checkpoint: Path, target: Path, dtype: str) -> tuple[onnx.ModelProto, tuple[FusedOp, ...]]:
    """Write the data file of the graph to `target`; return the graph, and every layer that got codes.

    `dtype` is the export's own, in which products are computed.

    Raises:
        UnsupportedError: a layer has zero points, steps found on the spot, a floating grid, or no MatMul in the graph.
    """
    model = onnx.load(export / MODEL, load_external_data=False)
    products = {node.name: node for node in model.graph.node if node.op_type == "MatMul"}
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    fused: list[FusedOp] = []
    added: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []
    with DataWriter(target) as data:
        for layer, tensor, format_name in read_quantized_layers(checkpoint):
            weight_format = FORMATS.get(format_name)
            _refuse(layer, weight_format, layer in products)
            del kept[f"{layer}.weight"]
            tensors, node, op = _weight(layer, tensor, weight_format, data, np.dtype(dtype))
            if weight_format.activation == "static-tensor":
                scale, rounding = _rounded_input(layer, tensor, products[layer], np.dtype(dtype))
                added.append(scale)
                nodes += rounding
            added += tensors
            nodes.append(node)
            fused.append(op)
        for name, initializer in kept.items():
            external = initializer.data_location == TensorProto.EXTERNAL
            added.append(data.add(name, read_array(initializer, export)) if external else initializer)
    _insert(model, nodes, added)
    return model, tuple(fused)


def _refuse(layer: str, weight_format: WeightFormat, is_product: bool) -> None:
    if not is_product:
        raise UnsupportedError(f"{layer} is quantized and is no MatMul of the ONNX graph; leave it in full precision")
    if not weight_format.symmetric or weight_format.code_dtype.is_floating_point:
        raise UnsupportedError(f"{layer} is stored as {weight_format.name}; only symmetric integers go into this graph")
    if weight_format.activation == "dynamic-token":
        raise UnsupportedError(
            f"{layer} is stored as {weight_format.name}, whose steps are found per token; freeze them (w8a8-int8-static)"
        )


def _weight(
    layer: str, tensor: QuantizedTensor, weight_format: WeightFormat, data: DataWriter, dtype: np.dtype[np.generic]
) -> tuple[list[onnx.TensorProto], onnx.NodeProto, FusedOp]:
    """Return initializers, the node that gives the layer's weight, and its entry in the layout."""
    codes_IO = np.ascontiguousarray(tensor.codes_OI.numpy().T)
    scale_GO = np.ascontiguousarray(tensor.scale_OG.float().numpy().T).astype(dtype)
    names = (f"{layer}.weight_codes", f"{layer}.weight_scales")
    if weight_format.bits <= MOST_NIBBLE_BITS:
        codes = data.add(names[0], packed_nibbles(codes_IO), shape=codes_IO.shape, data_type=TensorProto.INT4)
    else:
        codes = data.add(names[0], codes_IO)
    node = helper.make_node("DequantizeLinear", list(names), [f"{layer}.weight"], name=f"{layer}/weight")
    if weight_format.group_size is None:
        scales = data.add(names[1], scale_GO[0])
        node.attribute.append(helper.make_attribute("axis", 1))
    else:
        scales = data.add(names[1], scale_GO)
        node.attribute.extend([helper.make_attribute("axis", 0), helper.make_attribute("block_size", weight_format.group_size)])
    op = FusedOp(name=layer, kind="DequantizeLinear", tensors=names, bits=weight_format.bits, block_size=weight_format.group_size)
    return [codes, scales], node, op


def packed_nibbles(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return codes -8..7 two in a byte, the first in the lower half. Source: ONNX, TensorProto.INT4."""
    halves = (codes.reshape(-1) & 0xF).astype(np.uint8)
    if len(halves) % 2:
        halves = np.append(halves, np.uint8(0))
    packed: NDArray[np.uint8] = np.bitwise_or(halves[0::2], np.left_shift(halves[1::2], 4))
    return packed


def _rounded_input(
    layer: str, tensor: QuantizedTensor, product: onnx.NodeProto, dtype: np.dtype[np.generic]
) -> tuple[onnx.TensorProto, list[onnx.NodeProto]]:
    """Return the frozen step and the nodes that round the product's input with it; the product reads what they give."""
    assert tensor.input_scale is not None, "a format with frozen steps stores them"
    scale = onnx.numpy_helper.from_array(tensor.input_scale.numpy().reshape(()).astype(dtype), f"{layer}.input_scale")
    source, codes, rounded = product.input[0], f"{layer}/input_codes", f"{layer}/input_rounded"
    product.input[0] = rounded
    quantize = helper.make_node("QuantizeLinear", [source, scale.name], [codes], name=codes, output_dtype=TensorProto.INT8)
    return scale, [quantize, helper.make_node("DequantizeLinear", [codes, scale.name], [rounded], name=rounded)]


def _insert(model: onnx.ModelProto, nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto]) -> None:
    """Put every node right before the first that reads what it gives, and replace the initializers."""
    by_output = {node.output[0]: node for node in nodes}
    ordered: list[onnx.NodeProto] = []
    for node in model.graph.node:
        for name in node.input:
            if name in by_output:
                rounded = by_output.pop(name)
                if rounded.input[0] in by_output:
                    ordered.append(by_output.pop(rounded.input[0]))
                ordered.append(rounded)
        ordered.append(node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(ordered)
    model.graph.initializer.extend(initializers)
