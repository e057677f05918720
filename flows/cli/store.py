"""`model-optimizer store list` and `store gc`."""

import json
import re
from datetime import UTC, datetime

import typer

from flows.bootstrap import home
from model_optimizer.errors import ConfigError
from model_optimizer.store_gc import Entry, collect, entries

SHOWN_KEY = 12
_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def list_entries(*, as_json: bool) -> None:
    """Print every entry of this folder's store, the least recently used first."""
    held = sorted(entries(home() / "store"), key=lambda entry: entry.last_used)
    if as_json:
        typer.echo(json.dumps([_document(entry) for entry in held], indent=1))
        return
    for entry in held:
        typer.echo(_line(entry))
    typer.echo(f"{len(held)} entries, {_megabytes(sum(entry.num_bytes for entry in held))} in {home() / 'store'}")


def collect_unused(unused_for: str, *, dry_run: bool, as_json: bool) -> None:
    """Remove (or name) what was unused for so long, and say how many bytes that is.

    Raises:
        ConfigError: the duration cannot be read.
        StorageError: the store cannot be written.
    """
    done = collect(home() / "store", seconds(unused_for), dry_run=dry_run)
    if as_json:
        document = {
            "dry_run": dry_run,
            "num_bytes": done.num_bytes,
            "removed": [_document(entry) for entry in done.removed],
            "kept": [_document(old.entry) | {"because": old.because} for old in done.kept],
        }
        typer.echo(json.dumps(document, indent=1))
        return
    for entry in done.removed:
        typer.echo(_line(entry))
    for old in done.kept:
        typer.echo(f"{_line(old.entry)}  kept: {old.because}")
    what = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(done.removed)} entries, {_megabytes(done.num_bytes)} {what}")


def seconds(duration: str, option: str = "--unused-for") -> float:
    """Read `30d`, `12h`, `90min` or `60s`.

    Raises:
        ConfigError: it is none of them.
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS_S)})", duration.strip())
    if match is None:
        raise ConfigError(f"{option} {duration!r}: give a number with one of {', '.join(_UNITS_S)}, e.g. 30d")
    return float(match[1]) * _UNITS_S[match[2]]


def _document(entry: Entry) -> dict[str, object]:
    return {
        "kind": entry.kind,
        "key": entry.key,
        "state": entry.state,
        "num_bytes": entry.num_bytes,
        "last_used": datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds"),
    }


def _line(entry: Entry) -> str:
    used = datetime.fromtimestamp(entry.last_used, UTC).strftime("%Y-%m-%d %H:%M")
    return f"{entry.kind:12} {entry.key[:SHOWN_KEY]}  {_megabytes(entry.num_bytes):>11}  {used}  {entry.state}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
