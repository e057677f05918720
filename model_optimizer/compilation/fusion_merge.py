"""Fusions that compute several integer products of one input by one kernel: rounded and read once, one start of the threads.

The rows of the weights stand one below the other; each keeps its codes, scales and zero points, so that no value changes.
"""

import numpy as np
import onnx
from onnx import helper

from model_optimizer.compilation.graph_edit import CONTRIB, GraphEdit, attributes_of

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_NAMES = dict.fromkeys(QKV, "qkv_proj") | dict.fromkeys(GATE_UP, "gate_up_proj")


def merge_projections(edit: GraphEdit) -> int:
    """Give GroupQueryAttention queries, keys and values packed by one MatMulNBits instead of three; return how often."""
    num_merged = 0
    for attention in edit.of_kind("GroupQueryAttention"):
        nodes = [node for value in attention.input[:3] if (node := edit.giver(value)) is not None]
        if len(nodes) == len(QKV) and alike(nodes):
            merged = _merged(edit, nodes)
            edit.replace(nodes, merged)
            attention.input[0], attention.input[1], attention.input[2] = merged.output[0], "", ""
            num_merged += 1
    return num_merged


def merge_gate_up(edit: GraphEdit) -> int:
    """Compute the two halves of a gated feed-forward part by one MatMulNBits, and cut its output; return how often."""
    by_name, num_merged = {node.name: node for node in edit.nodes}, 0
    for gate in edit.of_kind("MatMulNBits"):
        prefix, _, part = gate.name.rpartition(".")
        nodes = [gate, by_name.get(f"{prefix}.{GATE_UP[1]}")]
        pair = [node for node in nodes if node is not None]
        if part != GATE_UP[0] or len(pair) < len(GATE_UP) or not alike(pair):
            continue
        merged = _merged(edit, pair)
        sizes = edit.add(f"{merged.name}.sizes", np.array([_size(node) for node in pair], np.int64))
        outputs = [node.output[0] for node in pair]
        edit.replace(pair, merged)
        cut = helper.make_node("Split", [merged.output[0], sizes], outputs, name=f"{merged.name}/cut", axis=-1)
        edit.put_behind(merged, cut)
        num_merged += 1
    return num_merged


def merged_into(layer: str) -> str:
    """Return the name of the node that computes a layer beside others; the layer's own where it never is."""
    prefix, dot, part = layer.rpartition(".")
    return f"{prefix}{dot}{_NAMES.get(part, part)}"


def alike(nodes: list[onnx.NodeProto]) -> bool:
    """Say whether weights can stand one below the other: one input, equal bits, blocks and rounding, all or none with zeros."""
    first, attributes = nodes[0], attributes_of(nodes[0]) | {"N": 0}
    return all(
        node.op_type == "MatMulNBits"
        and node.input[0] == first.input[0]
        and len(node.input) == len(first.input)
        and attributes_of(node) | {"N": 0} == attributes
        for node in nodes
    )


def _merged(edit: GraphEdit, nodes: list[onnx.NodeProto]) -> onnx.NodeProto:
    name = merged_into(nodes[0].name)
    weights = [
        edit.add(f"{name}.weight_{index}", np.concatenate([edit.array(node.input[index]) for node in nodes]))
        for index in range(1, len(nodes[0].input))
    ]
    merged = helper.make_node("MatMulNBits", [nodes[0].input[0], *weights], [f"{name}/out"], name=name, domain=CONTRIB)
    attributes = attributes_of(nodes[0]) | {"N": sum(_size(node) for node in nodes)}
    merged.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return merged


def _size(node: onnx.NodeProto) -> int:
    size = attributes_of(node)["N"]
    assert isinstance(size, int)
    return size
