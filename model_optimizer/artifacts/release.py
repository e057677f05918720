"""Result of package: a signed bundle beside the baseline bundle, and its sign-off record."""

from typing import Literal

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


class SignOff(Frozen):
    """The sign-off record, canonical JSON beside the bundle, signed on its own."""

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
    decision: Literal["signed-off", "refused", "baseline"]
    level: Literal["provisional", "final", "none"]
    reviewer: str
    identity: str
    """How the reviewer's identity was established."""
    signed_at: str


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
