"""Fusion of a residual sum with the norm behind it: both results come from one pass over the states."""

from onnx import helper

from model_optimizer.compilation.graph_edit import CONTRIB, GraphEdit, attributes_of


def fuse_skip_norms(edit: GraphEdit) -> int:
    """Turn Add and RMSNormalization into SkipSimplifiedLayerNormalization; return how many.

    sum = input + skip;  output = sum / sqrt(mean(sum^2) + epsilon) * weight
    """
    num_fused = 0
    for norm in edit.of_kind("RMSNormalization"):
        added = edit.giver(norm.input[0])
        if added is None or added.op_type != "Add" or any(name in edit.initializers for name in added.input):
            continue
        fused = helper.make_node(
            "SkipSimplifiedLayerNormalization",
            [*added.input, norm.input[1]],
            [norm.output[0], "", "", added.output[0]],
            name=norm.name,
            domain=CONTRIB,
            epsilon=attributes_of(norm)["epsilon"],
        )
        if edit.readers(added.output[0])[0].name == norm.name:  # nobody may want the sum before the norm stands
            edit.replace([added, norm], fused)
            num_fused += 1
    return num_fused
