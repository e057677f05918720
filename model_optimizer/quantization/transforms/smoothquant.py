"""SmoothQuant: outliers of activations move into weights, so that int8 activations lose less.

    s_j = max|x_j|^a / max|w_j|^(1 - a);  x_j is divided by s_j in the norm before it, column j of the weights multiplied

For formats that round activations too; with weights alone rounded it usually does harm. Edges behind a norm only.
Source: Xiao et al. 2022, SmoothQuant, equation 4; a = 0.5.

Shape letters: O output features, I input features.
"""

import torch

from model_optimizer.decisions import Decision
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.transforms.anatomy import Edge, Norm
from model_optimizer.quantization.transforms.base import Folding, Job, rounded_formats
from model_optimizer.quantization.transforms.peaks import measure_peaks
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.quantization.transforms.scaling import move_scale

SMALLEST = 1e-5
"""Peaks of activations and weights are taken to be at least this; the same bound as in the authors' implementation."""


class SmoothQuant:
    """Deterministic for a given text."""

    def fold(self, job: Job) -> Folding:
        edges = [
            edge
            for block in job.anatomy.blocks
            for edge in block.edges
            if isinstance(edge.source, Norm) and rounded_formats(job, edge.readers)
        ]
        peaks = measure_peaks(job, tuple(edge.readers[0] for edge in edges))
        folding = Folding()
        spreads_before, spreads_after = [], []
        for edge in edges:
            peak_I = peaks[edge.readers[0]].clamp_min(SMALLEST)
            scale_I = smoothing_scale(peak_I, _weight_peak(job, edge), job.inputs.smoothing)
            move_scale(folding, job, edge, scale_I)
            spreads_before.append(_spread(peak_I))
            spreads_after.append(_spread(peak_I / scale_I))
        folding.decisions.append(
            Decision(
                subject="smoothquant",
                choice=f"{job.inputs.smoothing:g} of the outliers of {len(edges)} inputs moved into weights",
                because="activations are rounded with one scale per token, which their largest channel sets",
                numbers={
                    "peak_over_mean_before": sum(spreads_before) / max(1, len(edges)),
                    "peak_over_mean_after": sum(spreads_after) / max(1, len(edges)),
                },
            )
        )
        if not any(FORMATS.get(name).activation for name in job.inputs.plan.values()):
            folding.warnings.append(
                "smoothquant moves outliers from activations into weights, yet no planned format rounds activations: "
                "awq suits better"
            )
        return folding


def smoothing_scale(peak_I: torch.Tensor, weight_peak_I: torch.Tensor, share: float) -> torch.Tensor:
    """Return s [I] from the largest magnitudes of activations and weights."""
    return (peak_I**share / weight_peak_I ** (1 - share)).clamp_min(SMALLEST)


def _weight_peak(job: Job, edge: Edge) -> torch.Tensor:
    peaks_I = [job.weight(f"{reader}.weight").abs().amax(0) for reader in edge.readers]
    return torch.stack(peaks_I).amax(0).clamp_min(SMALLEST)


def _spread(peak_I: torch.Tensor) -> float:
    return (peak_I.max() / peak_I.mean()).item()


TRANSFORMS.register("smoothquant")(SmoothQuant())
