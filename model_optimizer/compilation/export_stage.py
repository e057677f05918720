"""The ONNX export of a source model in one form, made once and shared by every engine built from it."""

import time
from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import ExportedModel
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.compilation.registry import BuildRequest
from model_optimizer.compilation.worker import REPRODUCE, BuildSpec, run_isolated
from model_optimizer.formats.registry import FULL_PRECISION
from model_optimizer.store import file_refs, stage_key

EXPORT = "export"


class ExportInputs(StageInputs):
    """What the shared export depends on."""

    model: Tree
    form: GraphForm


def exported(request: BuildRequest, form: GraphForm | None = None) -> Stored[ExportedModel]:
    """Return the export of the source model, plain unless a form is given.

    Raises:
        CompileError: the architecture has a part that the graph does not draw, or time ran out.
    """
    inputs = ExportInputs(fingerprint=request.fingerprint, model=request.model, form=form or GraphForm())

    def make(directory: Path) -> ExportedModel:
        start = time.monotonic()
        spec = BuildSpec(step="export", source=request.model.path, output=directory, form=inputs.form)
        run_isolated(spec, directory, request.config.timeout_s)
        files = file_refs(directory, directory / MODEL, directory / f"{MODEL}.data", directory / REPRODUCE)
        num_bytes = sum(file.num_bytes for file in files if file.path != REPRODUCE)
        return ExportedModel(graph=MODEL, num_bytes=num_bytes, export_s=time.monotonic() - start, files=files)

    return request.store.produce(EXPORT, stage_key(inputs), ExportedModel, make)


def precision_of(request: BuildRequest) -> str:
    """Return the formats that the checkpoint's layers really have, joined by `+`."""
    from model_optimizer.formats.compressed_tensors import read_plan

    return "+".join(sorted(set(read_plan(request.checkpoint).values()))) or FULL_PRECISION
