"""`model-optimizer report` and `verify-bundle`."""

import json
from pathlib import Path

import typer

from flows.bootstrap import home
from flows.cli.github import GithubFiles
from model_optimizer.errors import ConfigError


def print_report(bundle: str, form: str, output: Path | None = None, profile: Path | None = None) -> None:
    """Print the path of a bundle's HTML report, or the report in another form.

    With `output`, the form `github` is written there instead: summary, comment, outputs, and annotations on the profile's lines.

    Raises:
        ConfigError: no such bundle, an unknown form, or `output` with another form than `github`.
    """
    folder = _find(bundle)
    if output is not None:
        if form != "github":
            raise ConfigError(f"--output goes with --format github, not with {form!r}; others are printed")
        with GithubFiles(output, profile, "report") as files:
            files.report = folder / "metrics" / "report.json"
        return
    if form == "path":
        typer.echo(folder / "metrics" / "report.html")
        return
    from model_optimizer.artifacts.report import Report
    from model_optimizer.reporting.renderers import RENDERERS

    renderer = RENDERERS.get(form)
    report = Report.model_validate_json((folder / "metrics" / "report.json").read_bytes())
    typer.echo(renderer.render(report).decode())


def check_bundle(bundle: Path, public_key: Path | None, *, allow_unsigned: bool, as_json: bool) -> None:
    """Verify a bundle and say what was established.

    Raises:
        IntegrityError: names the file and what is wrong with it.
    """
    from model_optimizer.release.verify import verify_bundle

    facts = verify_bundle(bundle, public_key=public_key, allow_unsigned=allow_unsigned)
    decision = facts.record.decision if facts.record else "no sign-off record"
    if as_json:
        record = facts.record.model_dump(mode="json") if facts.record else None
        typer.echo(
            json.dumps(
                {
                    "bundle": facts.name,
                    "num_files": facts.num_files,
                    "num_bytes": facts.num_bytes,
                    "manifest_sha256": facts.manifest_sha256,
                    "signed": facts.signed,
                    "record": record,
                },
                indent=1,
            )
        )
        return
    signature = "signature valid" if facts.signed else "UNSIGNED"
    typer.echo(
        f"{facts.name}: {facts.num_files} files, {facts.num_bytes / 1e6:.1f} MB intact, {signature}, {decision}; "
        f"manifest {facts.manifest_sha256[:12]}"
    )


def _find(bundle: str) -> Path:
    """Return a bundle by directory or name; the newest release when nothing is named."""
    if bundle:
        for folder in (Path(bundle), home() / "bundles" / bundle):
            if (folder / "manifest.json").is_file():
                return folder
        raise ConfigError(f"no bundle {bundle!r} here or in {home() / 'bundles'}")
    found = [path.parent for path in (home() / "bundles").glob("*/manifest.json") if not path.parent.name.endswith("-v0")]
    if not found:
        raise ConfigError(f"no bundle in {home() / 'bundles'}; `model-optimizer run PROFILE` makes one")
    return max(found, key=lambda folder: (folder / "manifest.json").stat().st_mtime)
