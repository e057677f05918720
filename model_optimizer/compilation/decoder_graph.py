"""Draw the ONNX graph of a Llama-family decoder with explicit KV cache, straight from its configuration.

Linear layers are MatMul nodes named by the layer, with initializer `<layer>.weight` stored [I, O]; a tied
head reads the embedding, which is stored once. Batch, sequence and past are free; past may be 0.

Shape letters: B batch, S sequence, P past, T = P + S total, H hidden, D head dimension, V vocabulary, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from model_optimizer.compilation.graph_form import GraphForm

OPSET = 23
IR_VERSION = 11
"""RMSNormalization, RotaryEmbedding and Attention entered ONNX with opset 23."""
HIDDEN_PENALTY = {"float32": -1e9, "float16": -3e4}
"""Added to the scores of hidden columns: exp of it is 0, and a wholly hidden row stays finite; float16 ends at 65504."""
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What distinguishes one Llama-family decoder from another."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied_head: bool
    tensors: frozenset[str]
    """Names of the checkpoint's tensors: they say which biases and query/key norms there are."""


class DecoderGraph:
    """Collects nodes and small constants; `weights` lists the checkpoint tensors that the graph reads."""

    def __init__(
        self,
        shape: DecoderShape,
        inverse_frequency_D: NDArray[np.float32],
        rotary_scale: float,
        form: GraphForm | None = None,
    ):
        self._shape = shape
        self._form = form or GraphForm()
        self._dtype = np.dtype(self._form.dtype)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self.weights: dict[str, bool] = {}
        """Tensor name -> whether it is stored transposed, [I, O]."""
        self._draw(inverse_frequency_D, rotary_scale)

    def model(self, weights: Sequence[onnx.TensorProto]) -> onnx.ModelProto:
        """Return the graph with the given initializers for `self.weights`."""
        shape = self._shape
        kv = [f"{index}.{part}" for index in range(shape.num_layers) for part in ("key", "value")]
        past, total = (["batch", shape.num_kv_heads, columns, shape.head_dim] for columns in ("past", "total"))
        value = helper.make_tensor_value_info
        inputs = [
            value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            value("attention_mask", TensorProto.INT64, ["batch", "total"]),
            value("position_ids", TensorProto.INT64, ["batch", "sequence"]),
            value("logits_from", TensorProto.INT64, [1]),
            *[value(f"past_key_values.{name}", TYPES[self._form.dtype], past) for name in kv],
        ]
        outputs = [
            value("logits", TensorProto.FLOAT, ["batch", "kept", shape.vocab_size]),
            *[value(f"present.{name}", TYPES[self._form.dtype], total) for name in kv],
        ]
        first = numpy_helper.from_array(np.zeros(1, np.int64), "logits_from")  # a default: all logits
        graph = helper.make_graph(self._nodes, "decoder", inputs, outputs, [first, *self._constants.values(), *weights])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def _draw(self, inverse_frequency_D: NDArray[np.float32], rotary_scale: float) -> None:
        self._rotary(inverse_frequency_D, rotary_scale)
        self._mask()
        hidden = self._op("Gather", [self._weight("model.embed_tokens.weight"), "input_ids"], "model.embed_tokens")
        for index in range(self._shape.num_layers):
            hidden = self._layer(index, hidden)
        end = self._constant("end", np.array([np.iinfo(np.int64).max]))
        kept = self._op("Slice", [self._norm("model.norm", hidden), "logits_from", end, self._ints(1)], "/kept")
        if self._shape.tied_head:
            self._tied_head(kept)
        else:
            self._as_logits(self._linear("lm_head", kept))

    def _layer(self, index: int, hidden: str) -> str:
        """Return the output of one decoder layer."""
        prefix = f"model.layers.{index}"
        attended = self._attention(index, self._norm(f"{prefix}.input_layernorm", hidden))
        hidden = self._op("Add", [hidden, self._linear(f"{prefix}.self_attn.o_proj", attended)], f"{prefix}/attended")
        normed = self._norm(f"{prefix}.post_attention_layernorm", hidden)
        gate = self._linear(f"{prefix}.mlp.gate_proj", normed)
        up = self._linear(f"{prefix}.mlp.up_proj", normed)
        silu = self._op("Mul", [gate, self._op("Sigmoid", [gate], f"{prefix}/sigmoid")], f"{prefix}/silu")
        down = self._linear(f"{prefix}.mlp.down_proj", self._op("Mul", [silu, up], f"{prefix}/gated"))
        return self._op("Add", [hidden, down], f"{prefix}/out")

    def _attention(self, index: int, normed: str) -> str:
        """Return softmax(QK' / sqrt(D) + mask) V of one layer, before its output projection."""
        shape, prefix = self._shape, f"model.layers.{index}.self_attn"
        query = self._rotate(prefix, "q", self._linear(f"{prefix}.q_proj", normed), shape.num_heads)
        key = self._rotate(prefix, "k", self._linear(f"{prefix}.k_proj", normed), shape.num_kv_heads)
        value = self._linear(f"{prefix}.v_proj", normed)
        past = [f"past_key_values.{index}.{part}" for part in ("key", "value")]
        output = f"{prefix}/attention"
        if self._form.explicit_cache:
            return self._attention_over_joined(index, query, (key, value), output)
        self._nodes.append(
            helper.make_node(
                "Attention",
                [query, key, value, "/mask", *past],
                [output, f"present.{index}.key", f"present.{index}.value"],
                name=output,
                q_num_heads=shape.num_heads,
                kv_num_heads=shape.num_kv_heads,
            )
        )
        return output

    def _attention_over_joined(self, index: int, query: str, new: tuple[str, str], output: str) -> str:
        """Return attention [B, S, H] over cache and new tokens by products and a softmax.

        Queries that share keys stand one below the other, [B, KV heads, sharers x S, D], so that no key is repeated.
        """
        shape, prefix, present = self._shape, f"model.layers.{index}.self_attn", []
        for part, projected in zip(("key", "value"), new, strict=True):
            split = self._split_heads(f"{prefix}/{part}", projected, shape.num_kv_heads)
            joined = [f"past_key_values.{index}.{part}", split]
            present.append(self._op("Concat", joined, f"present.{index}.{part}", axis=2))
        heads = self._split_heads(f"{prefix}/query", query, shape.num_heads)
        stacked = self._op("Reshape", [heads, self._ints(0, shape.num_kv_heads, -1, shape.head_dim)], f"{prefix}/query_stacked")
        scaled = self._op(
            "Mul", [stacked, self._constant("scale", np.array(shape.head_dim**-0.5, self._dtype))], f"{output}_query"
        )
        keys = self._op("Transpose", [present[0]], f"{output}_keys", perm=(0, 1, 3, 2))
        scores = self._op("Add", [self._op("MatMul", [scaled, keys], f"{output}_scores"), "/mask_stacked"], f"{output}_masked")
        shares = self._op("Softmax", [scores], f"{output}_shares", axis=-1)
        mixed = self._op("MatMul", [shares, present[1]], f"{output}_stacked")
        apart = self._op("Reshape", [mixed, self._attention_shape()], f"{output}_heads")
        rows = self._op("Transpose", [apart], f"{output}_rows", perm=(0, 2, 1, 3))
        return self._op("Reshape", [rows, self._ints(0, 0, -1)], output)

    def _attention_shape(self) -> str:
        """Return [B, H, S, D], computed once for all layers."""
        name, shape = "/heads_shape", self._shape
        if not any(node.name == name for node in self._nodes):
            batch = self._op("Shape", ["input_ids"], "/batch", start=0, end=1)
            self._op("Concat", [batch, self._ints(shape.num_heads), "/sequence", self._ints(shape.head_dim)], name, axis=0)
        return name

    def _split_heads(self, name: str, projected: str, num_heads: int) -> str:
        """Return [B, S, heads x D] as [B, heads, S, D]."""
        split = self._op("Reshape", [projected, self._ints(0, 0, num_heads, self._shape.head_dim)], f"{name}_split")
        return self._op("Transpose", [split], f"{name}_heads", perm=(0, 2, 1, 3))

    def _rotate(self, prefix: str, part: str, projected: str, num_heads: int) -> str:
        """Return queries or keys [B, S, heads x D] with their norm, where there is one, and rotary embedding."""
        norm = f"{prefix}.{part}_norm"
        if f"{norm}.weight" in self._shape.tensors:
            split = self._op("Reshape", [projected, self._ints(0, 0, num_heads, self._shape.head_dim)], f"{norm}/split")
            projected = self._op("Reshape", [self._norm(norm, split), self._ints(0, 0, -1)], f"{norm}/merged")
        return self._op("RotaryEmbedding", [projected, "/cos", "/sin"], f"{prefix}/{part}_rotated", num_heads=num_heads)

    def _rotary(self, inverse_frequency_D: NDArray[np.float32], scale: float) -> None:
        """Compute cos and sin [B, S, D/2] of position x inverse frequency, once for all layers."""
        positions = self._op("Cast", ["position_ids"], "/positions", to=TensorProto.FLOAT)
        column = self._op("Unsqueeze", [positions, self._ints(2)], "/positions_column")
        angles = self._op("Mul", [column, self._constant("inverse_frequency", inverse_frequency_D)], "/angles")
        factor = self._constant("rotary_scale", np.array(scale, np.float32))
        for function in ("Cos", "Sin"):
            scaled = self._op("Mul", [self._op(function, [angles], f"/{function}_raw"), factor], f"/{function}_scaled")
            self._op("Cast", [scaled], f"/{function.lower()}", to=TYPES[self._form.dtype])

    def _mask(self) -> None:
        """Compute the additive mask [B, 1, S, T]: 0 where a query may look, a large negative number elsewhere."""
        total = self._op("Shape", ["attention_mask"], "/total", start=1, end=2)
        sequence = self._op("Shape", ["input_ids"], "/sequence", start=1, end=2)
        zero, one = self._constant("zero", np.array(0)), self._constant("one", np.array(1))
        columns = self._op("Range", [zero, self._op("Squeeze", [total], "/total_scalar"), one], "/columns")
        rows = self._op("Slice", [columns, self._op("Sub", [total, sequence], "/past"), total], "/rows")
        causal = self._op("LessOrEqual", [columns, self._op("Unsqueeze", [rows, self._ints(1)], "/rows_column")], "/causal")
        real = self._op("Cast", ["attention_mask"], "/real_flat", to=TensorProto.BOOL)
        seen = self._op("And", [causal, self._op("Unsqueeze", [real, self._ints(1, 2)], "/real")], "/seen")
        nothing = self._constant("nothing", np.array(0, self._dtype))
        penalty = self._constant("penalty", np.array(HIDDEN_PENALTY[self._form.dtype], self._dtype))
        self._op("Where", [seen, nothing, penalty], "/mask")
        if self._form.explicit_cache:
            sharers = self._shape.num_heads // self._shape.num_kv_heads
            self._op("Concat", ["/mask"] * sharers, "/mask_stacked", axis=2)

    def _tied_head(self, kept: str) -> None:
        """Multiply by the embedding, transposed by the product itself so that it is stored once."""
        flat = self._op("Reshape", [kept, self._ints(-1, self._shape.hidden_size)], "/kept_flat")
        product = self._op("Gemm", [flat, "model.embed_tokens.weight"], "lm_head", transB=1)
        leading = self._op("Shape", [kept], "/kept_shape", start=0, end=2)
        full = self._op("Concat", [leading, self._ints(self._shape.vocab_size)], "/logits_shape", axis=0)
        self._as_logits(self._op("Reshape", [product, full], "/logits_rows"))

    def _as_logits(self, rows: str) -> None:
        self._nodes.append(helper.make_node("Cast", [rows], ["logits"], name="/logits", to=TensorProto.FLOAT))

    def _linear(self, layer: str, source: str) -> str:
        """Return source W' (+ b) of a linear layer; the MatMul node bears the layer's name."""
        bias = f"{layer}.bias"
        biased = bias in self._shape.tensors
        product = f"{layer}/product" if biased else f"{layer}/out"
        weight = self._weight(f"{layer}.weight", transposed=True)
        self._nodes.append(helper.make_node("MatMul", [source, weight], [product], name=layer))
        return self._op("Add", [product, self._weight(bias)], f"{layer}/out") if biased else product

    def _norm(self, name: str, source: str) -> str:
        output, weight = f"{name}/out", self._weight(f"{name}.weight")
        node = helper.make_node("RMSNormalization", [source, weight], [output], name=name, epsilon=self._shape.norm_epsilon)
        self._nodes.append(node)
        return output

    def _weight(self, name: str, *, transposed: bool = False) -> str:
        self.weights[name] = transposed
        return name

    def _ints(self, *values: int) -> str:
        return self._constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def _constant(self, name: str, array: NDArray[np.generic]) -> str:
        self._constants[f"/const/{name}"] = numpy_helper.from_array(np.asarray(array), f"/const/{name}")
        return f"/const/{name}"

    def _op(self, kind: str, inputs: list[str], output: str, **attributes: int | tuple[int, ...]) -> str:
        """Append a node named like its only output, and return that."""
        self._nodes.append(_node(kind, inputs, output, attributes))
        return output


def _node(kind: str, inputs: list[str], output: str, attributes: dict[str, int | tuple[int, ...]]) -> onnx.NodeProto:
    node = helper.make_node(kind, inputs, [output], name=output)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node
