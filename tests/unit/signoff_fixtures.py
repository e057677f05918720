"""A release that waits for its sign-off, the people around it, and the review that one of them gives."""

import shutil
from dataclasses import replace
from pathlib import Path

from release_fixtures import DOCUMENTS, make_inputs
from report_fixtures import samples
from reporting_fixtures import make_report

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import SignOff
from model_optimizer.protocols import Quiet
from model_optimizer.release.approvers import public_line
from model_optimizer.release.config import ReleaseConfig, SignerConfig
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.sign import SigningKey, ensure_key
from model_optimizer.release.signoff import Review, read_record
from model_optimizer.release.stage import package_release

AUTHORS = ("Bob Builder", "bob@example.com", "ci")
GATE = "everyday_facts_difference"
"""The gate that answers the verdict of the fixtures."""


def key_of(root: Path, name: str) -> SigningKey:
    """Return somebody's key; `key` is the release signer's."""
    return ensure_key(root / "keys" / f"{name}.pem")


def waiting_inputs(root: Path, checkpoint: Path, verdict: Verdict = Verdict.ACCEPT, **policy: object) -> PackageInputs:
    """Inputs of a release under a policy that waits; Alice and Bob are approvers, Bob is the commit's author."""
    inputs = make_inputs(root, checkpoint, verdict)
    approvers = {name: public_line(key_of(root, name)) for name in ("alice@example.com", "bob@example.com")}
    stated = {"approval": "manual", "approvers": approvers, "signer": SignerConfig(key=root / "keys" / "key.pem"), **policy}
    return inputs.model_copy(update={"authors": AUTHORS, "config": ReleaseConfig.model_validate(stated)})


def publish_waiting(inputs: PackageInputs, root: Path, verdict: Verdict = Verdict.ACCEPT) -> Path:
    """Package once more and return the bundle."""
    documents = {**DOCUMENTS, "report.json": make_report(verdict).model_dump_json().encode()}
    shutil.rmtree(root / "work", ignore_errors=True)
    (root / "work").mkdir()
    made = package_release(
        inputs, root / "work", bundles=root / "bundles", documents=documents, samples=samples(), progress=Quiet()
    )
    return root / "bundles" / made.bundle


def request_of(bundle: Path, root: Path) -> SignOff:
    return read_record(bundle, key_of(root, "key").public)


def review(request: SignOff, name: str = "alice@example.com", **changes: object) -> Review:
    """Return Alice's word in favour, with changes."""
    given = Review(
        decision="signed-off",
        reviewer=name,
        method="key",
        identity="holder of a test key",
        report_sha256=request.report_sha256,
        manifest_sha256=request.bundle_manifest_sha256,
    )
    return replace(given, **changes)  # type: ignore[arg-type]
