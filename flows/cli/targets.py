"""`model-optimizer targets`: which framework executes which scheme where, and how that is known."""

import json

import typer
from rich.console import Console
from rich.table import Table

from model_optimizer.compilation.support import CAPABILITIES, FRAMEWORKS, Answer, Device, Framework, Scheme, Standing
from model_optimizer.compilation.target_framework import TargetFramework

_SIGNS = {Standing.MEASURED: "yes", Standing.DOCUMENTED: "doc", Standing.UNTRIED: "?", Standing.REFUSED: "-"}
_LEGEND = (
    "yes: run and compared, --json says on what; doc: by the framework's own source; ?: never tried, the load canary decides; "
    "-: refused before any work. Reasons: --json"
)


def print_targets(framework: str | None, device: str | None, *, as_json: bool) -> None:
    """Print the support matrix of all frameworks or of one, on all devices or on one; exit 4 for a version that is not there.

    Raises:
        ConfigError: no such framework or device.
        UnsupportedError: the stated version of a framework that must be installed here is not.
    """
    devices = [Device(), *map(Device, CAPABILITIES)] if device is None else [Device.named(device)]
    if framework is None:
        chosen = [FRAMEWORKS.get(name) for name in FRAMEWORKS.names()]
    else:
        target = TargetFramework.read(framework)
        if target.version is not None:
            target.found()
        chosen = [target.framework]
    if as_json:
        typer.echo(json.dumps([_document(it, devices) for it in chosen], indent=1))
        return
    console = Console()
    for it in chosen:
        console.print(_table(it, devices))
    console.print(_LEGEND)


def _document(framework: Framework, devices: list[Device]) -> dict[str, object]:
    return {
        "framework": framework.name,
        "loads": framework.loads,
        "checked_versions": list(framework.checked),
        "install": framework.install,
        "load_canary": framework.canary is not None,
        "schemes": {scheme: {it.label: _words(framework.answer(scheme, it)) for it in devices} for scheme in Scheme},
    }


def _words(answer: Answer) -> dict[str, str]:
    told = {"standing": str(answer.standing), "because": answer.because}
    return told | {"instead": answer.advice} if answer.advice else told


def _table(framework: Framework, devices: list[Device]) -> Table:
    versions = f", facts of {', '.join(framework.checked)}" if framework.checked else ""
    table = Table(title=f"{framework.name} (loads: {framework.loads}{versions})", title_justify="left", box=None)
    table.add_column("scheme", no_wrap=True)
    for device in devices:
        table.add_column(device.label)
    for scheme in Scheme:
        table.add_row(scheme, *(_SIGNS[framework.answer(scheme, device).standing] for device in devices))
    return table
