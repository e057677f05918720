"""Packaging, and what verification must notice (QA-090), on a small real bundle."""

import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from release_fixtures import DOCUMENTS, make_inputs, package
from report_fixtures import FLOAT_TORCH, samples, stored, verification

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Release, SignOff
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.protocols import Quiet
from model_optimizer.release import stage
from model_optimizer.release.config import ReleaseConfig, SignerConfig
from model_optimizer.release.manifest import MANIFEST, SIGNATURE, write_manifest
from model_optimizer.release.sign import SigningKey, ensure_key, sign_bytes
from model_optimizer.release.signoff import record_path, record_signature_path
from model_optimizer.release.stage import find_release_fault, package_release
from model_optimizer.release.verify import verify_bundle
from model_optimizer.release.version import optimizer_hash
from model_optimizer.store import canonical_json, stage_key


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> tuple[Path, Release]:
    """One accepted release; tests copy its bundles folder before they touch anything."""
    root = tmp_path_factory.mktemp("release")
    return root, package(make_inputs(root, tiny_llama), root)


@pytest.fixture
def copy(released: tuple[Path, Release], tmp_path: Path) -> Path:
    """A private copy of the released bundle, with its record beside it."""
    shutil.copytree(released[0] / "bundles", tmp_path / "bundles")
    return tmp_path / "bundles" / "chat-v1"


@pytest.fixture(scope="module")
def public_key(released: tuple[Path, Release]) -> Path:
    return released[0] / "keys" / "key.pem.pub"


def flip(path: Path, position: int) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_package_release_writes_the_layout_of_the_design(released: tuple[Path, Release]) -> None:
    bundle = released[0] / "bundles" / "chat-v1"
    files = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert files == {
        "config.yaml",
        "data/sample.json",
        "health_check.sh",
        "manifest.json",
        "metrics/report.html",
        "metrics/report.json",
        "metrics/report.md",
        "metrics/samples.parquet",
        "model.sig",
        "model/README.md",
        "model/chat_template.jinja",
        "model/config.json",
        "model/engines/onnxruntime/model.onnx",
        "model/generation_config.json",
        "model/kv_cache_config.json",
        "model/layout.json",
        "model/metadata.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "provenance.json",
        "rollback/README.md",
        "rollback/previous.json",
        "sbom.cdx.json",
    }
    assert stat.S_IMODE((bundle / "health_check.sh").stat().st_mode) == 0o755


def test_package_release_returns_digests_and_provisional_level(released: tuple[Path, Release]) -> None:
    root, release = released
    bundles = root / "bundles"
    assert (release.bundle, release.baseline_bundle, release.version) == ("chat-v1", "chat-v0", 1)
    assert (release.decision, release.level) == ("signed-off", "provisional")
    assert release.manifest_sha256 == file_sha256(bundles / "chat-v1" / MANIFEST)
    assert release.signoff_sha256 == file_sha256(bundles / "chat-v1.signoff.json")
    size = sum(path.stat().st_size for path in (bundles / "chat-v1").rglob("*") if path.is_file())
    assert release.measures[0].value == size


def test_package_release_writes_each_engines_own_sample(released: tuple[Path, Release]) -> None:
    texts = {}
    for bundle in ("chat-v0", "chat-v1"):
        data = json.loads((released[0] / "bundles" / bundle / "data" / "sample.json").read_bytes())
        texts[bundle] = [sample["text"] for sample in data["samples"]]
    assert texts == {"chat-v0": [" blue!", "三"], "chat-v1": [" blue.", "三"]}


def test_package_release_says_where_to_roll_back_to(released: tuple[Path, Release]) -> None:
    bundles = released[0] / "bundles"
    previous = json.loads((bundles / "chat-v1" / "rollback" / "previous.json").read_bytes())
    assert previous["bundle"] == "chat-v0"
    assert previous["manifest_sha256"] == file_sha256(bundles / "chat-v0" / MANIFEST)
    assert previous["model_ref"] == "package:tiny"
    config = yaml.safe_load((bundles / "chat-v1" / "config.yaml").read_text())
    assert config["sla"]["p95_latency_ms"] == 1500
    assert config["framework"]["inference"] == "onnxruntime 1.32.0"
    assert config["seeds"] == {"calibration": 0, "verify": 7}


def test_provenance_names_every_model_file_and_material(released: tuple[Path, Release]) -> None:
    bundle = released[0] / "bundles" / "chat-v1"
    statement = json.loads((bundle / "provenance.json").read_bytes())
    subject = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    files = [path for path in (bundle / "model").rglob("*") if path.is_file()]
    assert subject == {path.relative_to(bundle).as_posix(): file_sha256(path) for path in files}
    definition = statement["predicate"]["buildDefinition"]
    names = [material["name"] for material in definition["resolvedDependencies"]]
    assert names == ["source", "model", "lock of libraries", "calibration", "golden set everyday-facts"]
    assert len(definition["internalParameters"]["stage_keys"]) == 7


def test_package_release_stores_the_torch_engine_once(tmp_path: Path, tiny_llama: Path) -> None:
    package(make_inputs(tmp_path, tiny_llama, strategy=FLOAT_TORCH), tmp_path)
    bundle = tmp_path / "bundles" / "chat-v1"
    assert not (bundle / "model" / "engines").exists()
    assert json.loads((bundle / "model" / "metadata.json").read_bytes())["engine"] == "."


@pytest.mark.parametrize("verdict", [Verdict.REJECT, Verdict.INCONCLUSIVE])
def test_package_release_refuses_sign_off_unless_accepted(tmp_path: Path, tiny_llama: Path, verdict: Verdict) -> None:
    release = package(make_inputs(tmp_path, tiny_llama, verdict), tmp_path)
    assert (release.decision, release.level) == ("refused", "none")
    facts = verify_bundle(tmp_path / "bundles" / "chat-v1", public_key=tmp_path / "keys" / "key.pem.pub")
    assert facts.record is not None and facts.record.verdict is verdict


def test_package_release_refuses_without_report(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    with pytest.raises(ConfigError, match=r"report\.json"):
        package_release(inputs, tmp_path, bundles=tmp_path / "b", documents={}, samples=samples(), progress=Quiet())
    assert not (tmp_path / "b").exists()


def test_stage_key_ignores_the_place_of_the_signing_key_and_the_commit(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    moved = inputs.model_copy(update={"config": ReleaseConfig(signer=SignerConfig(key=tmp_path / "elsewhere"))})
    assert stage_key(inputs) == stage_key(moved)
    assert stage_key(inputs) == stage_key(inputs.model_copy(update={"source_commit": "1" * 40}))
    assert stage_key(inputs) != stage_key(inputs.model_copy(update={"calibration_digest": "1" * 64}))


def test_package_release_numbers_versions_and_goes_back_to_the_last_accepted(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    names = []
    for verdict in (Verdict.ACCEPT, Verdict.REJECT, Verdict.ACCEPT):
        checked = stored("verify", verification(verdict), tmp_path / "verify")
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        names.append(package(inputs.model_copy(update={"verification": checked}), tmp_path).bundle)
    assert names == ["chat-v1", "chat-v2", "chat-v3"]
    previous = json.loads((tmp_path / "bundles" / "chat-v3" / "rollback" / "previous.json").read_bytes())
    assert previous["bundle"] == "chat-v1"


class Killed(BaseException):
    """Stands for kill -9: no handler of the subject may catch it by name."""


@pytest.mark.parametrize("moment", ["fill", "_seal", "write_record", "publish"])
def test_package_release_burns_no_version_when_killed(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)

    def die(*_args: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(stage, moment, die)
        with pytest.raises(Killed):
            package(inputs, tmp_path)
    assert not list((tmp_path / "bundles").glob("chat-v*/"))
    assert package(inputs, tmp_path).bundle == "chat-v1"


def test_package_release_takes_up_what_a_killed_call_published(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    first = package(inputs, tmp_path)  # killed now, before the store wrote artifact.json
    (tmp_path / "bundles" / ".chat.publishing" / "chat-v2").mkdir(parents=True)
    assert package(inputs, tmp_path) == first
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir() if path.is_dir()) == ["chat-v0", "chat-v1"]


def test_package_release_gives_two_callers_two_versions(tmp_path: Path, tiny_llama: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    names = ["a", "b"]
    for name in names:
        (tmp_path / name).mkdir()

    def one(name: str) -> str:
        made = package_release(
            inputs, tmp_path / name, bundles=tmp_path / "bundles", documents=DOCUMENTS, samples=samples(), progress=Quiet()
        )
        return made.bundle

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(one, names)) == ["chat-v1", "chat-v2"]


def test_package_release_leaves_the_staging_of_a_longer_name_alone(tmp_path: Path, tiny_llama: Path) -> None:
    other = tmp_path / "bundles" / ".chat-v1.x.publishing" / "chat-v1.x-v1"
    other.mkdir(parents=True)
    package(make_inputs(tmp_path, tiny_llama), tmp_path)
    assert other.is_dir()


def test_find_release_fault_sees_a_removed_bundle_and_another_key(copy: Path, released: tuple[Path, Release]) -> None:
    root, release = released
    key = root / "keys" / "key.pem"
    assert find_release_fault(release, copy.parent, key) is None
    assert "another key" in (find_release_fault(release, copy.parent, root / "other.pem") or "")
    shutil.rmtree(copy)
    assert "gone" in (find_release_fault(release, copy.parent, key) or "")


def test_verify_bundle_accepts_an_untouched_copy(copy: Path, public_key: Path) -> None:
    facts = verify_bundle(copy, public_key=public_key)
    assert (facts.name, facts.num_files, facts.signed, facts.optimizer_hash) == ("chat-v1", 24, True, optimizer_hash())
    assert verify_bundle(copy.with_name("chat-v0"), public_key=public_key).record.decision == "baseline"  # type: ignore[union-attr]


def test_stock_verifier_accepts_the_signature(copy: Path, public_key: Path) -> None:
    program = Path(os.sys.executable).with_name("model_signing")  # type: ignore[attr-defined]
    command = [program, "verify", "key", copy, "--signature", copy / SIGNATURE, "--public_key", public_key]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    flip(copy / "config.yaml", 3)
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_verify_bundle_finds_a_flipped_byte_in_every_file(copy: Path, public_key: Path) -> None:
    victims = [path for path in copy.rglob("*") if path.is_file()]
    victims += [record_path(copy), record_signature_path(copy)]
    assert len(victims) == 26
    for path in victims:
        intact = path.read_bytes()
        for position in {0, len(intact) // 2, len(intact) - 1}:
            flip(path, position)
            with pytest.raises(IntegrityError, match=path.name) as caught:
                verify_bundle(copy, public_key=public_key)
            assert caught.value.exit_code == 6
            path.write_bytes(intact)
    assert verify_bundle(copy, public_key=public_key).signed


def test_verify_bundle_finds_any_removed_file(copy: Path, public_key: Path) -> None:
    victims = [path for path in copy.rglob("*") if path.is_file()]
    for path in [*victims, record_path(copy), record_signature_path(copy)]:
        intact = path.read_bytes()
        path.unlink()
        with pytest.raises(IntegrityError, match=rf"{path.name}: missing"):
            verify_bundle(copy, public_key=public_key)
        path.write_bytes(intact)


@pytest.mark.parametrize("place", ["note.txt", ".gitignore", ".git/config", "model/extra.safetensors", "model.sig.bak"])
def test_verify_bundle_finds_an_added_file(copy: Path, public_key: Path, place: str) -> None:
    (copy / place).parent.mkdir(exist_ok=True)
    (copy / place).write_text("x")
    with pytest.raises(IntegrityError, match=rf"{place}: added"):
        verify_bundle(copy, public_key=public_key)


def test_verify_bundle_names_both_sides_of_a_renamed_file(copy: Path, public_key: Path) -> None:
    (copy / "model" / "config.json").rename(copy / "model" / "settings.json")
    with pytest.raises(IntegrityError, match=r"config\.json: missing.*settings\.json: added"):
        verify_bundle(copy, public_key=public_key)


@pytest.mark.parametrize("name", ["link", "model", MANIFEST])
def test_verify_bundle_refuses_a_symlink(copy: Path, public_key: Path, name: str) -> None:
    if (copy / name).exists():
        (copy / name).rename(copy.parent / "moved")
    (copy / name).symlink_to("/etc/hostname" if name == "link" else copy.parent / "moved")
    with pytest.raises(IntegrityError, match=f"{name}: symlink"):
        verify_bundle(copy, public_key=public_key)


def test_verify_bundle_refuses_another_key(copy: Path, tmp_path: Path) -> None:
    other = ensure_key(tmp_path / "other.pem")
    with pytest.raises(IntegrityError, match=r"chat-v1\.signoff\.json: bad signature"):
        verify_bundle(copy, public_key=other.public)
    for path in (record_path(copy), record_signature_path(copy)):
        path.unlink()
    with pytest.raises(IntegrityError, match=r"model\.sig: bad signature"):
        verify_bundle(copy, public_key=other.public, allow_unsigned=True)


def test_verify_bundle_finds_a_manifest_that_was_edited_to_fit(copy: Path, public_key: Path) -> None:
    (copy / "model" / "config.json").write_text("{}")
    write_manifest(copy)
    with pytest.raises(IntegrityError, match=r"manifest\.json: modified"):
        verify_bundle(copy, public_key=public_key)
    for path in (record_path(copy), record_signature_path(copy)):
        path.unlink()
    with pytest.raises(IntegrityError, match=r"model\.sig: bad signature"):
        verify_bundle(copy, public_key=public_key, allow_unsigned=True)


def test_verify_bundle_refuses_the_record_of_another_version(copy: Path, public_key: Path) -> None:
    baseline = copy.with_name("chat-v0")
    shutil.copyfile(record_path(baseline), record_path(copy))
    shutil.copyfile(record_signature_path(baseline), record_signature_path(copy))
    with pytest.raises(IntegrityError, match="signed for chat-v0"):
        verify_bundle(copy, public_key=public_key)


def test_verify_bundle_refuses_another_optimizer_hash(copy: Path, released: tuple[Path, Release], public_key: Path) -> None:
    key = SigningKey(private=released[0] / "keys" / "key.pem", public=public_key)
    changes = {"optimizer_hash": "0" * 64, "request": None, "request_signature": ""}
    record = SignOff.model_validate_json(record_path(copy).read_bytes()).model_copy(update=changes)
    record_path(copy).write_bytes(canonical_json(record))
    record_signature_path(copy).write_bytes(sign_bytes(canonical_json(record), key))
    with pytest.raises(IntegrityError, match=r"metadata\.json: optimizer hash"):
        verify_bundle(copy, public_key=public_key)


def test_verify_bundle_allows_unsigned_only_when_told(copy: Path, public_key: Path) -> None:
    for path in (record_path(copy), record_signature_path(copy), copy / SIGNATURE):
        path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        verify_bundle(copy, public_key=public_key)
    facts = verify_bundle(copy, public_key=None, allow_unsigned=True)
    assert (facts.signed, facts.record) == (False, None)


class Server(ThreadingHTTPServer):
    """A scripted completion server."""

    answers: dict[str, str]


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "chat-v1" and body["temperature"] == 0
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": self.server.answers[body["prompt"]]}]}).encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(("127.0.0.1", 0), Answers)
    served.answers = {sample.prompt: sample.text for sample in samples()}
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def check(bundle: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(["sh", bundle / "health_check.sh", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_health_check_says_which_part_failed(copy: Path, server: Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}/"
    assert check(copy, url) == (0, f"device: ok (cpu)\nendpoint: ok ({url}health)\noutput: ok (2 samples)\n")
    server.answers["The sky is"] = " green."
    code, output = check(copy, url)
    assert code == 12 and 'expected " blue."' in output
    code, output = check(copy, url + "nowhere")
    assert code == 11 and "endpoint:" in output
    assert check(copy, "--device-only") == (0, "device: ok (cpu)\n")
    assert check(copy, "a", "b")[0] == 2


def test_health_check_names_a_missing_instruction_set(copy: Path) -> None:
    script = copy / "health_check.sh"
    script.write_text(script.read_text().replace("INSTRUCTION_SETS=''", "INSTRUCTION_SETS='avx9000'"))
    code, output = check(copy, "--device-only")
    assert code == 10 and "avx9000" in output
