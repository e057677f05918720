"""The head in int8: the largest weight that a step reads, where a tied embedding keeps it in float32.

Shape letters: V vocabulary, H hidden, G blocks of a row.
"""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from model_optimizer.compilation.graph_edit import CONTRIB, GraphEdit
from model_optimizer.compilation.swap import NBitsWeight, pack_blocks

HEAD = "lm_head"
HEAD_BITS, HEAD_BLOCK = 8, 32
LARGEST_CODE = 127


def round_head(edit: GraphEdit) -> int:
    """Turn the float32 product of the head into MatMulNBits of 8 bits; 1 where it was one. The embedding stays as it is.

    This rounds what the checkpoint keeps, so that parity must be looked at.
    """
    head = next((node for node in edit.nodes if node.name == HEAD), None)
    if head is None or head.op_type not in ("Gemm", "MatMul"):
        return 0
    stored = np.asarray(edit.array(head.input[1]), np.float32)
    weight = rounded_rows(stored if head.op_type == "Gemm" else np.ascontiguousarray(stored.T))
    names = [edit.add(f"{HEAD}.weight_blocks", weight.blocks_ONB), edit.add(f"{HEAD}.weight_scales", weight.scales_ON)]
    edit.replace([head], _product(head, names, weight, stored.shape if head.op_type == "Gemm" else stored.shape[::-1]))
    return 1


def rounded_rows(weight_VH: NDArray[np.float32]) -> NBitsWeight:
    """Return a weight in blocks of 32 inputs, each with its own symmetric step, codes rounded to nearest."""
    num_blocks = -(-weight_VH.shape[1] // HEAD_BLOCK)
    padded_VH = np.pad(weight_VH, ((0, 0), (0, num_blocks * HEAD_BLOCK - weight_VH.shape[1])))
    blocks_VGK = padded_VH.reshape(len(weight_VH), num_blocks, HEAD_BLOCK)
    scale_VG = np.maximum(np.abs(blocks_VGK).max(axis=-1) / LARGEST_CODE, np.finfo(np.float32).tiny)
    codes_VH = np.rint(blocks_VGK / scale_VG[..., None]).astype(np.int8).reshape(padded_VH.shape)
    return pack_blocks(codes_VH, scale_VG.astype(np.float32), HEAD_BITS, HEAD_BLOCK)


def _product(head: onnx.NodeProto, names: list[str], weight: NBitsWeight, shape_VH: tuple[int, ...]) -> onnx.NodeProto:
    return helper.make_node(
        "MatMulNBits",
        [head.input[0], *names],
        list(head.output),
        name=HEAD,
        domain=CONTRIB,
        K=shape_VH[1],
        N=shape_VH[0],
        bits=weight.bits,
        block_size=weight.block_size,
        accuracy_level=4,
    )
