"""`model-optimizer diagnose`: the layers of a quantized checkpoint, suspects first."""

import json
from pathlib import Path

import typer

from flows.bootstrap import home
from flows.progress import TerminalProgress, terminal
from model_optimizer.errors import ConfigError

SEQUENCES, TOKENS = 32, 256
SHOWN = 20


def diagnose_checkpoint(model: str, quantized: Path, calibration_data: Path, *, measure: int, as_json: bool) -> None:
    """Print what storing each layer as it is stored does, on calibration text.

    Raises:
        ConfigError: an input is wrong, or the two models do not belong together.
    """
    if not quantized.is_dir():
        raise ConfigError(f"{quantized} is no directory; give the folder of a quantized checkpoint")
    if measure < 0:
        raise ConfigError(f"--measure is {measure}; give how many layers to measure, 0 or more")
    from model_optimizer.models.resolve import check_reference, resolve_model
    from model_optimizer.quantization.calibration import CalibrationSource, prepare
    from model_optimizer.quantization.calibration_source import Sampler, locate
    from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
    from model_optimizer.quantization.diagnosis import LayerDiagnosis, diagnose, summary
    from model_optimizer.spec import ModelRef
    from model_optimizer.store import Store

    progress, here = TerminalProgress(terminal()), Path.cwd()
    config = CalibrationConfig(path=calibration_data)
    if not config.is_self:
        locate(config, here)
    check_reference(ModelRef(ref=model), here)
    tree = resolve_model(ModelRef(ref=model), here, Store(home() / "store"), progress).tree
    source, original = CalibrationSource.of(config, here, Sampler(model=tree, cache=home() / "calibration")), tree.path
    sequences = [tokens[:TOKENS] for tokens in prepare(source, original).samples[:SEQUENCES]]
    floor = QuantizationConfig().cosine_floor
    layers = diagnose(original, quantized, sequences, cosine_floor=floor, num_measured=measure, progress=progress)
    if as_json:
        figures = dict(summary(layers)) | {"cosine_floor": floor, "num_tokens": sum(map(len, sequences))}
        typer.echo(json.dumps(figures | {"layers": [layer.model_dump() for layer in layers]}, indent=1))
        return

    def row(it: LayerDiagnosis) -> str:
        measured = "" if it.measured_kl_nats is None else f"{it.measured_kl_nats:.3g}"
        mark = "suspect" if it.suspect else ""
        figures = f"{it.predicted_kl_nats:>10.3g} {measured:>10} {it.output_cosine:>8.4f} {it.snr_db:>7.1f}"
        return f"{it.layer:44} {it.format:13} {figures} {it.weight_absmax / it.weight_std:>9.1f} {mark}".rstrip()

    typer.echo(f"{'layer':44} {'format':13} {'predicted':>10} {'measured':>10} {'cosine':>8} {'SNR dB':>7} {'max/std':>9}")
    for layer in layers[: max(SHOWN, measure)]:
        typer.echo(row(layer))
    total = summary(layers)
    typer.echo(
        f"{total['num_layers']:.0f} quantized layers, {total['num_suspects']:.0f} suspects (cosine below {floor}), "
        f"predicted KL {total['predicted_kl_nats']:.4g} nats in sum; --json shows all"
    )
