"""The sign-off record beside a bundle: what was decided, on which digests, by whom.

A bundle appears with a record that says `waiting`. That is a request, signed with the release key: it names the digests, the
gates and the terms (who may answer, how, until when). `record` writes the answer, whatever way it came.

Trust starts at the public key that a deployer gives, the release signer's:

    signer's key -> bundle (model.sig) and request (digest of the manifest, terms with the approvers' keys)
                 -> approver's key -> answer

so that a key counts only if the signer's key vouches for it, and `read_record` holds every answer to the terms again.

Record and signature are two files. The signature file holds the record's signature on one line; while a record is replaced
it holds the new one's and the old one's, so that a call that is killed between the files leaves a pair that verifies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import filelock
from pydantic import ValidationError

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Approver, Level, SignOff, Waiver
from model_optimizer.artifacts.report import StageResults
from model_optimizer.disk import explained
from model_optimizer.errors import ConfigError, GateFailed, IntegrityError
from model_optimizer.release.approvers import find_approver, one_line, public_line, verify_with
from model_optimizer.release.manifest import MANIFEST, REPORT, SIGNATURE
from model_optimizer.release.sign import SigningKey, sign_bytes, verify_bytes
from model_optimizer.release.terms import breach, normal_name
from model_optimizer.store import canonical_json, write_atomically

Decided = Literal["signed-off", "refused"]
MAX_RECORD_BYTES = 4 << 20
_MAX_READS = 5


@dataclass(frozen=True, slots=True)
class Review:
    """A decision, and the digests that the reviewer saw."""

    decision: Decided
    reviewer: str
    method: Literal["automatic", "key", "form", "github"]
    identity: str
    """How it is known who the reviewer is."""
    report_sha256: str
    manifest_sha256: str
    waivers: dict[str, str] = field(default_factory=dict)
    """Gate -> why it does not stand in the way."""
    comment: str = ""


def record_path(bundle: Path) -> Path:
    """Return `<bundle>.signoff.json`, beside the bundle."""
    return bundle.with_name(f"{bundle.name}.signoff.json")


def record_signature_path(bundle: Path) -> Path:
    """Return `<bundle>.signoff.sig`, beside the bundle."""
    return bundle.with_name(f"{bundle.name}.signoff.sig")


def decide(verdict: Verdict, soak_s: float, required_soak_s: float) -> tuple[Decided, Level]:
    """Return what the gates alone decide: only ACCEPT is signed off, and finally only after the required soak."""
    if verdict is not Verdict.ACCEPT:
        return "refused", "none"
    return "signed-off", "final" if soak_s >= required_soak_s else "provisional"


def gate_rows(results: StageResults) -> tuple[dict[str, str | float | None], ...]:
    """Return name, dimension, unit, value, limit and verdict of every measure that gates.

    A dimension that did not accept although all its measures did is a row of its own.
    """
    rows: list[dict[str, str | float | None]] = [
        {
            "name": measure.name,
            "dimension": measure.dimension.value,
            "unit": measure.unit,
            "value": measure.value,
            "limit": measure.limit,
            "verdict": measure.verdict.value,
        }
        for measure in results.measures()
        if measure.verdict is not None
    ]
    for dimension, verdict in results.dimensions().items():
        explained_by = [row for row in rows if row["dimension"] == dimension.value and row["verdict"] != Verdict.ACCEPT.value]
        if verdict is not Verdict.ACCEPT and not explained_by:
            rows.append(_bare_row(dimension.value, dimension.value, verdict))
    if results.verdict() is not Verdict.ACCEPT and all(row["verdict"] == Verdict.ACCEPT.value for row in rows):
        rows.append(_bare_row("verification", "robustness", results.verdict()))
    return tuple(rows)


def record(bundle: Path, review: Review, key: SigningKey, public_key: Path) -> SignOff:
    """Answer the request for sign-off of a bundle, signed with `key`; an equal answer that stands is returned as it is.

    `public_key` is the release signer's. Of the bundle only manifest, signature and report are looked at.

    Raises:
        IntegrityError: they or the record do not verify, or are not what the reviewer saw.
        GateFailed: a gate did not accept, and no waiver with a reason names it.
        ConfigError: the reviewer, the way or the key is not what the request asks for, it is too late, or it was decided.
    """
    with explained(bundle.parent), filelock.FileLock(bundle.with_name(f".{bundle.name}.signoff.lock")):
        standing = check_request(bundle, public_key)
        _check_seen(standing, review)
        waivers = _waivers(standing, review)
        if standing.decision != "waiting":
            return _require_equal(standing, review, waivers)
        answer = standing.model_copy(
            update={
                "decision": review.decision,
                "level": standing.terms.level if standing.terms and review.decision == "signed-off" else "none",
                "reviewer": review.reviewer.strip(),
                "identity": review.identity,
                "method": review.method,
                "waivers": waivers,
                "comment": review.comment.strip(),
                "signed_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "terms": None,
                "request": standing,
                "request_signature": _signature_of(bundle, standing, public_key),
            }
        )
        holder = find_approver(standing.terms.approvers, key) if standing.terms else None
        if fault := breach(answer, holder, by_release_key=public_line(key) == _line_of(public_key)):
            raise ConfigError(f"{bundle.name} cannot be {_past(review.decision)}: {fault}")
        if review.decision == "signed-off" and answer.unwaived:
            gates = ", ".join(answer.unwaived)
            need = "a waiver with a reason for each of them (--waive GATE=REASON)"
            message = f"{bundle.name}: {gates} did not accept; signing it off needs {need}"
            raise GateFailed(message, bundle / "metrics" / "report.html")
        write_record(bundle, answer, key)
        return answer


def check_request(bundle: Path, public_key: Path) -> SignOff:
    """Return a bundle's record after holding manifest, signature and report to it.

    Raises:
        IntegrityError: one of them is missing or changed, or the record does not verify.
    """
    found = read_record(bundle, public_key)
    if found.bundle != bundle.name:
        raise IntegrityError(f"{record_path(bundle).name}: it was signed for {found.bundle}, not for {bundle.name}")
    expected = {MANIFEST: found.bundle_manifest_sha256, SIGNATURE: found.signature_sha256, REPORT: found.report_sha256}
    for name, sha256 in expected.items():
        path = bundle / name
        if path.is_symlink() or not path.is_file():
            raise IntegrityError(f"{bundle.name}/{name}: missing: the sign-off record names it")
        if (seen := file_sha256(path)) != sha256:
            raise IntegrityError(f"{bundle.name}/{name}: modified: sha256 {seen[:12]}, the sign-off record says {sha256[:12]}")
    return found


def write_record(bundle: Path, content: SignOff, key: SigningKey) -> str:
    """Write record and signature beside the (future) place of the bundle; return the record's sha256.

    Law: a call that is killed anywhere leaves a pair that verifies, the old one or the new one.
    """
    data = canonical_json(content)
    replace_record(bundle, data, sign_bytes(data, key))
    return file_sha256(record_path(bundle))


def replace_record(bundle: Path, content: bytes, signature: bytes) -> None:
    """Put a record and its signature in the place of those beside a bundle; killed anywhere, one of the two pairs verifies."""
    place, signatures = record_path(bundle), record_signature_path(bundle)
    if place.is_file() and signatures.is_file():
        write_atomically(signatures, b"\n".join((signature, signatures.read_bytes())))
        write_atomically(place, content)
        write_atomically(signatures, signature)
        return
    write_atomically(signatures, signature)
    write_atomically(place, content)


def read_record(bundle: Path, public_key: Path) -> SignOff:
    """Return the sign-off record of a bundle after checking its signature and the terms that it answers.

    Raises:
        IntegrityError: record or signature is missing, they do not fit each other or the key, or the signer's key does not
            vouch for who signed.
    """
    content, signatures = _read_pair(bundle)
    name = record_path(bundle).name
    by_release_key = any(verify_bytes(content, line, public_key) for line in signatures)
    bad = IntegrityError(
        f"{name}: bad signature: {record_signature_path(bundle).name} does not fit it under the key {public_key}, nor under "
        "that of an approver for whom this key vouches"
    )
    try:
        found = SignOff.model_validate_json(content)
    except ValidationError as error:
        if not by_release_key:
            raise bad from error
        raise IntegrityError(f"{name}: signed, but no sign-off record that this version reads") from error
    request = found.request
    if request is None:
        if not by_release_key:
            raise bad
        if found.decision == "signed-off" and found.unwaived:
            raise IntegrityError(f"{name}: signed off although {', '.join(found.unwaived)} did not accept")
        return found
    if not verify_bytes(canonical_json(request), found.request_signature.encode(), public_key):
        raise bad if not by_release_key else IntegrityError(f"{name}: the request that it answers was not made with {public_key}")
    holder = _holder(content, signatures, request)
    if not by_release_key and holder is None:
        raise bad
    if fault := breach(found, holder, by_release_key=by_release_key):
        raise IntegrityError(f"{name}: signed against the terms of its request: {fault}")
    if found.decision == "signed-off" and found.unwaived:
        raise IntegrityError(f"{name}: signed off although {', '.join(found.unwaived)} did not accept and no waiver names them")
    return found


def _holder(content: bytes, signatures: list[bytes], request: SignOff) -> Approver | None:
    """Return the approver of a request whose key signed the answer, or None."""
    approvers = request.terms.approvers if request.terms else ()
    return next((it for it in approvers if any(verify_with(content, line, it.public_key) for line in signatures)), None)


def _read_pair(bundle: Path) -> tuple[bytes, list[bytes]]:
    """Return record and signature lines that lay there together, also while another process replaces them."""
    place, signatures = record_path(bundle), record_signature_path(bundle)
    for path in (place, signatures):
        if not path.is_file():
            raise IntegrityError(f"{path.name}: missing: the bundle {bundle.name} has no complete sign-off record")
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise IntegrityError(f"{path.name}: modified: {path.stat().st_size} bytes, a record has at most {MAX_RECORD_BYTES}")
    for _ in range(_MAX_READS):
        content, lines = place.read_bytes(), signatures.read_bytes().split(b"\n")
        if place.read_bytes() == content:
            return content, lines
    raise IntegrityError(f"{place.name}: it changes while it is read; try again")


def _signature_of(bundle: Path, request: SignOff, public_key: Path) -> str:
    """Return the signature line of the request that lies beside a bundle; the caller verified it and holds the lock."""
    content, signatures = _read_pair(bundle)
    line = next((it for it in signatures if verify_bytes(content, it, public_key)), None)
    assert line is not None and content == canonical_json(request), "the request was verified under the lock"
    return line.decode()


def _line_of(public_key: Path) -> str:
    return one_line(public_key.read_text(encoding="utf-8"))


def _check_seen(standing: SignOff, review: Review) -> None:
    """Refuse an answer that was given on other digests than the bundle's."""
    report = ("report", review.report_sha256, standing.report_sha256)
    manifest = ("manifest", review.manifest_sha256, standing.bundle_manifest_sha256)
    for what, seen, held in (report, manifest):
        if seen != held:
            shown = f"the reviewer saw the {what} {seen[:16] or '(none)'}, the bundle's is {held[:16]}"
            raise IntegrityError(f"{standing.bundle}: {shown}; look at this one and decide again")


def _waivers(standing: SignOff, review: Review) -> tuple[Waiver, ...]:
    """Return the waivers of an answer; a refusal has none."""
    if review.decision == "refused":
        return ()
    needed = standing.unaccepted
    for gate, reason in review.waivers.items():
        if gate not in needed:
            raise ConfigError(f"{gate!r} needs no waiver; gates of {standing.bundle} that do: {', '.join(needed) or 'none'}")
        if not reason.strip():
            raise ConfigError(f"the waiver of {gate} has no reason; say why this gate does not stand in the way: {gate}=REASON")
    waived = [gate for gate in dict.fromkeys(needed) if gate in review.waivers]
    return tuple(Waiver(gate=gate, reason=review.waivers[gate].strip()) for gate in waived)


def _require_equal(standing: SignOff, review: Review, waivers: tuple[Waiver, ...]) -> SignOff:
    """Return a decision that stands if the review says the same."""
    same = (standing.decision, standing.method, standing.waivers) == (review.decision, review.method, waivers)
    if same and normal_name(standing.reviewer) == normal_name(review.reviewer):
        return standing
    if standing.decision == "baseline":
        raise ConfigError(f"{standing.bundle} is the unquantized baseline, which needs no sign-off; name a release")
    raise ConfigError(
        f"{standing.bundle} was {_past(standing.decision)} by {standing.reviewer} on {standing.signed_at[:16]} and stays so; "
        "release a new version to decide anew"
    )


def _past(decision: str) -> str:
    return "signed off" if decision == "signed-off" else decision


def _bare_row(name: str, dimension: str, verdict: Verdict) -> dict[str, str | float | None]:
    return {"name": name, "dimension": dimension, "unit": "count", "value": None, "limit": None, "verdict": verdict.value}


def parse_waivers(stated: Sequence[str]) -> dict[str, str]:
    """Read `GATE=REASON` pairs.

    Raises:
        ConfigError: one has no gate or no reason, or a gate is named twice.
    """
    waivers: dict[str, str] = {}
    for text in stated:
        gate, _, reason = (part.strip() for part in text.partition("="))
        if not gate or not reason:
            raise ConfigError(f"a waiver is GATE=REASON; seen: {text!r}")
        if gate in waivers:
            raise ConfigError(f"{gate} is waived twice; give one reason")
        waivers[gate] = reason
    return waivers
