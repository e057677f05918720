"""Task 3: the quantized checkpoint, layer by layer as sensitivity and budget allow."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.quantization import stage as quantization
from model_optimizer.quantization.shared import QuantizeInputs
from tasks._task import Workplace, stage_task


@stage_task(Stage.QUANTIZE, QuantizedModel)
def quantize_layers(inputs: QuantizeInputs, workspace: Path, place: Workplace) -> QuantizedModel:
    return quantization.quantize(inputs, workspace, store=place.store, progress=place.progress)
