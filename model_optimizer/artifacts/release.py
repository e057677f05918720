"""Result of package: a signed bundle beside the baseline bundle, and its sign-off record."""

from typing import Literal

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.measure import Verdict


class SignOff(Frozen):
    """The sign-off record, canonical JSON beside the bundle, signed on its own."""

    bundle: str
    bundle_manifest_sha256: str
    report_sha256: str
    optimizer_hash: str
    gates: tuple[dict[str, str | float | None], ...]
    verdict: Verdict
    decision: Literal["signed-off", "refused"]
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
