"""Result of package: a signed bundle beside the baseline bundle, and its sign-off record."""

from typing import Literal

from pydantic import Field

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.measure import Verdict


class SampleOutput(Frozen):
    """A prompt with the greedy outputs that a healthy deployment must repeat."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    """Greedy output of the chosen engine."""
    baseline_tokens: tuple[int, ...]
    baseline_text: str
    """Greedy output of the baseline engine, for its own bundle."""


Way = Literal["key", "form", "github"]
"""How a person may answer: with a key, in Prefect's form, or in a GitHub environment."""
Level = Literal["provisional", "final", "none"]


class Approver(Frozen):
    """Who may sign off with a key of his own."""

    name: str
    public_key: str
    """EC P-256, the base64 of its DER form on one line."""


class Waiver(Frozen):
    """Why a gate that did not accept does not stand in the way."""

    gate: str
    reason: str


class Terms(Frozen):
    """Who may answer a request for sign-off, how and until when; the release key signs them with the request."""

    approval: Literal["automatic", "manual"]
    ways: tuple[Way, ...] = ()
    approvers: tuple[Approver, ...] = ()
    prevent_self_review: bool = True
    authors: tuple[str, ...] = ()
    """Names, e-mail addresses and logins of who made the source commit and of who started the run."""
    level: Level
    """What an answer in favour gives."""
    until: str
    """UTC, ISO 8601."""


class SignOff(Frozen):
    """The sign-off record, canonical JSON beside the bundle, signed on its own.

    A bundle appears with the record `waiting`, which is a request; the record that answers it holds the request with the
    signature that it had.
    """

    bundle: str
    bundle_manifest_sha256: str
    signature_sha256: str
    """Digest of model.sig, which the manifest cannot list."""
    report_sha256: str
    """Digest of metrics/report.json."""
    optimizer_hash: str
    gates: tuple[dict[str, str | float | None], ...]
    verdict: Verdict | None
    """None for the baseline, which nothing was measured against."""
    decision: Literal["waiting", "signed-off", "refused", "baseline"]
    level: Level
    reviewer: str
    identity: str
    """How the reviewer's identity was established."""
    method: Literal["automatic", "key", "form", "github"] | None = None
    waivers: tuple[Waiver, ...] = ()
    comment: str = ""
    signed_at: str
    terms: Terms | None = Field(default=None, description="of a request")
    request: "SignOff | None" = Field(default=None, description="what a decision answers")
    request_signature: str = ""

    @property
    def unaccepted(self) -> tuple[str, ...]:
        """Return the gates that did not accept."""
        return tuple(str(gate["name"]) for gate in self.gates if gate["verdict"] != Verdict.ACCEPT.value)

    @property
    def unwaived(self) -> tuple[str, ...]:
        """Return the gates that did not accept and that no waiver with a reason names."""
        waived = {waiver.gate for waiver in self.waivers if waiver.reason.strip()}
        return tuple(gate for gate in self.unaccepted if gate not in waived)


class Release(StageArtifact):
    bundle: str
    """Name `<name>-v<N>`; it lies in the bundles folder, which `store gc` never touches."""
    baseline_bundle: str
    version: int
    manifest_sha256: str
    signoff_sha256: str
    decision: str
    level: str
    public_key_sha256: str
