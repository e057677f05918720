"""Fusion of attention: GroupQueryAttention over a cache that is written in place.

Shape letters: D head dimension, M positions.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper

from model_optimizer.compilation.graph_edit import CONTRIB, GraphEdit, attributes_of
from model_optimizer.runtimes.ort_models import CACHE, IN_PLACE, MAX_POSITION

DEFAULTED_INPUT = "logits_from"
"""It loses its default: inputs that have one cannot be bound. Source: ONNX Runtime 1.32, `bind_cpu_input`."""
LENGTHS, TOTAL = "/row_lengths", "/total_length"
TABLES = ("/cos_table", "/sin_table")


def fuse_attention(edit: GraphEdit) -> int:
    """Turn RotaryEmbedding and Attention into GroupQueryAttention; return how many.

    Rows then lie at the beginning of the cache, each as long as its mask has ones, and new keys and values are written behind
    them, where the cache has room.
    """
    found = [(node, rotated) for node in edit.of_kind("Attention") if (rotated := _rotated(edit, node)) is not None]
    if not found or len(found) != len(edit.of_kind("Attention")):
        return 0
    _tables(edit)
    for attention, (query, key) in found:
        attributes = attributes_of(attention)
        past = list(attention.input[4:6])
        fused = helper.make_node(
            "GroupQueryAttention",
            [query.input[0], key.input[0], attention.input[2], *past, LENGTHS, TOTAL, *TABLES, "position_ids"],
            list(attention.output),
            name=attention.name,
            domain=CONTRIB,
            num_heads=attributes["q_num_heads"],
            kv_num_heads=attributes["kv_num_heads"],
            do_rotary=1,
        )
        edit.replace([query, key, attention], fused)
    for value in (*edit.inputs, *edit.outputs):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.shape.dim[2].dim_param = "room"
    edit.initializers.pop(DEFAULTED_INPUT, None)
    edit.metadata[CACHE] = IN_PLACE
    return len(found)


def _rotated(edit: GraphEdit, attention: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto] | None:
    """Return the nodes that rotate queries and keys, where both are read here alone."""
    query, key = (edit.giver(value) for value in attention.input[:2])
    if query is None or key is None or {query.op_type, key.op_type} != {"RotaryEmbedding"}:
        return None
    return query, key


def _tables(edit: GraphEdit) -> None:
    """Add cos and sin [M, D/2] of every position, and each row's length and the longest one from the mask."""
    position_M1 = np.arange(int(edit.metadata[MAX_POSITION]), dtype=np.float32)[:, None]
    angles_MD = position_M1 * np.asarray(edit.array("/const/inverse_frequency"), np.float32)
    scale = np.float32(edit.array("/const/rotary_scale"))
    for name, function in zip(TABLES, (np.cos, np.sin), strict=True):
        edit.add(name, (function(angles_MD) * scale).astype(np.float32))
    axis, one = edit.add("/const/mask_axis", np.array([1])), edit.add("/const/length_one", np.array([1]))
    edit.put_first(
        [
            helper.make_node("ReduceSum", ["attention_mask", axis], ["/row_sums"], name="/row_sums", keepdims=0),
            helper.make_node("Sub", ["/row_sums", one], ["/row_sums_less"], name="/row_sums_less"),
            helper.make_node("Cast", ["/row_sums_less"], [LENGTHS], name=LENGTHS, to=TensorProto.INT32),
            helper.make_node("Shape", ["attention_mask"], ["/mask_width"], name="/mask_width", start=1, end=2),
            helper.make_node("Cast", ["/mask_width"], [TOTAL], name=TOTAL, to=TensorProto.INT32),
        ]
    )
