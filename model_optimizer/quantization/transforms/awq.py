"""AWQ: channels that a layer's inputs make matter get finer steps, by a scale that is folded into what feeds the layer.

    s = m^alpha / sqrt(max m^alpha  min m^alpha),  m_i = sqrt(H_ii), the root mean square of input i
    alpha in {0, 1/20, ..., 19/20} that leaves least tr(dW H dW^T),  dW = round(W diag(s)) diag(1/s) - W

One alpha per edge (q/k/v behind their norm, gate/up behind theirs, down behind up's rows, o behind v's rows where heads map
one to one). The paper takes mean |x| for m and runs each layer; the moments that all recipes share stand for both, so that
the search needs no pass over the text.

Source: Lin et al. 2023, AWQ, section 3.2, equations 4 and 5; grid and normalisation: its authors' implementation.

Shape letters: I input features.
"""

import torch
from pydantic import BaseModel

from model_optimizer.decisions import Decision
from model_optimizer.journal import Journal
from model_optimizer.quantization.transforms.anatomy import Edge
from model_optimizer.quantization.transforms.base import Folding, Job, rounded_formats, scale_columns
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.quantization.transforms.scaling import move_scale
from model_optimizer.quantization.transforms.search import rounding_error
from model_optimizer.store import stage_key

ALPHAS = tuple(step / 20 for step in range(20))
JOURNAL = "alphas.jsonl"
SMALLEST_RATIO = 1e-4
"""Inputs are taken to be at least this share of the largest, so that one that was never seen does not stretch the scales."""


class _Choice(BaseModel):
    """The alpha of one edge: one journal record."""

    reader: str
    alpha: float
    error: float
    plain_error: float


class Awq:
    """Deterministic for given moments."""

    def fold(self, job: Job) -> Folding:
        edges = [edge for block in job.anatomy.blocks for edge in block.edges if rounded_formats(job, edge.readers)]
        journal = Journal(job.workspace / JOURNAL, stage_key(job.inputs), _Choice)
        for edge in job.progress.track(edges[len(journal.records) :], "awq", len(edges) - len(journal.records)):
            journal.append(_search(job, edge))
        folding = Folding()
        for edge, choice in zip(edges, journal.records, strict=True):
            assert choice.reader == edge.readers[0], f"the journal holds {choice.reader} where {edge.readers[0]} was expected"
            if choice.alpha:
                move_scale(folding, job, edge, channel_scale(job.moment(edge.readers[0]), choice.alpha))
        folding.decisions.append(_decision(journal.records))
        return folding


def channel_scale(moment_II: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the scale [I] of an exponent, largest and smallest each other's inverse."""
    magnitude_I = moment_II.diagonal().clamp_min(0).sqrt()
    ratio_I = magnitude_I / magnitude_I.max().clamp_min(torch.finfo(torch.float32).tiny)
    scale_I = ratio_I.clamp_min(SMALLEST_RATIO) ** alpha
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def _search(job: Job, edge: Edge) -> _Choice:
    moment_II = job.moment(edge.readers[0])
    weights_OI = {reader: job.weight(f"{reader}.weight") for reader in edge.readers}
    formats = rounded_formats(job, edge.readers)
    errors = []
    for alpha in ALPHAS:
        scale_I = channel_scale(moment_II, alpha)
        errors.append(rounding_error(weights_OI, formats, moment_II, scale_columns(scale_I), scale_columns(1 / scale_I)))
    best = min(range(len(ALPHAS)), key=errors.__getitem__)
    return _Choice(reader=edge.readers[0], alpha=ALPHAS[best], error=errors[best], plain_error=errors[0])


def _decision(choices: list[_Choice]) -> Decision:
    error, plain = sum(it.error for it in choices), sum(it.plain_error for it in choices)
    return Decision(
        subject="awq",
        choice=f"{sum(it.alpha > 0 for it in choices)} of {len(choices)} edges are scaled",
        because="each alpha of 20 leaves the least output error on the calibration inputs after rounding to nearest",
        numbers={
            "mean_alpha": sum(it.alpha for it in choices) / max(1, len(choices)),
            "output_error_left_ratio": error / plain if plain else 1.0,
        },
    )


TRANSFORMS.register("awq")(Awq())
