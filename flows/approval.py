"""Sign-off of a run: who made it, Prefect's form where a policy waits, and telling MLflow and Prefect what was decided."""

import getpass
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import UUID

import httpx
from prefect import suspend_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput, keyset_from_base_key, read_flow_run_input
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.bootstrap import home
from flows.outcome import Outcome
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError, GateFailed, IntegrityError
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.sign import SigningKey, ensure_key
from model_optimizer.release.signoff import Review, check_request, parse_waivers, record
from model_optimizer.release.stage import answer_by_policy
from model_optimizer.release.verify import verify_bundle
from model_optimizer.reporting.markup import cell
from model_optimizer.reporting.markup import table as markdown_table
from model_optimizer.reporting.summary import verdict_markdown
from tasks.tracking import Tracker

KEY = "signoff"
"""Of Prefect's pause and of the artifact."""
UNTOLD = (httpx.HTTPError, OSError, RuntimeError)
"""What keeps a server from being told."""
_NOREPLY = re.compile(r"^(?:\d+\+)?(?P<login>[^@]+)@users\.noreply\.github\.com$")


class SignOffForm(RunInput):
    """What a reviewer fills in to let a suspended run go on."""

    reviewer: str = Field(
        min_length=1, max_length=200, description="your name; it is kept as claimed, for nothing here proves it"
    )
    decision: Literal["approve", "reject"]
    waivers: list[str] = Field(default=[], description="GATE=REASON for every gate that did not accept")
    comment: str = Field(default="", max_length=2000)
    report_sha256: str = Field(default="", description="of the report that you looked at")
    manifest_sha256: str = Field(default="", description="of the bundle's manifest")


def authors_of(folder: Path, commit: str) -> tuple[str, ...]:
    """Return who made a commit of the checkout that a folder belongs to, and who starts this run: names, addresses, logins."""
    names: list[str] = []
    if re.fullmatch("[0-9a-f]{40}", commit):
        command = ["git", "-C", str(folder), "show", "-s", "--format=%an%n%ae%n%cn%n%ce", commit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        names += done.stdout.splitlines() if done.returncode == 0 else []
    names += [match["login"] for name in names if (match := _NOREPLY.match(name))]
    names += [os.environ.get("GITHUB_ACTOR", ""), os.environ.get("GITHUB_TRIGGERING_ACTOR", ""), _user()]
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def settle(outcome: Outcome, package: PackageInputs, tracker: Tracker) -> Outcome:
    """Return the outcome with the decision that stands; where a person must decide and this run has a deployment, ask.

    Raises:
        Pause: the form is out, and this process ends; the run starts from its top once it is answered.
        IntegrityError: the bundle was changed while it waited.
    """
    key = ensure_key(package.config.signer.key)
    found = answer_by_policy(outcome.bundle, package, key)
    tell(outcome.bundle, found, tracker)
    if found.decision == "waiting" and found.terms is not None and "form" in found.terms.ways and deployment.get_id():
        found = _ask(outcome, key)
        tell(outcome.bundle, found, tracker)
    return replace(outcome, record=found)


def tell(bundle: Path, found: SignOff, tracker: Tracker) -> None:
    """Show a record where people look: tags and alias of the registered version, and an artifact in Prefect."""
    tracker.mirror_signoff(bundle.name.rpartition("-v")[0], bundle.resolve().as_uri(), found)
    create_markdown_artifact(signoff_markdown(found), key=KEY, description=f"{bundle.name}: {found.decision}")


def show_in_prefect(bundle: Path, found: SignOff) -> None:
    """Show a record that came without a flow run, and let runs go on that wait for this bundle's.

    Raises:
        UNTOLD: the server does not answer.
    """
    words = f"{bundle.name}: {found.decision}"
    with get_client(sync_client=True) as client:
        client.create_artifact(ArtifactCreate(key=KEY, type="markdown", description=words, data=signoff_markdown(found)))
        for path in sorted((home() / "runs").glob("*.json")):
            document = json.loads(path.read_bytes())
            if document.get("bundle") == str(bundle) and document.get("decision") == "waiting":
                _let_go_on(client, UUID(path.stem), found)  # flows name the file by their run's id


def _let_go_on(client: SyncPrefectClient, run: UUID, found: SignOff) -> None:
    """Resume a suspended run; it takes the record that stands, whatever its form says."""
    try:
        state = client.read_flow_run(run).state
    except ObjectNotFound:  # another server's, or removed
        return
    if state is not None and state.is_paused():
        decision = "approve" if found.decision == "signed-off" else "reject"
        comment = f"decided by {found.reviewer} elsewhere; the record beside the bundle counts"
        client.resume_flow_run(run, run_input={"reviewer": found.reviewer, "decision": decision, "comment": comment})


def _ask(outcome: Outcome, key: SigningKey) -> SignOff:
    """Return the answer of the form; one that cannot be recorded is told why and asked again."""
    fault = ""
    for turn in itertools.count(1):
        request = check_request(outcome.bundle, key.public)
        if request.decision != "waiting":  # somebody approved it elsewhere meanwhile
            return request
        pause = KEY if turn == 1 else f"{KEY}-{turn}"
        asked = SignOffForm.with_initial_data(
            description=_question(outcome, request, fault),
            report_sha256=request.report_sha256,
            manifest_sha256=request.bundle_manifest_sha256,
        )
        form = suspend_flow_run(wait_for_input=asked, timeout=_seconds_left(request), key=pause)
        verify_bundle(outcome.bundle, public_key=key.public)
        try:
            return record(outcome.bundle, _review(form, pause), key, key.public)
        except (ConfigError, GateFailed, IntegrityError) as error:
            fault = str(error)
    raise AssertionError("unreachable: the loop has no end")


def _review(form: SignOffForm, pause: str) -> Review:
    """Read an answer; digests that it leaves out are those that the form showed, whatever lies there now."""
    schema = read_flow_run_input(keyset_from_base_key(f"suspended-{pause}")["schema"])
    assert isinstance(schema, dict), "prefect keeps the form's schema, and is not asked asynchronously"
    shown, given = schema["properties"], form.model_fields_set
    return Review(
        decision="signed-off" if form.decision == "approve" else "refused",
        reviewer=form.reviewer,
        method="form",
        identity=f"claimed in the form of Prefect flow run {flow_run.get_id()}; no identity provider vouches for it",
        report_sha256=form.report_sha256 if "report_sha256" in given else str(shown["report_sha256"]["default"]),
        manifest_sha256=form.manifest_sha256 if "manifest_sha256" in given else str(shown["manifest_sha256"]["default"]),
        waivers=parse_waivers(form.waivers),
        comment=form.comment,
    )


def _seconds_left(request: SignOff) -> int:
    assert request.terms is not None, "a request has terms"
    return max(1, int((datetime.fromisoformat(request.terms.until) - datetime.now(UTC)).total_seconds()))


def _question(outcome: Outcome, request: SignOff, fault: str) -> str:
    """Return what the form says above its fields."""
    assert request.terms is not None, "a request has terms"
    refused = f"**The last answer was not recorded:** {cell(fault)}\n\n" if fault else ""
    failed = ", ".join(f"`{gate}`" for gate in request.unaccepted)
    waivers = f"Gates that need a waiver with a reason each: {failed}\n\n" if failed else ""
    return (
        f"{refused}{verdict_markdown(outcome.report)}\n{waivers}"
        f"Bundle `{request.bundle}`, to be signed off as **{request.terms.level}** until {request.terms.until[:16]} UTC\n\n"
        f"Report: `{outcome.report_page}`, sha256 `{request.report_sha256}`\n\n"
        f"Manifest sha256 `{request.bundle_manifest_sha256}`\n"
    )


def signoff_markdown(found: SignOff) -> str:
    """Return a record as Markdown."""
    rows: Iterable[tuple[str, str]] = (
        ("decision", f"{found.decision}, level {found.level}"),
        ("reviewer", found.reviewer or "nobody yet"),
        ("identity", found.identity),
        ("at", found.signed_at),
        *([("comment", found.comment)] if found.comment else []),
        ("manifest", found.bundle_manifest_sha256),
        ("report", found.report_sha256),
        *((f"waived: {waiver.gate}", waiver.reason) for waiver in found.waivers),
    )
    return f"# Sign-off of {cell(found.bundle)}\n\n" + markdown_table(("record", "value"), rows)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in many containers
        return ""
