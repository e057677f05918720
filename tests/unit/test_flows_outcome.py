"""How a run ends: the gates' verdict, a person's word above it, and what waits never reads as signed off."""

import io
from pathlib import Path

import pytest
from reporting_fixtures import make_report
from rich.console import Console

from flows.outcome import Outcome, standing
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Release, SignOff, Terms, Waiver
from model_optimizer.errors import GateFailed, Inconclusive

TERMS = Terms(approval="manual", ways=("key",), level="provisional", until="2030-01-01T00:00:00+00:00")
DIGESTS = {
    "bundle_manifest_sha256": "a" * 64,
    "signature_sha256": "b" * 64,
    "report_sha256": "c" * 64,
    "optimizer_hash": "d" * 64,
}


def outcome(verdict: Verdict, decision: str, **fields: object) -> Outcome:
    gates = (
        {"name": "speed_ratio", "dimension": "speed", "unit": "ratio", "value": 1.0, "limit": 1.0, "verdict": verdict.value},
    )
    stated = {"bundle": "chat-v1", "gates": gates, "verdict": verdict, "decision": decision, "level": "none", "reviewer": "ann"}
    stated |= {**DIGESTS, "identity": "claimed", "signed_at": "2029-12-01T00:00:00+00:00", "terms": TERMS, **fields}
    release = Release(
        bundle="chat-v1",
        baseline_bundle="chat-v0",
        version=1,
        manifest_sha256="a" * 64,
        signoff_sha256="e" * 64,
        decision="waiting",
        level="none",
        public_key_sha256="f" * 64,
    )
    return Outcome(Path("/bundles/chat-v1"), release, make_report(verdict), {}, SignOff.model_validate(stated))


@pytest.mark.parametrize(
    ("verdict", "decision"),
    [
        (Verdict.ACCEPT, "signed-off"),
        (Verdict.ACCEPT, "waiting"),
        (Verdict.REJECT, "signed-off"),
        (Verdict.INCONCLUSIVE, "signed-off"),
    ],
)
def test_conclude_returns_when_gates_or_a_person_accept(verdict: Verdict, decision: str) -> None:
    outcome(verdict, decision).conclude()


@pytest.mark.parametrize(
    ("verdict", "decision", "method", "error", "words"),
    [
        (Verdict.REJECT, "waiting", None, GateFailed, "model-optimizer approve chat-v1 --key KEY .* --waive speed_ratio=REASON"),
        (Verdict.INCONCLUSIVE, "waiting", None, Inconclusive, "waits for sign-off until 2030-01-01"),
        (Verdict.REJECT, "refused", "automatic", GateFailed, "^chat: REJECT"),
        (Verdict.INCONCLUSIVE, "refused", "automatic", Inconclusive, "^chat: INCONCLUSIVE"),
        (Verdict.ACCEPT, "refused", "form", GateFailed, "chat-v1 was refused by ann: too slow for us"),
        (Verdict.REJECT, "refused", "key", GateFailed, "chat-v1 was refused by ann: too slow for us"),
        (Verdict.ACCEPT, "refused", "automatic", GateFailed, "chat-v1 is refused: too slow for us"),
    ],
)
def test_conclude_raises_with_the_reason(
    verdict: Verdict, decision: str, method: str | None, error: type[GateFailed], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        outcome(verdict, decision, method=method, comment="too slow for us").conclude()
    assert type(caught.value) is error


def test_document_says_what_a_bundle_that_waits_needs() -> None:
    document = outcome(Verdict.REJECT, "waiting").document()
    signoff = document["signoff"]
    assert isinstance(signoff, dict)
    assert (document["decision"], signoff["needs_waivers"]) == ("waiting", ["speed_ratio"])
    assert signoff["next"] == f"model-optimizer approve chat-v1 --key KEY --report-sha256 {'c' * 16} --waive speed_ratio=REASON"
    done = outcome(Verdict.REJECT, "signed-off", waivers=(Waiver(gate="speed_ratio", reason="demo"),)).document()["signoff"]
    assert isinstance(done, dict)
    assert (done["waivers"], done["needs_waivers"], done["next"]) == ({"speed_ratio": "demo"}, [], None)


def test_draw_never_calls_signed_off_what_waits() -> None:
    page = io.StringIO()
    outcome(Verdict.ACCEPT, "waiting").draw(Console(file=page, width=160))
    assert "NOT signed off: waits for a reviewer" in page.getvalue() and "signed-off" not in page.getvalue()
    signed = outcome(Verdict.REJECT, "signed-off", level="provisional", method="key", waivers=(Waiver(gate="a", reason="b"),))
    assert standing(signed.record) == "signed-off, provisional by ann; waived: a"
