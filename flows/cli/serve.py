"""`model-optimizer serve`."""

from pathlib import Path

import typer

from model_optimizer.errors import ConfigError
from model_optimizer.serving.card import LaunchCard
from model_optimizer.serving.config import load_config
from model_optimizer.serving.server import Stop, run_server


def serve_model(path: Path | None, config_path: Path | None, port: int, host: str | None, *, as_json: bool) -> None:
    """Serve a bundle, a deployment root or a model directory until SIGTERM.

    Raises:
        ConfigError: nothing to serve, a fault in serve.yaml, or a taken port.
        IntegrityError: the bundle does not verify.
        UnsupportedError: it cannot run here.
    """
    config = load_config(config_path)
    chosen = path or config.model_path
    if chosen is None:
        raise ConfigError("nothing to serve: give --model_path, or model_path in serve.yaml")
    if host is not None:
        config = config.model_copy(update={"host": host})

    def announce(card: LaunchCard, _stop: Stop) -> None:
        typer.echo(card.model_dump_json() if as_json else card.text())

    run_server(chosen, config, port, announce)
