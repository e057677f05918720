"""`model-optimizer export`."""

import json
from pathlib import Path

import typer

from flows.cli.deploy import find_bundle
from model_optimizer.errors import ConfigError


def export_bundle(
    bundle: str, target: Path, form: str, settings: tuple[str, ...], public_key: Path | None, *, as_json: bool
) -> None:
    """Write a bundle in another form and say what must be known of it.

    Raises:
        IntegrityError: the bundle does not verify.
        ConfigError: no such bundle or form, a wrong setting, or a folder that holds something.
        UnsupportedError: the form cannot hold this bundle.
    """
    from model_optimizer.release.export.write import export

    place = find_bundle(bundle)
    notes = export(place, target, form, dict(map(_pair, settings)), public_key=public_key)
    if as_json:
        typer.echo(json.dumps({"bundle": place.resolve().name, "form": form, "target": str(target), "notes": notes}, indent=1))
        return
    typer.echo(f"{place.resolve().name} is written to {target} for {form}")
    for note in notes:
        typer.echo(f"- {note}")


def _pair(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting!r}: write KEY=VALUE")
    return key, value
