"""`model-optimizer quantize`: one checkpoint into a new directory."""

import json
import shutil
from pathlib import Path

import typer

from flows.bootstrap import home
from flows.progress import TerminalProgress, terminal
from model_optimizer.disk import explained, require_writable
from model_optimizer.errors import ConfigError


def quantize_to_directory(model: str, calibration_data: Path, output: Path, *, method: str, bits: float, as_json: bool) -> None:
    """Quantize through the store and copy the checkpoint to `output`, which must not exist.

    Raises:
        ConfigError: the output exists, or an input is wrong.
    """
    if output.exists():
        raise ConfigError(f"output {output} exists; it must be a new directory, nothing is overwritten")
    require_writable(output.absolute().parent)
    require_writable(home() / "store")
    from model_optimizer.artifacts.base import Stage
    from model_optimizer.artifacts.quantized import QuantizedModel
    from model_optimizer.artifacts.strategy import WeightRecipe
    from model_optimizer.hardware.fingerprint import fingerprint
    from model_optimizer.models.resolve import check_reference, resolve_model
    from model_optimizer.quantization.calibration import CalibrationSource
    from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
    from model_optimizer.quantization.layers import read_layers
    from model_optimizer.quantization.registry import METHODS
    from model_optimizer.quantization.stage import QuantizeInputs, quantize
    from model_optimizer.spec import ModelRef
    from model_optimizer.store import Store, stage_key
    from model_optimizer.strategy.space import recipe

    METHODS.get(method)
    progress, store, here = TerminalProgress(terminal()), Store(home() / "store"), Path.cwd()
    calibration = CalibrationSource.of(CalibrationConfig(path=calibration_data), here)
    check_reference(ModelRef(ref=model), here)
    resolved = resolve_model(ModelRef(ref=model), here, store, progress)
    plain = recipe(bits, read_layers(resolved.tree.path).linears)
    if not plain.quantized:
        raise ConfigError(f"--bits {bits:g} leaves the model as it is; give 8, 4, 3, 2 or a budget between 2 and 8")
    inputs = QuantizeInputs(
        fingerprint=fingerprint(),
        model=resolved.tree,
        recipe=WeightRecipe.model_validate(plain.model_dump() | {"method": method}),
        calibration=calibration,
        config=QuantizationConfig(),
    )
    stored = store.produce(
        Stage.QUANTIZE,
        stage_key(inputs),
        QuantizedModel,
        lambda workspace: quantize(inputs, workspace, store=store, progress=progress),
    )
    assert stored.artifact.checkpoint is not None, "a quantized recipe has a checkpoint"
    _publish(stored.directory / stored.artifact.checkpoint, output)
    coverage = stored.artifact.coverage
    for warning in stored.artifact.warnings:
        progress.note(f"warning: {warning}")
    figures = coverage.model_dump() | {"output": str(output), "predicted_kl_nats": stored.artifact.predicted_kl_nats}
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
    else:
        typer.echo(
            f"{output}: {coverage.checkpoint_bytes / 1e6:.1f} MB, {coverage.true_bits_per_weight:.2f} true bits per weight "
            f"({coverage.quantized_weights_ratio:.1%} quantized), predicted KL {stored.artifact.predicted_kl_nats:.4g} nats"
        )


def _publish(checkpoint: Path, output: Path) -> None:
    """Copy a checkpoint beside its destination and rename it, so that `output` is never half there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.with_name(f".{output.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    with explained(output.parent):
        shutil.copytree(checkpoint, staged)
        staged.rename(output)
