"""Put a checkpoint's integer weights into the exported graph: MatMul becomes MatMulNBits, codes and scales unchanged.

Shape letters: O outputs, I inputs, G groups of the checkpoint, N blocks of the engine, K inputs per block.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from model_optimizer.artifacts.compiled import FusedOp
from model_optimizer.compilation.external_data import MODEL, DataWriter, read_array
from model_optimizer.errors import UnsupportedError

log = logging.getLogger(__name__)

DOMAIN = "com.microsoft"
HELD_BITS = {2: 2, 3: 4, 4: 4, 8: 8}
"""Bits of a code -> bits that hold it; there is no kernel for 3, and every 3-bit code is a 4-bit code too.
Source: ONNX Runtime 1.32, where MatMulNBits with bits 3 fails to initialise."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What MatMulNBits allows. Source: ONNX Runtime, contrib operator MatMulNBits."""


@dataclass(frozen=True, slots=True)
class NBitsWeight:
    """One weight as MatMulNBits stores it; without zero points zero is the middle code, as the operator's default is."""

    blocks_ONB: NDArray[np.uint8]
    """Codes + 2^(bits-1), [O, N, K x bits / 8]; of several codes in one byte the first sits lowest."""
    scales_ON: NDArray[np.float32]
    bits: int
    block_size: int
    zeros_ON: NDArray[np.uint8] | None = None
    """Zero points + 2^(bits-1), [O, N x bits / 8 rounded up], packed as codes are."""


def pack_blocks(
    codes_OI: NDArray[np.int8],
    scale_OG: NDArray[np.float32],
    bits: int,
    block_size: int,
    zero_OG: NDArray[np.int8] | None = None,
) -> NBitsWeight:
    """Lay out integer codes in blocks along the inputs; the values they stand for do not change.

    Groups are cut into blocks of `block_size` with their scale and zero point repeated, where it divides them. A last
    block beyond the inputs is filled with the code of zero. Codes of 3 bits are held in 4.

    Raises:
        UnsupportedError: groups of a size that MatMulNBits does not know.
    """
    (num_outputs, num_inputs), num_groups = codes_OI.shape, scale_OG.shape[1]
    group_size = num_inputs // num_groups
    if num_groups > 1 and group_size % block_size:
        block_size = group_size
    bits = HELD_BITS[bits]
    if block_size not in BLOCK_SIZES:
        raise UnsupportedError(f"onnxruntime knows blocks of {BLOCK_SIZES} weights, not {block_size}; choose another group size")
    num_blocks = -(-num_inputs // block_size)
    padded_OI = np.pad(codes_OI, ((0, 0), (0, num_blocks * block_size - num_inputs)))
    blocks_ONB = _packed(padded_OI.reshape(num_outputs, num_blocks, block_size), bits)
    scales_ON = np.repeat(scale_OG, num_blocks // num_groups, axis=1)
    zeros_ON = None if zero_OG is None else _packed(np.repeat(zero_OG, num_blocks // num_groups, axis=1), bits)
    return NBitsWeight(blocks_ONB, np.ascontiguousarray(scales_ON, np.float32), bits, block_size, zeros_ON)


def _packed(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Return codes + 2^(bits-1), as many along the last axis in a byte as fit, the first lowest; the last byte is filled up."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    unsigned = (filled.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    packed: NDArray[np.uint8] = np.bitwise_or.reduce([unsigned[..., at::per_byte] << (bits * at) for at in range(per_byte)])
    return np.ascontiguousarray(packed)


def swap_weights(
    export: Path, checkpoint: Path, target: Path, *, accuracy_level: int, block_size: int
) -> tuple[onnx.ModelProto, tuple[FusedOp, ...]]:
    """Write the data file of an engine to `target` and return its graph with the list of swapped operators.

    `accuracy_level` is MatMulNBits' own: 1 computes in float32, 4 rounds activations to int8.

    Raises:
        UnsupportedError: the checkpoint quantizes a layer that the graph has no MatMul for.
    """
    from model_optimizer.formats.compressed_tensors import read_quantized_layers
    from model_optimizer.formats.registry import FORMATS

    model = onnx.load(export / MODEL, load_external_data=False)
    nodes = {node.name: node for node in model.graph.node if node.op_type == "MatMul"}
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    fused, added = [], []
    with DataWriter(target) as data:
        for layer, tensor, format_name in read_quantized_layers(checkpoint):
            if layer not in nodes:
                raise UnsupportedError(f"{checkpoint} quantizes {layer}, which is no MatMul of the ONNX graph")
            bits = FORMATS.get(format_name).bits
            if FORMATS.get(format_name).activation is not None:
                raise UnsupportedError(f"{layer} is stored as {format_name}, whose rounding of inputs onnxruntime does not do")
            zero_OG = None if tensor.zero_OG is None else tensor.zero_OG.numpy()
            weight = pack_blocks(tensor.codes_OI.numpy(), tensor.scale_OG.float().numpy(), bits, block_size, zero_OG)
            del kept[f"{layer}.weight"]
            names: tuple[str, ...] = (f"{layer}.weight_blocks", f"{layer}.weight_scales")
            added += [data.add(names[0], weight.blocks_ONB), data.add(names[1], weight.scales_ON)]
            if weight.zeros_ON is not None:
                names += (f"{layer}.weight_zeros",)
                added.append(data.add(names[2], weight.zeros_ON))
            _become_nbits(nodes[layer], names, tensor.codes_OI.numpy().shape, weight, accuracy_level)
            fused.append(FusedOp(name=layer, kind="MatMulNBits", tensors=names, bits=weight.bits, block_size=weight.block_size))
        for name, initializer in kept.items():
            external = initializer.data_location == onnx.TensorProto.EXTERNAL
            added.append(data.add(name, read_array(initializer, export)) if external else initializer)
    del model.graph.initializer[:]
    model.graph.initializer.extend(added)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model, tuple(fused)


def _become_nbits(
    node: onnx.NodeProto, names: tuple[str, ...], shape_OI: tuple[int, ...], weight: NBitsWeight, accuracy_level: int
) -> None:
    """Turn a MatMul into a MatMulNBits with the same input and output."""
    swapped = helper.make_node(
        "MatMulNBits",
        [node.input[0], *names],
        list(node.output),
        name=node.name,
        domain=DOMAIN,
        K=shape_OI[1],
        N=shape_OI[0],
        bits=weight.bits,
        block_size=weight.block_size,
        accuracy_level=accuracy_level,
    )
    node.CopyFrom(swapped)
