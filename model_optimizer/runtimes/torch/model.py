"""The forward pass: a flat batch of tokens of many sequences through a Llama-like decoder, keys and values in pages.

Shape letters: T tokens of the step, R rows whose logits are wanted, X hidden size, Q query heads, K KV heads, D head
dimension, F width of the feed-forward layer, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.runtimes.torch.attention import AttentionKernel
from model_optimizer.runtimes.torch.batch import FlatBatch
from model_optimizer.runtimes.torch.config import ModelConfig
from model_optimizer.runtimes.torch.linear import DenseLinear, Linear, side_by_side
from model_optimizer.runtimes.torch.regions import EAGER, Regions, any_number_of_tokens, compiling
from model_optimizer.runtimes.torch.vector_sets import keep_vector_sets
from model_optimizer.runtimes.torch.weights import Checkpoint

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: y = x + O(attention(norm(x))), z = y + down(silu(gate(n)) * up(n)) with n = norm(y)."""

    input_norm_X: torch.Tensor
    qkv: Linear
    query_norm_D: torch.Tensor | None
    key_norm_D: torch.Tensor | None
    output: Linear
    feed_norm_X: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None

    @property
    def num_bytes(self) -> int:
        norms = (self.input_norm_X, self.feed_norm_X, self.query_norm_D, self.key_norm_D)
        linears = (self.qkv, self.output, self.gate_up, self.down)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(linear.num_bytes for linear in linears)


def read_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> Layer:
    """Return layer `index` of a checkpoint; what shares an input becomes one matrix where it can."""
    shape, prefix = config.shape, f"model.layers.{index}"
    width, feed = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def qkv(name: str, size: int) -> Linear:
        return checkpoint.linear(f"{prefix}.self_attn.{name}_proj", size, width, bias=config.qkv_bias)

    def feed_forward(name: str, size: int, inputs: int) -> Linear:
        return checkpoint.linear(f"{prefix}.mlp.{name}_proj", size, inputs, bias=config.mlp_bias)

    def head_norm(name: str) -> torch.Tensor | None:
        return checkpoint.tensor(f"{prefix}.self_attn.{name}_norm.weight", shape.head_dim) if config.qk_norm else None

    return Layer(
        input_norm_X=checkpoint.tensor(f"{prefix}.input_layernorm.weight", width),
        qkv=side_by_side((qkv("q", queries), qkv("k", keys), qkv("v", keys))),
        query_norm_D=head_norm("q"),
        key_norm_D=head_norm("k"),
        output=checkpoint.linear(f"{prefix}.self_attn.o_proj", width, queries, bias=config.output_bias),
        feed_norm_X=checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", width),
        gate_up=side_by_side((feed_forward("gate", feed, width), feed_forward("up", feed, width))),
        down=feed_forward("down", width, feed),
        window=config.windows[index],
    )


class Model:
    """Weights and the forward pass; keeps no state between steps."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        attention: AttentionKernel,
        device: torch.device,
        regions: Regions = EAGER,
    ):
        shape = config.shape
        self.config = config
        self.device = device
        self.windows = frozenset(config.windows)
        self._attention = attention
        self._embedding_VX = checkpoint.tensor("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self._layers = [read_layer(checkpoint, config, index) for index in range(shape.num_layers)]
        self._final_norm_X = checkpoint.tensor("model.norm.weight", shape.hidden_size)
        if config.tied_head:
            checkpoint.forget("lm_head.weight")
            self._head: Linear = DenseLinear(self._embedding_VX)
        else:
            self._head = checkpoint.linear("lm_head", shape.vocab_size, shape.hidden_size, bias=False)
        checkpoint.refuse_rest()
        self._inv_freq = torch.tensor(config.inv_freq, device=device)
        self._before = regions.wrap(_project)
        self._after = regions.wrap(_finish)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_VX.dtype

    @property
    def num_bytes(self) -> int:
        head = 0 if self.config.tied_head else self._head.num_bytes
        layers = sum(layer.num_bytes for layer in self._layers)
        return self._embedding_VX.nbytes + self._final_norm_X.nbytes + self._inv_freq.nbytes + head + layers

    def hidden(self, batch: FlatBatch, storage: KvStorage) -> torch.Tensor:
        """Return the last layer's output [T, X]; keys and values of the step's tokens are written on the way."""
        hidden_TX = functional.embedding(batch.tokens_T, self._embedding_VX)
        rotation = self._rotation(batch.positions_T)
        for index, layer in enumerate(self._layers):
            query_TQD, key_TKD, value_TKD = self._before(self.config, layer, hidden_TX, rotation)
            storage.write(index, batch.slots_T, key_TKD, value_TKD)
            mixed_TQD = self._attention(query_TQD, batch, storage, layer=index, window=layer.window)
            hidden_TX = self._after(self.config, layer, hidden_TX, mixed_TQD)
        return hidden_TX

    def logits(self, hidden_RX: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, V] of rows that `hidden` gave."""
        return self._head(_norm(hidden_RX, self._final_norm_X, self.config.norm_eps)).float()

    def compile_regions(self) -> None:
        """Compile what lies before and behind attention, once for one token and once for any larger number of them.

        Raises:
            UnsupportedError: the compiler is missing or fails.
        """
        shape, layer = self.config.shape, self._layers[0]
        with compiling():  # tensors of a step are made in there too: what is made elsewhere would be compiled for alone
            if self.device.type == "cpu":
                keep_vector_sets()
            for num_tokens in (1, 2):
                hidden_TX = torch.zeros(num_tokens, shape.hidden_size, dtype=self.dtype, device=self.device)
                mixed_TQD = torch.zeros(num_tokens, shape.num_heads, shape.head_dim, dtype=self.dtype, device=self.device)
                rotation = self._rotation(torch.arange(num_tokens, device=self.device))
                if num_tokens > 1:
                    any_number_of_tokens(hidden_TX, mixed_TQD, *rotation)
                self._before(self.config, layer, hidden_TX, rotation)
                self._after(self.config, layer, hidden_TX, mixed_TQD)

    def _rotation(self, positions_T: torch.Tensor) -> Rotation:
        """Return cosines and sines [T, 1, D / 2] of the step's positions."""
        angles = positions_T.float()[:, None, None] * self._inv_freq
        gain = self.config.rope_gain
        return (angles.cos() * gain).to(self.dtype), (angles.sin() * gain).to(self.dtype)


def _project(config: ModelConfig, layer: Layer, hidden_TX: torch.Tensor, rotation: Rotation) -> Heads:
    """Return rotated queries [T, Q, D] and keys, and values [T, K, D]."""
    shape, epsilon = config.shape, config.norm_eps
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    projected_TO = layer.qkv(_norm(hidden_TX, layer.input_norm_X, epsilon))
    query_TQD, key_TKD, value_TKD = projected_TO.unflatten(-1, (sum(heads), -1)).split(heads, dim=1)
    if layer.query_norm_D is not None and layer.key_norm_D is not None:
        query_TQD, key_TKD = _norm(query_TQD, layer.query_norm_D, epsilon), _norm(key_TKD, layer.key_norm_D, epsilon)
    return _rotate(query_TQD, rotation), _rotate(key_TKD, rotation), value_TKD


def _finish(config: ModelConfig, layer: Layer, hidden_TX: torch.Tensor, mixed_TQD: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [T, X] from its input and what attention mixed."""
    hidden_TX = hidden_TX + layer.output(mixed_TQD.flatten(1))
    gate_TF, up_TF = layer.gate_up(_norm(hidden_TX, layer.feed_norm_X, config.norm_eps)).chunk(2, dim=-1)
    return hidden_TX + layer.down(functional.silu(gate_TF) * up_TF)


def _norm(input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in float32."""
    wide = input.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(input.dtype)


def _rotate(heads_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its position's angle. Source: RoFormer (arXiv 2104.09864), halves as in Llama."""
    cosine, sine = rotation
    left, right = heads_THD.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
