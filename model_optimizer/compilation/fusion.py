"""Level 2 and 3 of ONNX Runtime engines: which fusions there are, and in what order they are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from model_optimizer.compilation.fusion_attention import fuse_attention
from model_optimizer.compilation.fusion_head import round_head
from model_optimizer.compilation.fusion_merge import merge_gate_up, merge_projections
from model_optimizer.compilation.fusion_norm import fuse_skip_norms
from model_optimizer.compilation.graph_edit import GraphEdit


@dataclass(frozen=True, slots=True)
class Fusion:
    """One rewriting of the graph; `apply` says how often it was done."""

    name: str
    level: int
    """From which level on."""
    apply: Callable[[GraphEdit], int]
    needs: str | None = None
    """Another fusion that must come before."""


FUSIONS = (
    Fusion("group_query_attention", 2, fuse_attention),
    Fusion("merged_projections", 2, merge_projections, needs="group_query_attention"),
    Fusion("merged_gate_up", 2, merge_gate_up),
    Fusion("skip_norm", 2, fuse_skip_norms),
    Fusion("int8_head", 3, round_head),
)


def fusions_of(level: int, *, quantized: bool) -> tuple[Fusion, ...]:
    """Return the fusions of a level; the head is rounded only beside weights that are."""
    return tuple(fusion for fusion in FUSIONS if fusion.level <= level and (quantized or fusion.level < 3))


def fuse(model: onnx.ModelProto, folder: Path, fusions: Sequence[Fusion], target: Path) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return the graph with the fusions made, its data file in `target`, and how often each was made.

    The given graph's data file lies in `folder`; a fusion whose own need is not among them is left out.
    """
    edit, names = GraphEdit(model, folder), {fusion.name for fusion in fusions}
    counts = {fusion.name: fusion.apply(edit) for fusion in fusions if fusion.needs is None or fusion.needs in names}
    return edit.write(target), counts
