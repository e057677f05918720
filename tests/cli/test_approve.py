"""`approve`: what it shows, what it asks for, and its exit codes; `verify-bundle` and `deploy` of what waits."""

import io
import json
import shutil
from pathlib import Path

import pytest
from entry import Command
from signoff_fixtures import GATE, key_of, publish_waiting, request_of, waiting_inputs

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import SignOff
from model_optimizer.release.approvers import public_line
from model_optimizer.release.signoff import read_record

ALICE, BOB, MALLORY = (f"keys/{name}.pem" for name in ("alice@example.com", "bob@example.com", "mallory"))
SIGNER = ("--public-key", "keys/key.pem.pub")
WORKFLOW = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_ACTOR": "carol",
    "GITHUB_REPOSITORY": "shop/models",
    "GITHUB_RUN_ID": "42",
    "GITHUB_SERVER_URL": "https://github.example",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with chat-v1, which was rejected and waits, by key or GitHub."""
    root = tmp_path_factory.mktemp("approve-cli")
    publish_waiting(waiting_inputs(root, tiny_llama, Verdict.REJECT, ways=["key", "github"]), root, Verdict.REJECT)
    key_of(root, "mallory")
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "bundles", tmp_path / ".model-optimizer" / "bundles")
    shutil.copytree(made / "keys", tmp_path / "keys")
    return tmp_path


def request(place: Path) -> SignOff:
    return read_record(place / ".model-optimizer" / "bundles" / "chat-v1", place / "keys" / "key.pem.pub")


def test_approve_shows_verdict_digests_and_gates_and_records_a_waiver(command: Command, place: Path) -> None:
    before = request(place)
    seen = ("--report-sha256", before.report_sha256[:16])
    ended = command("approve", "chat-v1", "--key", ALICE, *SIGNER, *seen, "--waive", f"{GATE}=demo only", cwd=place)
    assert (ended.code, ended.out.splitlines()) == (
        0,
        [
            f"chat-v1: signed-off, provisional by alice@example.com; waived: {GATE}; holder of the key "
            f"{key_of(place, 'alice@example.com').public_sha256[:16]}, which the profile gives to alice@example.com"
        ],
    )
    for words in ("REJECT", before.report_sha256, before.bundle_manifest_sha256, f"needs a waiver: {GATE}", "provisional, until"):
        assert words in ended.err
    assert request(place).waivers[0].reason == "demo only"
    again = command("approve", "chat-v1", "--key", ALICE, *SIGNER, *seen, "--waive", f"{GATE}=demo only", "--json", cwd=place)
    assert (again.code, json.loads(again.out)["signed_at"]) == (0, request(place).signed_at)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--key", ALICE), 2, "say which report you read: --report-sha256 "),
        (("--key", ALICE, "--yes"), 3, f"{GATE} did not accept; signing it off needs a waiver"),
        (("--key", ALICE, "--yes", "--waive", "speed=fast"), 2, f"'speed' needs no waiver; gates of chat-v1 that do: {GATE}"),
        (("--key", ALICE, "--yes", "--waive", GATE), 2, "a waiver is GATE=REASON"),
        (("--key", ALICE, "--report-sha256", "0" * 16, "--reject"), 6, "the reviewer saw the report 0000000000000000"),
        (("--key", ALICE, "--report-sha256", "feed"), 2, "16 to 64 hexadecimal digits"),
        (("--key", ALICE, "--manifest-sha256", "0" * 64, "--yes", "--reject"), 6, "saw the manifest"),
        (("--key", BOB, "--yes", "--waive", f"{GATE}=mine"), 2, "bob@example.com made the source commit or started the run"),
        (("--key", ALICE, "--yes", "--reject", "--reviewer", "carol"), 2, "the key belongs to alice@example.com, not to carol"),
        (("--key", "keys/none.pem", "--yes"), 2, "make one: openssl ecparam"),
        (("--key", ALICE, "--yes", "--method", "github"), 2, "works in a job of GitHub Actions; not set here: GITHUB_ACTOR"),
    ],
)
def test_approve_refuses(command: Command, place: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    before = request(place)
    ended = command("approve", "chat-v1", *SIGNER, *arguments, cwd=place)
    assert (ended.code, words in ended.err.splitlines()[-1]) == (code, True), ended.err
    assert request(place) == before


class Terminal(io.StringIO):
    """Somebody's keyboard."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "code", "decision"), [("n\n", 130, "waiting"), ("\n", 130, "waiting"), ("y\n", 0, "refused")])
def test_approve_asks_whoever_sits_at_a_terminal(
    command: Command, place: Path, monkeypatch: pytest.MonkeyPatch, typed: str, code: int, decision: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    ended = command("approve", "chat-v1", "--key", ALICE, *SIGNER, "--reject", cwd=place)
    assert (ended.code, request(place).decision) == (code, decision)
    assert "refuse chat-v1 (report " in ended.err and ("nothing was recorded" in ended.err) == (code == 130)


def test_approve_tells_a_stranger_how_to_become_an_approver(command: Command, place: Path) -> None:
    ended = command("approve", "chat-v1", "--key", MALLORY, *SIGNER, "--yes", cwd=place)
    assert (ended.code, public_line(key_of(place, "mallory")) in ended.err) == (2, True)


def test_approve_refuses_a_damaged_bundle_and_one_without_its_weights_unless_told(command: Command, place: Path) -> None:
    weights = place / ".model-optimizer" / "bundles" / "chat-v1" / "model" / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    reject = ("approve", "chat-v1", "--key", ALICE, *SIGNER, "--yes", "--reject", "--comment", "lossy", "--json")
    assert command(*reject, cwd=place).code == 6
    shutil.rmtree(weights.parent)
    assert command(*reject, cwd=place).code == 6
    ended = command(*reject, "--without-weights", cwd=place)
    assert (ended.code, json.loads(ended.out)["decision"], json.loads(ended.out)["comment"]) == (0, "refused", "lossy")


def test_approve_for_github_says_what_is_known_of_the_reviewer(
    command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WORKFLOW.items():
        monkeypatch.setenv(name, value)
    github = ("approve", "chat-v1", "--method", "github", *SIGNER, "--yes", "--waive", f"{GATE}=demo", "--json")
    stranger = command(*github, "--key", MALLORY, cwd=place)
    assert (stranger.code, "release key or an approver's" in stranger.err) == (2, True)
    url = "https://github.example/shop/models/attestations/7"
    ended = command(*github, "--key", "keys/key.pem", "--reviewer", "dora", "--attestation", url, cwd=place)
    document = json.loads(ended.out)
    assert (ended.code, document["reviewer"], document["method"]) == (0, "dora", "github")
    assert document["identity"] == (
        "GitHub login dora, named by the workflow as reviewer, in workflow run "
        f"https://github.example/shop/models/actions/runs/42 started by carol; attested: {url}"
    )


def test_what_waits_does_not_look_signed_off(command: Command, place: Path) -> None:
    bundle = str(place / ".model-optimizer" / "bundles" / "chat-v1")
    verified = command("verify-bundle", bundle, *SIGNER, cwd=place)
    assert (verified.code, "waiting" in verified.out, "signed-off" in verified.out) == (0, True, False)
    deployed = command("deploy", "chat-v1", "--to", "root", *SIGNER, cwd=place)
    assert (deployed.code, "chat-v1 is not signed off" in deployed.err) == (2, True)
    assert request_of(Path(bundle), place).decision == "waiting"
