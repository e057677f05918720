"""How an ONNX graph is drawn, beside what it computes."""

from typing import Literal

from model_optimizer.artifacts.base import Frozen


class GraphForm(Frozen):
    """The plain form is ONNX Runtime's and OpenVINO's; TensorRT gets an explicit cache in float16."""

    explicit_cache: bool = False
    """Whether nodes of their own join past and new keys and values, and attention is products and a softmax; else Attention
    does both. Source: TensorRT-RTX 1.7 reads Attention nodes with one output alone."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of weights, states and cache; rotary angles and logits stay float32."""
