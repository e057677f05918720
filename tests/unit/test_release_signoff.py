"""Sign-off by people: what is refused, whose key counts, and that a kill leaves a record that verifies."""

import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deploy_fixtures import die_at, fit
from release_fixtures import make_inputs, package
from signoff_fixtures import AUTHORS, GATE, key_of, publish_waiting, request_of, review, waiting_inputs

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Approver, Release, SignOff, Waiver
from model_optimizer.errors import ConfigError, GateFailed, IntegrityError
from model_optimizer.release import stage
from model_optimizer.release.approvers import fingerprint, public_line
from model_optimizer.release.bundle import previous_release
from model_optimizer.release.config import ReleaseConfig
from model_optimizer.release.deploy import Checks, deploy
from model_optimizer.release.deployment_root import Reason
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.release.sign import SigningKey, sign_bytes
from model_optimizer.release.signoff import (
    check_request,
    parse_waivers,
    read_record,
    record,
    record_path,
    record_signature_path,
    write_record,
)
from model_optimizer.release.stage import answer_by_policy, find_release_fault
from model_optimizer.release.terms import next_step, waiting_line
from model_optimizer.release.verify import verify_bundle
from model_optimizer.store import canonical_json


class Place:
    """A bundle that waits, and the keys around it."""

    def __init__(self, root: Path, bundle: Path):
        self.root, self.bundle = root, bundle
        self.public = self.key("key").public

    def key(self, name: str) -> SigningKey:
        return key_of(self.root, name)

    @property
    def request(self) -> SignOff:
        return request_of(self.bundle, self.root)

    def answer(self, name: str = "alice@example.com", holder: str | None = None, **changes: object) -> SignOff:
        return record(self.bundle, review(self.request, name, **changes), self.key(holder or name), self.public)


def _published(folder: Path, checkpoint: Path, verdict: Verdict) -> Path:
    publish_waiting(waiting_inputs(folder, checkpoint, verdict), folder, verdict)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[Verdict, Path]:
    """Three folders with bundles/ and keys/; tests copy them before they touch anything."""
    return {verdict: _published(tmp_path_factory.mktemp("waiting"), tiny_llama, verdict) for verdict in Verdict}


def _copy(root: Path, tmp_path: Path) -> Place:
    for name in ("bundles", "keys"):
        shutil.copytree(root / name, tmp_path / name)
    return Place(tmp_path, tmp_path / "bundles" / "chat-v1")


@pytest.fixture
def place(made: dict[Verdict, Path], tmp_path: Path) -> Place:
    return _copy(made[Verdict.ACCEPT], tmp_path)


@pytest.fixture
def rejected(made: dict[Verdict, Path], tmp_path: Path) -> Place:
    return _copy(made[Verdict.REJECT], tmp_path)


def test_package_release_waits_under_a_manual_policy(place: Place) -> None:
    request = place.request
    assert (request.decision, request.level, request.reviewer, request.method) == ("waiting", "none", "", None)
    terms = request.terms
    assert terms is not None
    assert (terms.approval, terms.ways, terms.level, terms.authors) == ("manual", ("key",), "provisional", AUTHORS)
    assert [approver.name for approver in terms.approvers] == ["alice@example.com", "bob@example.com"]
    days = (datetime.fromisoformat(terms.until) - datetime.fromisoformat(request.signed_at)) / timedelta(days=1)
    assert days == 30
    facts = verify_bundle(place.bundle, public_key=place.public)
    assert facts.record == request
    assert previous_release(place.bundle.parent, "chat").name == "chat-v0"


def test_waiting_line_names_date_people_and_command(rejected: Place) -> None:
    request = rejected.request
    assert request.terms is not None
    assert waiting_line(request) == (
        f"chat-v1 waits for sign-off until {request.terms.until[:10]} by a key (approve --key) of alice@example.com, "
        f"bob@example.com; model-optimizer approve chat-v1 --key KEY --report-sha256 {request.report_sha256[:16]} "
        f"--waive {GATE}=REASON"
    )


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (("form",), "answer the form of its Prefect run"),
        (("form", "github"), "approve chat-v1 --key KEY --method github --report-"),
    ],
)
def test_next_step_fits_the_ways(place: Place, ways: tuple[str, ...], words: str) -> None:
    request = place.request
    assert request.terms is not None
    assert words in next_step(request.model_copy(update={"terms": request.terms.model_copy(update={"ways": ways})}))


def test_record_signs_off_with_an_approvers_key_that_the_signers_key_vouches_for(place: Place) -> None:
    request = place.request
    done = place.answer(comment=" looks good ")
    assert (done.decision, done.level, done.method, done.comment) == ("signed-off", "provisional", "key", "looks good")
    assert done.request == request and done.terms is None
    assert read_record(place.bundle, place.public) == done
    assert verify_bundle(place.bundle, public_key=place.public).record == done
    assert record_signature_path(place.bundle).read_bytes().count(b"\n") == 0
    assert previous_release(place.bundle.parent, "chat") == place.bundle


def test_record_writes_nothing_again_when_the_same_is_decided_twice(place: Place) -> None:
    done = place.answer()
    before = [path(place.bundle).read_bytes() for path in (record_path, record_signature_path)]
    assert place.answer(name="Alice@Example.com", holder="alice@example.com") == done
    assert [path(place.bundle).read_bytes() for path in (record_path, record_signature_path)] == before


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"report_sha256": "0" * 64}, IntegrityError, "saw the report 0000000000000000, the bundle's is"),
        ({"manifest_sha256": "1" * 64}, IntegrityError, "saw the manifest 1111111111111111"),
        ({"name": "bob@example.com"}, ConfigError, "bob@example.com made the source commit or started the run"),
        ({"name": "carol", "holder": "alice@example.com"}, ConfigError, "the key belongs to alice@example.com, not to carol"),
        ({"name": "mallory"}, ConfigError, r"none of the approvers \(alice@example.com, bob@example.com\)"),
        ({"name": "alice@example.com", "holder": "mallory"}, ConfigError, "none of the approvers"),
        ({"name": "the signer", "holder": "key"}, ConfigError, "none of the approvers"),
        ({"method": "form", "holder": "key"}, ConfigError, r"form is not among the ways .*\(a key"),
        ({"method": "automatic", "holder": "key"}, ConfigError, "a person must answer"),
        ({"waivers": {"p95_latency": "slow disk"}}, ConfigError, "'p95_latency' needs no waiver; .* none"),
    ],
)
def test_record_refuses(place: Place, changes: dict[str, object], error: type[Exception], words: str) -> None:
    request = place.request
    with pytest.raises(error, match=words):
        place.answer(**changes)  # type: ignore[arg-type]
    assert place.request == request


def test_record_refuses_a_bundle_that_was_changed(place: Place) -> None:
    request = place.request
    (place.bundle / MANIFEST).write_bytes((place.bundle / MANIFEST).read_bytes() + b" ")
    with pytest.raises(IntegrityError, match=r"manifest\.json: modified"):
        place.answer()
    (place.bundle / MANIFEST).unlink()
    with pytest.raises(IntegrityError, match=r"manifest\.json: missing"):
        check_request(place.bundle, place.public)
    assert place.request == request


@pytest.mark.parametrize("verdict", [Verdict.REJECT, Verdict.INCONCLUSIVE])
def test_record_needs_a_reasoned_waiver_for_exactly_the_gate_that_did_not_accept(
    made: dict[Verdict, Path], tmp_path: Path, verdict: Verdict
) -> None:
    place = _copy(made[verdict], tmp_path)
    assert place.request.unaccepted == (GATE,)
    with pytest.raises(GateFailed, match=GATE) as caught:
        place.answer()
    assert (caught.value.exit_code, caught.value.report) == (3, place.bundle / "metrics" / "report.html")
    with pytest.raises(ConfigError, match="'p95_latency' needs no waiver"):
        place.answer(waivers={GATE: "known", "p95_latency": "known"})
    with pytest.raises(ConfigError, match="has no reason"):
        place.answer(waivers={GATE: "  "})
    done = place.answer(waivers={GATE: "facts are not what this assistant is for"})
    assert done.waivers == (Waiver(gate=GATE, reason="facts are not what this assistant is for"),)
    assert (done.verdict, done.unaccepted, done.unwaived) == (verdict, (GATE,), ())
    assert verify_bundle(place.bundle, public_key=place.public).record == done


def test_record_keeps_a_refusal_and_lets_nobody_turn_it(rejected: Place) -> None:
    done = rejected.answer(decision="refused", comment="too lossy", waivers={GATE: "unread"})
    assert (done.decision, done.level, done.comment, done.waivers) == ("refused", "none", "too lossy", ())
    with pytest.raises(ConfigError, match=r"was refused by alice@example.com on .* stays so"):
        rejected.answer(waivers={GATE: "after all"})
    assert rejected.request == done


def test_record_refuses_the_baseline(place: Place) -> None:
    baseline = place.bundle.with_name("chat-v0")
    request = read_record(baseline, place.public)
    with pytest.raises(ConfigError, match="needs no sign-off"):
        record(baseline, review(request), place.key("alice@example.com"), place.public)


def test_author_may_refuse_his_own_work(place: Place) -> None:
    assert place.answer("bob@example.com", decision="refused").decision == "refused"


def _policy(place: Place, **changes: object) -> Place:
    """Make the request anew with other terms, signed by the release key."""
    request = place.request
    assert request.terms is not None
    write_record(place.bundle, request.model_copy(update={"terms": request.terms.model_copy(update=changes)}), place.key("key"))
    return place


def test_record_refuses_when_time_is_up_and_the_policy_then_refuses(place: Place, tmp_path: Path, tiny_llama: Path) -> None:
    _policy(place, until=(datetime.now(UTC) - timedelta(minutes=5)).isoformat(timespec="seconds"))
    with pytest.raises(ConfigError, match="time to sign off ended"):
        place.answer()
    inputs = waiting_inputs(tmp_path / "again", tiny_llama)
    done = answer_by_policy(place.bundle, inputs, place.key("key"))
    assert (done.decision, done.method, done.reviewer) == ("refused", "automatic", "policy: wait_days")
    assert done.comment.startswith("nobody signed it off until ")
    assert read_record(place.bundle, place.public) == done


def test_form_is_signed_with_the_release_key_and_only_claims_a_name(place: Place) -> None:
    _policy(place, ways=("form",), approvers=())
    with pytest.raises(ConfigError, match="signed with the release key"):
        place.answer("carol", method="form")
    with pytest.raises(ConfigError, match="somebody else must review"):
        place.answer(" bob  BUILDER ", method="form", holder="key")
    assert place.answer("carol", method="form", holder="key", identity="claimed").identity == "claimed"


def test_github_takes_the_release_key_or_a_listed_one(place: Place) -> None:
    _policy(place, ways=("github",))
    with pytest.raises(ConfigError, match="release key or an approver's"):
        place.answer("carol", method="github", holder="mallory")
    done = place.answer("carol", method="github", holder="alice@example.com")
    assert read_record(place.bundle, place.public) == done


def test_release_key_reviews_only_where_self_review_is_allowed_and_nobody_is_named(place: Place) -> None:
    _policy(place, approvers=())
    with pytest.raises(ConfigError, match=r"none of the approvers \(nobody\)"):
        place.answer("me", holder="key")
    _policy(place, prevent_self_review=False)
    assert place.answer("me", holder="key").decision == "signed-off"


def _write(place: Place, content: SignOff, name: str) -> None:
    data = canonical_json(content)
    record_path(place.bundle).write_bytes(data)
    record_signature_path(place.bundle).write_bytes(sign_bytes(data, place.key(name)))


def _signed_by(place: Place, name: str, request: SignOff) -> str:
    return sign_bytes(canonical_json(request), place.key(name)).decode()


def test_read_record_refuses_a_rogue_key_that_vouches_for_itself(place: Place) -> None:
    """The whole chain made anew by somebody who is in nobody's list: request, terms, answer."""
    good = place.answer()
    assert good.request is not None and good.request.terms is not None
    rogue = Approver(name="mallory", public_key=public_line(place.key("mallory")))
    terms = good.request.terms.model_copy(update={"approvers": (*good.request.terms.approvers, rogue)})
    request = good.request.model_copy(update={"terms": terms})
    forged = good.model_copy(update={"reviewer": "mallory", "request": request})
    for signature in (_signed_by(place, "mallory", request), good.request_signature):
        _write(place, forged.model_copy(update={"request_signature": signature}), "mallory")
        with pytest.raises(IntegrityError, match=r"signoff\.json: bad signature"):
            verify_bundle(place.bundle, public_key=place.public)
    _write(place, good, "mallory")  # the true chain with a false last link
    with pytest.raises(IntegrityError, match="bad signature"):
        read_record(place.bundle, place.public)
    _write(place, good.model_copy(update={"request": None, "request_signature": ""}), "alice@example.com")
    with pytest.raises(IntegrityError, match="bad signature"):
        read_record(place.bundle, place.public)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"waivers": ()}, f"signed off although {GATE} did not accept"),
        ({"waivers": (Waiver(gate=GATE, reason=" "),)}, "did not accept and no waiver"),
        ({"gates": ()}, "gates or verdict are not those of the request"),
        ({"verdict": Verdict.ACCEPT}, "gates or verdict"),
        ({"level": "final"}, "level provisional, not final"),
        ({"bundle_manifest_sha256": "0" * 64}, "about other files"),
        ({"report_sha256": "0" * 64}, "about other files"),
        ({"reviewer": "carol"}, "belongs to alice@example.com"),
        ({"method": "form"}, "form is not among the ways"),
        ({"method": "automatic"}, "signed with the release key"),
        ({"decision": "baseline"}, "no answer"),
        ({"signed_at": "2099-01-01T00:00:00+00:00"}, "time to sign off ended"),
    ],
)
def test_read_record_refuses_an_approver_who_breaks_the_terms(rejected: Place, changes: dict[str, object], words: str) -> None:
    good = rejected.answer(waivers={GATE: "a reason"})
    _write(rejected, good.model_copy(update=changes), "alice@example.com")
    with pytest.raises(IntegrityError, match=words):
        read_record(rejected.bundle, rejected.public)


def test_read_record_refuses_an_author_who_approves_with_his_own_key(place: Place) -> None:
    good = place.answer()
    _write(place, good.model_copy(update={"reviewer": "bob@example.com"}), "bob@example.com")
    with pytest.raises(IntegrityError, match="somebody else must review"):
        verify_bundle(place.bundle, public_key=place.public)


def test_record_leaves_a_pair_that_verifies_wherever_it_is_killed(place: Place, tmp_path: Path) -> None:
    request = place.request
    seen: list[str] = []
    for number in range(1, 60):
        folder = tmp_path / f"kill{number}"
        shutil.copytree(place.bundle.parent, folder, ignore=shutil.ignore_patterns("model", "chat-v0*"))
        copy = Place(tmp_path, folder / "chat-v1")
        killed = die_at(folder, number, lambda copy=copy: copy.answer())
        left = read_record(copy.bundle, place.public)
        seen.append(left.decision)
        assert left == request or left.decision == "signed-off"
        done = copy.answer()
        assert done.decision == "signed-off" and (left.decision == "waiting" or done == left)
        assert read_record(copy.bundle, place.public) == done
        if not killed:
            break
    assert seen == sorted(seen, reverse=True) and set(seen) == {"waiting", "signed-off"} and len(seen) > 8


def test_record_lets_one_of_two_reviewers_decide(place: Place) -> None:
    _policy(place, authors=())
    request, ends = place.request, []

    def one(name: str) -> None:
        try:
            ends.append(record(place.bundle, review(request, name), place.key(name), place.public).reviewer)
        except ConfigError as error:
            ends.append(str(error).partition(" on ")[0])

    threads = [threading.Thread(target=one, args=(name,)) for name in ("alice@example.com", "bob@example.com")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = read_record(place.bundle, place.public).reviewer
    assert sorted(ends) == sorted([winner, f"chat-v1 was signed off by {winner}"])


class Killed(BaseException):
    """Stands for kill -9: no handler of the subject may catch it by name."""


def test_package_release_decides_what_a_killed_call_left_waiting(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)  # approval is automatic

    def die(*_args: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(stage, "answer_by_policy", die)
        with pytest.raises(Killed):
            package(inputs, tmp_path)
    bundle = tmp_path / "bundles" / "chat-v1"
    assert request_of(bundle, tmp_path).decision == "waiting"
    release = package(inputs, tmp_path)
    assert (release.bundle, release.decision) == ("chat-v1", "signed-off")
    assert request_of(bundle, tmp_path).reviewer == "policy: automatic"


def test_find_release_fault_lets_a_bundle_be_answered_for_since(place: Place) -> None:
    request = place.request
    release = Release(
        bundle="chat-v1",
        baseline_bundle="chat-v0",
        version=1,
        manifest_sha256=request.bundle_manifest_sha256,
        signoff_sha256=file_sha256(record_path(place.bundle)),
        decision="waiting",
        level="none",
        public_key_sha256=place.key("key").public_sha256,
    )
    signer = place.root / "keys" / "key.pem"
    assert find_release_fault(release, place.bundle.parent, signer) is None
    done = place.answer()
    assert find_release_fault(release, place.bundle.parent, signer) is None
    _write(place, done, "mallory")
    assert "gone or changed" in (find_release_fault(release, place.bundle.parent, signer) or "")


def test_deploy_refuses_what_waits_and_takes_it_once_approved(place: Place, tmp_path: Path) -> None:
    root, checks = tmp_path / "root", Checks(fit, fit)
    with pytest.raises(ConfigError, match=r"chat-v1 is not signed off .* model-optimizer approve chat-v1 --key KEY"):
        deploy(place.bundle, root, Reason("ops"), public_key=place.public, checks=checks)
    place.answer()
    assert deploy(place.bundle, root, Reason("ops"), public_key=place.public, checks=checks).bundle == "chat-v1"


def test_package_release_goes_back_past_a_version_that_waits(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = waiting_inputs(tmp_path, tiny_llama)
    publish_waiting(inputs, tmp_path)
    second = publish_waiting(inputs, tmp_path)
    assert second.name == "chat-v2"
    assert b'"bundle":"chat-v0"' in (second / "rollback" / "previous.json").read_bytes()


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"approval": "maybe"}, "automatic"),
        ({"approvers": {"a": "x"}}, "is no public key"),
        ({"ways": ["key"]}, "means nothing while approval is automatic"),
        ({"approval": "manual", "ways": ["key"]}, "no approver is named"),
        ({"approval": "manual", "ways": []}, "nobody could ever sign off"),
        ({"approval": "manual", "wait_days": 0}, "greater than 0"),
        ({"approval": "manual", "approver": {}}, "Extra inputs"),
    ],
)
def test_release_config_refuses(stated: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReleaseConfig.model_validate(stated)


def test_release_config_reads_a_key_in_both_forms_and_refuses_one_key_twice(tmp_path: Path) -> None:
    alice, bob = key_of(tmp_path, "alice"), key_of(tmp_path, "bob")
    pem, line = alice.public.read_text(), public_line(alice)
    for text in (pem, line, line[:50] + "\n  " + line[50:]):
        config = ReleaseConfig.model_validate({"approval": "manual", "approvers": {"alice": text}})
        assert (config.approvers, config.open_ways) == ({"alice": line}, ("key",))
    assert fingerprint(line) == alice.public_sha256
    with pytest.raises(ValueError, match="a and b have the same key"):
        ReleaseConfig.model_validate({"approval": "manual", "approvers": {"a": pem, "b": line}})
    stated = {"approval": "manual", "approvers": {"bob": public_line(bob)}, "ways": ["form"]}
    with pytest.raises(ValueError, match="asks none of them"):
        ReleaseConfig.model_validate(stated)
    assert ReleaseConfig.model_validate({"approval": "manual"}).open_ways == ("form", "github")
    assert ReleaseConfig().open_ways == ()


def test_parse_waivers_wants_gate_and_reason_once() -> None:
    assert parse_waivers(["a=b = c", " d = e "]) == {"a": "b = c", "d": "e"}
    for stated in (["a"], ["a="], ["=b"], ["a=b", "a=c"]):
        with pytest.raises(ConfigError, match=r"GATE=REASON|twice"):
            parse_waivers(stated)
