"""Whether an answer to a request for sign-off keeps the request's terms: asked before it is signed and whenever it is read."""

import unicodedata
from datetime import datetime

from model_optimizer.artifacts.release import Approver, SignOff, Terms

WAY_WORDS = {"key": "a key (approve --key)", "form": "Prefect's form", "github": "a GitHub environment"}


def breach(answer: SignOff, holder: Approver | None, *, by_release_key: bool) -> str | None:
    """Return which term of its request an answer breaks, or None.

    `holder` is the approver whose key signed it, if one did.
    """
    request = answer.request
    assert request is not None, "only what answers a request is held to its terms"
    terms = request.terms
    if terms is None or request.decision != "waiting":
        return "what it answers is no request"
    if _facts(answer) != _facts(request):
        return "it is about other files than the request"
    if answer.decision not in ("signed-off", "refused"):
        return f"{answer.decision} is no answer; allowed: signed-off, refused"
    if answer.decision == "signed-off" and (answer.gates, answer.verdict) != (request.gates, request.verdict):
        return "gates or verdict are not those of the request"
    if answer.decision == "signed-off" and answer.level != terms.level and not by_release_key:
        return f"the request gives level {terms.level}, not {answer.level}"
    late = datetime.fromisoformat(answer.signed_at) > datetime.fromisoformat(terms.until)
    if answer.method == "automatic":
        return _policy_breach(answer, terms, late=late, by_release_key=by_release_key)
    if late and answer.decision == "signed-off":
        return f"the time to sign off ended at {terms.until[:16]} UTC; release a new version (`run --from package`)"
    fault = _way_breach(answer, terms, holder, by_release_key=by_release_key)
    return fault or _self_review(answer, terms, by_release_key=by_release_key)


def normal_name(name: str) -> str:
    """Return a name as it is compared."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def waiting_line(record: SignOff) -> str:
    """Return in one line how a bundle that waits can be signed off."""
    terms = record.terms
    if terms is None:
        return f"{record.bundle} waits for its sign-off; run the profile again"
    ways = " or ".join(WAY_WORDS[way] for way in terms.ways)
    who = f" of {', '.join(approver.name for approver in terms.approvers)}" if terms.approvers else ""
    return f"{record.bundle} waits for sign-off until {terms.until[:10]} by {ways}{who}; {next_step(record)}"


def next_step(record: SignOff) -> str:
    """Return what signs a waiting bundle off: a command, with the waivers that gates need, or the form."""
    ways = record.terms.ways if record.terms else ()
    if "key" not in ways and "github" not in ways:
        return "answer the form of its Prefect run (a run of a deployment asks; model-optimizer run does not)"
    method = "" if "key" in ways else " --method github"
    waivers = "".join(f" --waive {gate}=REASON" for gate in dict.fromkeys(record.unaccepted))
    return f"model-optimizer approve {record.bundle} --key KEY{method} --report-sha256 {record.report_sha256[:16]}{waivers}"


def _facts(record: SignOff) -> tuple[str, ...]:
    return (record.bundle, record.bundle_manifest_sha256, record.signature_sha256, record.report_sha256)


def _policy_breach(answer: SignOff, terms: Terms, *, late: bool, by_release_key: bool) -> str | None:
    """Return why the policy may not answer: it does where approval is automatic, and refuses what nobody answered in time."""
    if not by_release_key:
        return "the policy's answer is signed with the release key"
    if terms.approval == "automatic" or (answer.decision == "refused" and late):
        return None
    return "a person must answer, for approval is manual"


def _way_breach(answer: SignOff, terms: Terms, holder: Approver | None, *, by_release_key: bool) -> str | None:
    """Return why this way, with this key, is none of the request's."""
    way = answer.method
    if way not in terms.ways:
        open_ways = " or ".join(WAY_WORDS[it] for it in terms.ways) or "nobody: approval is automatic"
        return f"{way} is not among the ways that release.ways opens ({open_ways})"
    if not answer.reviewer.strip():
        return "no reviewer is named"
    own = by_release_key and not terms.prevent_self_review and not terms.approvers
    if way == "key":
        if holder is None and not own:
            known = ", ".join(approver.name for approver in terms.approvers) or "nobody"
            return f"the key belongs to none of the approvers ({known})"
        if holder is not None and normal_name(holder.name) != normal_name(answer.reviewer):
            return f"the key belongs to {holder.name}, not to {answer.reviewer}"
        return None
    if by_release_key or (way == "github" and holder is not None):
        return None
    return f"an answer by {way} is signed with the release key" + (" or an approver's" if way == "github" else "")


def _self_review(answer: SignOff, terms: Terms, *, by_release_key: bool) -> str | None:
    if not terms.prevent_self_review or answer.decision != "signed-off":
        return None
    if answer.method == "key" and by_release_key:
        return "the key is the one that the release was signed with; somebody else must review it (release.prevent_self_review)"
    if normal_name(answer.reviewer) not in {normal_name(author) for author in terms.authors}:
        return None
    who = f"{answer.reviewer} made the source commit or started the run"
    return f"{who}; somebody else must review it (release.prevent_self_review)"
