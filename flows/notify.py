"""Tell people and machines how a run ended, by e-mail and webhook. A message that cannot be sent never fails the run.

Who is told stands in the profile (`notify`), in the run's form, or in the environment; they add up. What is secret comes from
the environment or from a Prefect Secret block of the name in brackets, and from nowhere else:

- MODEL_OPTIMIZER_SMTP_URL [model-optimizer-smtp-url]: `smtp://USER:PASSWORD@HOST:587`, or `smtps://` for TLS from the start
- MODEL_OPTIMIZER_WEBHOOK_SECRET [model-optimizer-webhook-secret]: signs the webhook's body (see `signature`)
- MODEL_OPTIMIZER_WEBHOOK_URL, MODEL_OPTIMIZER_NOTIFY_EMAIL (addresses with commas), MODEL_OPTIMIZER_SMTP_FROM
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prefect.exceptions import ObjectNotFound, Pause
from prefect.runtime import flow_run
from pydantic import BaseModel, ValidationError

from flows.bootstrap import run_file
from flows.deliver import FAILURES, Mail, post, send_mail
from model_optimizer.errors import AwaitingSignOff, GateFailed
from model_optimizer.spec import Event, Notify

log = logging.getLogger(__name__)

SMTP_URL, SMTP_FROM = "MODEL_OPTIMIZER_SMTP_URL", "MODEL_OPTIMIZER_SMTP_FROM"
WEBHOOK_URL, WEBHOOK_SECRET = "MODEL_OPTIMIZER_WEBHOOK_URL", "MODEL_OPTIMIZER_WEBHOOK_SECRET"
NOTIFY_EMAIL = "MODEL_OPTIMIZER_NOTIFY_EMAIL"
_TROUBLE = (*FAILURES, httpx.HTTPError)
"""The second is what a Prefect server raises that should give a secret."""
_WORDS: dict[Event, str] = {
    "accepted": "accepted",
    "rejected": "rejected",
    "inconclusive": "not decided",
    "waiting": "waits for a sign-off",
    "failed": "failed",
}


class _SignOff(BaseModel):
    """What a run that waits says about its sign-off."""

    next: str | None = None


class Ended(BaseModel):
    """What of a run's outcome document is told; the rest of it is left alone."""

    name: str
    verdict: str | None = None
    headline: str = ""
    dimensions: dict[str, str] = {}
    decision: str | None = None
    level: str | None = None
    bundle: str | None = None
    report: str | None = None
    manifest_sha256: str | None = None
    signoff: _SignOff | None = None


@dataclass(frozen=True)
class Notice:
    """One message: how a run ended."""

    event: Event
    run_id: str
    ui_url: str
    ended: Ended
    because: str = ""

    @property
    def subject(self) -> str:
        return f"[model-optimizer] {self.ended.name} {_WORDS[self.event]}"

    def report_link(self, notify: Notify) -> str | None:
        """Return where the report can be read: a web address where bundles are published, else its path."""
        if notify.bundles_url is None or self.ended.bundle is None:
            return self.ended.report
        return f"{notify.bundles_url.rstrip('/')}/{Path(self.ended.bundle).name}/metrics/report.html"

    def document(self, notify: Notify) -> dict[str, object]:
        """Return the webhook's body."""
        ended = self.ended.model_dump(exclude={"signoff"})
        return ended | {
            "event": self.event,
            "run": self.run_id,
            "run_url": self.ui_url,
            "report_link": self.report_link(notify),
            "because": self.because or None,
        }

    def text(self, notify: Notify) -> str:
        """Return the e-mail's text."""
        ended = self.ended
        verdicts = ", ".join(f"{dimension} {verdict}" for dimension, verdict in ended.dimensions.items())
        answer = ended.signoff.next if ended.signoff and self.event == "waiting" else None
        lines = (
            ("", f"{ended.name} {_WORDS[self.event]}" + (f": {self.because}" if self.because else "")),
            ("", ended.headline),
            ("verdict", f"{ended.verdict} ({verdicts})" if ended.verdict else ""),
            ("report", self.report_link(notify) or ""),
            ("bundle", f"{ended.bundle} ({ended.decision}, {ended.level})" if ended.bundle else ""),
            ("manifest", ended.manifest_sha256 or ""),
            ("sign off", answer or ""),
            ("run", self.ui_url),
        )
        return "\n".join(f"{label:9}{value}".strip() if label else value for label, value in lines if value) + "\n"


@contextmanager
def telling(name: str, asked: Notify) -> Iterator[list[Notify]]:
    """Run the body, a flow run of the profile `name`, and tell how it ended; errors pass unchanged.

    Yields who is told, to which the body adds the profile's own once it could be read.
    """
    wanted = [asked]
    try:
        yield wanted
    except (GateFailed, AwaitingSignOff, Pause):
        _tell_outcome(wanted)
        raise
    except KeyboardInterrupt:  # whoever pressed the keys knows
        raise
    except BaseException as error:
        because = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        tell(Notice("failed", str(flow_run.get_id()), _ui_url(), Ended(name=name), because), wanted)
        raise
    else:
        _tell_outcome(wanted)


def _tell_outcome(wanted: Sequence[Notify]) -> None:
    """Tell what the run's outcome document says; a run that was asked to end early has no verdict, and nothing is told."""
    run_id = str(flow_run.get_id())
    ended = Ended.model_validate_json(run_file(run_id).read_bytes())
    if ended.verdict is not None:
        tell(Notice(event_of(ended), run_id, _ui_url(), ended), wanted)


def event_of(ended: Ended) -> Event:
    """Return what happened; a reviewer's word, where there is one, stands above the gates'."""
    if ended.decision == "waiting":
        return "waiting"
    if ended.decision == "signed-off" or (ended.verdict == "ACCEPT" and ended.decision != "refused"):
        return "accepted"
    return "inconclusive" if ended.verdict == "INCONCLUSIVE" else "rejected"


def tell(notice: Notice, wanted: Sequence[Notify]) -> tuple[str, ...]:
    """Send the notice to everybody once; return what could not be sent, each of which was also warned of in one line."""
    complaints: list[str] = []
    mailed: set[str] = set()
    called: set[str] = set()
    for notify in (*wanted, *_from_environment(complaints)):
        if notice.event not in notify.on:
            continue
        addresses = [address for address in notify.email if address not in mailed]
        mailed |= set(addresses)
        if addresses:
            complaints += _mail(notice, notify, addresses)
        if notify.webhook and notify.webhook not in called:
            called.add(notify.webhook)
            complaints += _call(notice, notify, notify.webhook)
    for complaint in complaints:
        log.warning("%s", complaint)
    return tuple(complaints)


def _mail(notice: Notice, notify: Notify, addresses: list[str]) -> list[str]:
    try:
        if (server := _secret(SMTP_URL)) is None:
            return [f"nobody was told by e-mail: {SMTP_URL} is not set"]
        send_mail(server, Mail(tuple(addresses), notice.subject, notice.text(notify), os.environ.get(SMTP_FROM)))
    except _TROUBLE as error:
        return [f"{', '.join(addresses)} could not be told by e-mail: {_one_line(error)}"]
    return []


def _call(notice: Notice, notify: Notify, address: str) -> list[str]:
    body = json.dumps(notice.document(notify), ensure_ascii=False).encode()
    try:
        post(address, body, notice.event, _secret(WEBHOOK_SECRET))
    except _TROUBLE as error:
        place = address.split("/")[2]  # the path of a chat service's hook is a secret
        return [f"the webhook at {place} could not be told: {_one_line(error)}"]
    return []


def _from_environment(complaints: list[str]) -> tuple[Notify, ...]:
    """Return who the environment names."""
    email = tuple(address.strip() for address in os.environ.get(NOTIFY_EMAIL, "").split(",") if address.strip())
    try:
        return (Notify(email=email, webhook=os.environ.get(WEBHOOK_URL) or None),)
    except ValidationError as error:
        place = error.errors()[0]["loc"][0]
        complaints.append(f"{NOTIFY_EMAIL if place == 'email' else WEBHOOK_URL} is malformed; nobody that it names was told")
        return ()


def _secret(variable: str) -> str | None:
    """Return a secret from the environment or from the Prefect block that is called like it."""
    if value := os.environ.get(variable):
        return value
    from prefect.blocks.system import Secret

    try:
        block = Secret.load(variable.lower().replace("_", "-"))
    except ValueError as error:  # prefect says "not found" so
        if isinstance(error.__cause__, ObjectNotFound):
            return None
        raise
    assert isinstance(block, Secret)
    return str(block.get())


def _ui_url() -> str:
    return str(flow_run.get_flow_run_ui_url() or "")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
