"""Move one scale per channel across an edge: readers' columns grow by it, what feeds them shrinks by it.

Shape letters: I channels of the edge.
"""

import torch

from model_optimizer.models.headers import read_headers
from model_optimizer.quantization.transforms.anatomy import Edge, Norm
from model_optimizer.quantization.transforms.base import Folding, Job, divide_rows, scale_columns

_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def move_scale(folding: Folding, job: Job, edge: Edge, scale_I: torch.Tensor) -> None:
    """Add the edits that multiply what the edge's readers see by 1 / scale, and their columns by the scale."""
    if isinstance(edge.source, Norm):
        scale_I = _into_norm(folding, job, edge.source, scale_I)
    else:
        divide = divide_rows(scale_I, edge.source.start)
        folding.add(f"{edge.source.layer}.weight", divide)
        if edge.source.layer in job.anatomy.biases:
            folding.add(f"{edge.source.layer}.bias", divide)
    for reader in edge.readers:
        folding.add(f"{reader}.weight", scale_columns(scale_I))


def _into_norm(folding: Folding, job: Job, norm: Norm, scale_I: torch.Tensor) -> torch.Tensor:
    """Divide a norm's gain by the scale; return the scale that is exact once the norm's weight is stored in its own type.

    A gain that is, or becomes, zero keeps its channel as it is.
    """
    dtype = _TORCH[read_headers(job.inputs.model.path)[norm.weight].dtype]
    weight_I = folding.apply(norm.weight, job.weight(norm.weight))
    gain_I = norm.offset + weight_I
    stored_I = (gain_I / scale_I - norm.offset).to(dtype).float()
    left_I = norm.offset + stored_I
    usable_I = (gain_I != 0) & (left_I != 0)
    stored_I = torch.where(usable_I, stored_I, weight_I)
    folding.add(norm.weight, lambda _: stored_I)
    return torch.where(usable_I, gain_I / left_I, torch.ones_like(gain_I))
