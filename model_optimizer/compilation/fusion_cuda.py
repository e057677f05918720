"""Last rewriting of a graph that ONNX Runtime opens on a GPU: inputs that can be bound, and one number type beside codes."""

import numpy as np
from onnx import TensorProto

from model_optimizer.compilation.fusion_attention import DEFAULTED_INPUT
from model_optimizer.compilation.graph_edit import GraphEdit
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.runtimes.ort_models import CUDA, DEVICE

FUSED_LEVEL = 2
"""The level from which on attention is GroupQueryAttention, whose CUDA kernels know float16 and bfloat16 alone.
Source: ONNX Runtime 1.30, kernels registered for CUDA."""
POSITIONS = 9
"""Input of GroupQueryAttention; left out, a position is the number of tokens before it, which is what we would say."""


def form_on_cuda(level: int) -> GraphForm:
    """Return how the export of a level is drawn: float32 up to level 1, float16 where attention is fused."""
    return GraphForm(dtype="float16" if level >= FUSED_LEVEL else "float32")


def place_on_cuda(edit: GraphEdit) -> int:
    """Mark a graph for the GPU; return how many weights became float16.

    In a float16 graph steps of codes and rotary tables are rounded to float16 too, for their operators take one type. Inputs
    lose their defaults, so that all of them can be bound.
    """
    edit.initializers.pop(DEFAULTED_INPUT, None)
    edit.metadata[DEVICE] = CUDA
    for attention in edit.of_kind("GroupQueryAttention"):
        del attention.input[POSITIONS:]
    return _rounded(edit) if _is_float16(edit) else 0


def _is_float16(edit: GraphEdit) -> bool:
    return any(value.type.tensor_type.elem_type == TensorProto.FLOAT16 for value in edit.inputs)


def _rounded(edit: GraphEdit) -> int:
    """Round the float32 weights that fused operators and products read."""
    read = {name for node in edit.nodes if node.domain for name in node.input}
    names = [name for name in edit.weight_names() if name in read and edit.array(name).dtype == np.float32]
    for name in names:
        edit.replace_weight(name, np.asarray(edit.array(name)).astype(np.float16))
    return len(names)
