"""Who is told how a run ended, and that nobody's deafness fails it: a local SMTP server and a local webhook."""

import logging
from email.message import EmailMessage

import pytest
from listening import mail_server, webhook
from pydantic import ValidationError

from flows.deliver import EVENT, SIGNATURE, TIMESTAMP, Mail, send_mail, signature
from flows.notify import Ended, Notice, event_of, tell
from model_optimizer.spec import Notify

ENDED = Ended.model_validate(
    {
        "name": "chat",
        "verdict": "ACCEPT",
        "headline": "half the size, twice as fast",
        "dimensions": {"accuracy": "ACCEPT", "speed": "ACCEPT"},
        "decision": "waiting",
        "level": "none",
        "bundle": "/srv/bundles/chat-v3",
        "report": "/srv/bundles/chat-v3/metrics/report.html",
        "manifest_sha256": "ab" * 32,
        "signoff": {"next": "model-optimizer approve chat-v3 --key KEY", "way": "key"},
    }
)
WAITING = Notice("waiting", "run-1", "http://127.0.0.1:4200/flow-runs/flow-run/run-1", ENDED)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMTP_URL", "SMTP_FROM", "WEBHOOK_URL", "WEBHOOK_SECRET", "NOTIFY_EMAIL"):
        monkeypatch.setenv(f"MODEL_OPTIMIZER_{name}", "")


@pytest.fixture(autouse=True)
def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that the environment lacks is looked for on a Prefect server; here none is asked."""
    monkeypatch.setenv("MODEL_OPTIMIZER_SMTP_URL", "smtp://127.0.0.1:1")
    monkeypatch.setenv("MODEL_OPTIMIZER_WEBHOOK_SECRET", "s3cret")


def text_of(mail: EmailMessage) -> str:
    return str(mail.get_content())


def test_tell_mails_verdict_report_link_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    notify = Notify(email=("a@example.com", "b@example.com"), bundles_url="https://models.example.com/bundles/")
    with mail_server() as (box, address):
        monkeypatch.setenv("MODEL_OPTIMIZER_SMTP_URL", f"smtp://robot:p%40ss@{address}")
        monkeypatch.setenv("MODEL_OPTIMIZER_SMTP_FROM", "robot@example.com")
        assert tell(WAITING, [notify]) == ()
    (mail,) = box.mails
    assert box.recipients == [["a@example.com", "b@example.com"]] and box.logins == [(b"robot", b"p@ss")]
    assert (mail["Subject"], mail["From"]) == ("[model-optimizer] chat waits for a sign-off", "robot@example.com")
    lines = text_of(mail).splitlines()
    assert "verdict  ACCEPT (accuracy ACCEPT, speed ACCEPT)" in lines
    assert "report   https://models.example.com/bundles/chat-v3/metrics/report.html" in lines
    assert "sign off model-optimizer approve chat-v3 --key KEY" in lines
    assert f"run      {WAITING.ui_url}" in lines


def test_tell_signs_the_body_of_a_webhook() -> None:
    with webhook() as hook:
        assert tell(WAITING, [Notify(webhook=hook.url)]) == ()
    (call,) = hook.calls
    assert call.headers[EVENT] == "waiting"
    assert call.headers[SIGNATURE] == f"sha256={signature('s3cret', call.headers[TIMESTAMP], call.body)}"
    document = call.document()
    assert (document["event"], document["run"], document["verdict"], document["decision"]) == (
        "waiting",
        "run-1",
        "ACCEPT",
        "waiting",
    )
    assert document["report_link"] == ENDED.report and document["manifest_sha256"] == "ab" * 32


def test_signature_is_hmac_sha256_over_time_and_body() -> None:
    # Source: printf '1700000000.{"a":1}' | openssl dgst -sha256 -hmac Jefe
    expected = "fa5f6481efc59da48b19c9dc10196c9953e5651f8304b3a318b6b87d70272e0a"
    assert signature("Jefe", "1700000000", b'{"a":1}') == expected
    assert signature("Jefe", "1700000001", b'{"a":1}') != expected


def test_tell_tells_everybody_once_and_only_what_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as hook, webhook() as other:
        monkeypatch.setenv("MODEL_OPTIMIZER_WEBHOOK_URL", hook.url)
        assert tell(WAITING, [Notify(webhook=hook.url), Notify(webhook=other.url, on=("failed",))]) == ()
    assert (len(hook.calls), len(other.calls)) == (1, 0)


@pytest.mark.parametrize("status", [302, 404, 500])
def test_tell_says_in_one_line_when_a_webhook_refuses(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with webhook(status) as hook, caplog.at_level(logging.WARNING):
        (complaint,) = tell(WAITING, [Notify(webhook=hook.url)])
    assert complaint.startswith(f"the webhook at {hook.url.split('/')[2]} could not be told: HTTPError: HTTP Error {status}")
    assert caplog.messages == [complaint] and len(hook.calls) == 1 and "\n" not in complaint


def test_tell_goes_on_when_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with webhook() as hook, caplog.at_level(logging.WARNING):
        complaints = tell(WAITING, [Notify(email=("a@example.com",), webhook="http://127.0.0.1:1/x"), Notify(webhook=hook.url)])
    assert len(complaints) == 2 == len(caplog.messages) and len(hook.calls) == 1
    assert complaints[0].startswith("a@example.com could not be told by e-mail: ConnectionRefusedError")
    assert complaints[1].startswith("the webhook at 127.0.0.1:1 could not be told: URLError")


def test_tell_says_which_variable_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_OPTIMIZER_NOTIFY_EMAIL", "nobody")
    assert tell(WAITING, []) == ("MODEL_OPTIMIZER_NOTIFY_EMAIL is malformed; nobody that it names was told",)


def test_send_mail_keeps_a_password_off_a_network_without_tls() -> None:
    with mail_server("127.0.0.2") as (box, address), pytest.raises(ValueError, match=r"127\.0\.0\.2 offers no TLS"):
        send_mail(f"smtp://robot:pass@{address}", Mail(("a@example.com",), "s", "t"))
    assert box.logins == [] and box.mails == []


@pytest.mark.parametrize("server", ["mail.example.com", "http://mail.example.com", "smtp://"])
def test_send_mail_refuses_an_address_that_is_no_mail_server(server: str) -> None:
    with pytest.raises(ValueError, match="the SMTP server must be smtp://"):
        send_mail(server, Mail(("a@example.com",), "s", "t"))


@pytest.mark.parametrize(
    ("verdict", "decision", "event"),
    [
        ("ACCEPT", "signed-off", "accepted"),
        ("ACCEPT", None, "accepted"),
        ("ACCEPT", "refused", "rejected"),  # by a reviewer
        ("INCONCLUSIVE", "signed-off", "accepted"),  # by a waiver
        ("INCONCLUSIVE", "refused", "inconclusive"),
        ("REJECT", "refused", "rejected"),
        ("REJECT", "waiting", "waiting"),
    ],
)
def test_event_of_puts_the_reviewer_above_the_gates(verdict: str, decision: str | None, event: str) -> None:
    assert event_of(Ended(name="chat", verdict=verdict, decision=decision)) == event


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("email", ["a@example.com\nBcc: b@example.com"]),
        ("email", ["no address"]),
        ("webhook", "ftp://example.com/x"),
        ("webhook", "https://user:pass@example.com/x"),
        ("on", ["sometimes"]),
    ],
)
def test_notify_refuses_what_is_no_address_and_any_credential(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Notify.model_validate({field: value})
