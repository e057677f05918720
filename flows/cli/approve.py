"""`model-optimizer approve`: sign a bundle off, or refuse it, with a key or for a GitHub environment."""

import getpass
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.bootstrap import home, prepare_environment
from model_optimizer.errors import ConfigError

if TYPE_CHECKING:
    from model_optimizer.artifacts.release import SignOff
    from model_optimizer.release.sign import SigningKey
    from model_optimizer.release.signoff import Review

log = logging.getLogger(__name__)

MIN_DIGITS = 16
"""Of a digest that says which report was looked at."""
DECLINED = 130
GITHUB = ("GITHUB_ACTOR", "GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_SERVER_URL")


@dataclass(frozen=True)
class Answer:
    """What the caller decides, and about which digests."""

    reject: bool = False
    waivers: tuple[str, ...] = ()
    comment: str = ""
    reviewer: str | None = None
    report_sha256: str | None = None
    manifest_sha256: str | None = None
    yes: bool = False


@dataclass(frozen=True)
class Means:
    """Which way, with which keys; and whether the bundle's weights are at hand."""

    key: Path
    method: Literal["key", "github"] = "key"
    public_key: Path | None = None
    attestation: str | None = None
    without_weights: bool = False


def approve(
    run: Annotated[
        str, typer.Argument(metavar="RUN|BUNDLE", help="a run's id, a bundle's name or directory", show_default=False)
    ],
    key: Annotated[Path, typer.Option("--key", help="your private key: EC P-256, PEM")],
    method: Annotated[
        Literal["key", "github"], typer.Option("--method", help="github: in a job of a reviewed environment")
    ] = "key",
    public_key: Annotated[
        Path | None, typer.Option("--public-key", "--public_key", help="the release signer's; left out: the default signer's")
    ] = None,
    reviewer: Annotated[
        str | None, typer.Option("--reviewer", help="who reviewed; with a listed key its holder is known")
    ] = None,
    comment: Annotated[str, typer.Option("--comment")] = "",
    waive: Annotated[
        list[str] | None, typer.Option("--waive", metavar="GATE=REASON", help="why a gate that did not accept may stay so")
    ] = None,
    reject: Annotated[bool, typer.Option("--reject", help="refuse it instead")] = False,
    report_sha256: Annotated[
        str | None, typer.Option("--report-sha256", "--report_sha256", help="of the report you read; 16 digits or more suffice")
    ] = None,
    manifest_sha256: Annotated[str | None, typer.Option("--manifest-sha256", "--manifest_sha256")] = None,
    attestation: Annotated[
        str | None, typer.Option("--attestation", metavar="URL", help="of GitHub, that stands behind it")
    ] = None,
    without_weights: Annotated[
        bool, typer.Option("--without-weights", "--without_weights", help="only manifest, signature, report and record are here")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing: what lies here now is what you looked at")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")] = False,
) -> None:
    """Sign off a bundle that waits for it, or refuse it; the record beside the bundle says who, how and on which digests."""
    answer = Answer(reject, tuple(waive or ()), comment, reviewer, report_sha256, manifest_sha256, yes)
    answer_bundle(run, answer, Means(key, method, public_key, attestation, without_weights), as_json=as_json)


def answer_bundle(name: str, answer: Answer, means: Means, *, as_json: bool) -> None:
    """Show what is decided about, decide it, and tell MLflow and Prefect.

    Raises:
        ConfigError: no such bundle, or reviewer, key, way or waivers are not what the bundle asks for.
        IntegrityError: the bundle does not verify, or is not what the reviewer saw.
        GateFailed: a gate did not accept and is not waived.
    """
    from flows.cli.compare import find_run
    from model_optimizer.release.signoff import check_request, record
    from model_optimizer.release.verify import verify_bundle

    key = _signing_key(means.key)
    public_key = _public_key(means.public_key, key)
    bundle = find_run(name)
    request = check_request(bundle, public_key)
    if not means.without_weights:
        verify_bundle(bundle, public_key=public_key)
    if not as_json and request.decision == "waiting":
        _show(bundle, request)
    review = _review(request, key, answer, means)
    if request.decision == "waiting":
        _confirm(request, answer)
    found = record(bundle, review, key, public_key)
    if as_json:
        typer.echo(found.model_dump_json(indent=1, exclude={"request", "request_signature"}))
    else:
        from flows.outcome import standing

        typer.echo(f"{found.bundle}: {standing(found)}; {found.identity}")
    _mirror(bundle, found)


def _show(bundle: Path, request: "SignOff") -> None:
    """Print the verdict table and the digests that are signed."""
    from flows.cli.compare import read_report
    from flows.outcome import draw_verdict
    from flows.progress import terminal

    console = terminal()
    draw_verdict(read_report(bundle), console)
    assert request.terms is not None, "a request has terms"
    lines = [
        f"report    {request.report_sha256}  {bundle / 'metrics' / 'report.html'}",
        f"manifest  {request.bundle_manifest_sha256}",
        f"level     {request.terms.level}, until {request.terms.until[:16]} UTC",
    ]
    lines += [f"needs a waiver: {gate}" for gate in request.unaccepted]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _review(request: "SignOff", key: "SigningKey", answer: Answer, means: Means) -> "Review":
    """Return what is decided by whom."""
    from model_optimizer.release.signoff import Review, parse_waivers

    reviewer, identity = _github(answer, means) if means.method == "github" else _holder(request, key, answer)
    return Review(
        decision="refused" if answer.reject else "signed-off",
        reviewer=reviewer,
        method=means.method,
        identity=identity,
        report_sha256=_seen(answer.report_sha256, request.report_sha256, "--report-sha256"),
        manifest_sha256=_seen(answer.manifest_sha256, request.bundle_manifest_sha256, "--manifest-sha256"),
        waivers=parse_waivers(answer.waivers),
        comment=answer.comment,
    )


def _holder(request: "SignOff", key: "SigningKey", answer: Answer) -> tuple[str, str]:
    """Return who holds the key, as the request names its approvers, and how that is known."""
    from model_optimizer.release.approvers import SHOWN_DIGITS, find_approver, public_line

    asked = request.request if request.request is not None else request
    print_of_key = key.public_sha256[:SHOWN_DIGITS]
    approvers = asked.terms.approvers if asked.terms else ()
    holder = find_approver(approvers, key)
    if holder is not None:
        return answer.reviewer or holder.name, f"holder of the key {print_of_key}, which the profile gives to {holder.name}"
    if approvers:
        known = ", ".join(approver.name for approver in approvers)
        add = f"for a next release add to release.approvers of the profile: NAME: {public_line(key)}"
        raise ConfigError(f"{key.private}: this key belongs to none of the approvers of {asked.bundle} ({known}); {add}")
    return answer.reviewer or getpass.getuser(), f"holder of the key {print_of_key}; the name is only claimed"


def _github(answer: Answer, means: Means) -> tuple[str, str]:
    """Return who reviewed according to the workflow's environment, and how far that is known."""
    missing = [name for name in GITHUB if not os.environ.get(name)]
    if os.environ.get("GITHUB_ACTIONS") != "true" or missing:
        raise ConfigError(
            f"--method github works in a job of GitHub Actions; not set here: {', '.join(missing) or 'GITHUB_ACTIONS=true'}; "
            "elsewhere sign off with --method key"
        )
    actor, repository, run, server = (os.environ[name] for name in GITHUB)
    url = f"{server.rstrip('/')}/{repository}/actions/runs/{run}"
    who = f"GitHub login {answer.reviewer or actor}" + (", named by the workflow as reviewer" if answer.reviewer else "")
    behind = f"attested: {means.attestation}" if means.attestation else "no attestation was known when it was signed"
    return answer.reviewer or actor, f"{who}, in workflow run {url} started by {actor}; {behind}"


def _seen(stated: str | None, held: str, option: str) -> str:
    """Return the digest that the reviewer saw, in full where its first digits are those of what lies here."""
    if stated is None:
        return held
    digits = stated.strip().lower().removeprefix("sha256:")
    if len(digits) < MIN_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(f"{option} takes {MIN_DIGITS} to 64 hexadecimal digits; seen: {stated!r}")
    return held if held.startswith(digits) else digits


def _confirm(request: "SignOff", answer: Answer) -> None:
    """Ask, unless the caller said which report he read."""
    if answer.yes or answer.report_sha256 is not None:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"say which report you read: --report-sha256 {request.report_sha256[:MIN_DIGITS]} (or --yes for what lies here now)"
        )
    what = "refuse" if answer.reject else "sign off"
    if not typer.confirm(f"{what} {request.bundle} (report {request.report_sha256[:12]})?", err=True):
        typer.echo(f"nothing was recorded; {request.bundle} waits", err=True)
        raise typer.Exit(DECLINED)


def _signing_key(path: Path) -> "SigningKey":
    from model_optimizer.release.sign import ensure_key

    if not path.expanduser().is_file():
        make = f"openssl ecparam -name prime256v1 -genkey -noout -out {path}"
        raise ConfigError(f"--key {path}: there is no such file; name your private key, or make one: {make}")
    return ensure_key(path)


def _public_key(path: Path | None, key: "SigningKey") -> Path:
    """Return the release signer's public key; on a machine that has no default signer, the caller's own may be it."""
    from model_optimizer.release.config import SignerConfig
    from model_optimizer.release.sign import public_key_path

    if path is None:
        default = public_key_path(SignerConfig().key)
        return default if default.is_file() else key.public
    if not path.is_file():
        raise ConfigError(f"there is no public key {path}; give the release signer's with --public-key")
    return path


def _mirror(bundle: Path, found: "SignOff") -> None:
    """Tell MLflow and Prefect where this folder's runs told them too; the record stands whether they can be told or not."""
    if "MLFLOW_TRACKING_URI" in os.environ or (home() / "mlflow.db").exists():
        from tasks.tracking import Tracker

        tracker = Tracker(home())
        tracker.mirror_signoff(bundle.name.rpartition("-v")[0], bundle.as_uri(), found)
        tracker.flush()
    if "PREFECT_API_URL" not in os.environ and not (home() / "prefect").is_dir():
        return
    server = prepare_environment(quiet=True)
    from flows.approval import UNTOLD, show_in_prefect

    try:
        if server:
            server.wait()
        show_in_prefect(bundle, found)
    except UNTOLD as error:
        log.warning("Prefect could not be told of it: %s", " ".join(str(error).split())[:300])
