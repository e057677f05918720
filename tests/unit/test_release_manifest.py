"""The manifest's refusals, keys and record signatures, and what is signed off, without a whole bundle."""

import stat
from pathlib import Path

import pytest

from model_optimizer.artifacts.base import FileRef
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.manifest import MANIFEST, verify_manifest, write_manifest
from model_optimizer.release.sign import ensure_key, sign_bytes, verify_bytes
from model_optimizer.release.signoff import decide
from model_optimizer.release.version import optimizer_hash, package_version
from model_optimizer.store import canonical_json


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("../x", "unsafe path"),
        ("/etc/passwd", "unsafe path"),
        ("a/./b", "unsafe path"),
        ("a\\b", "unsafe path"),
        ("", "unsafe path"),
        (".", "unsafe path"),
        ("manifest.json", "unsafe path"),
        ("CONFIG.yaml", "name collision"),
        ("config.yaml", "duplicate entry"),
    ],
)
def test_verify_manifest_refuses_an_entry_before_opening_it(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "config.yaml").write_text("x")
    entry = FileRef.of(tmp_path, tmp_path / "config.yaml").model_dump()
    (tmp_path / MANIFEST).write_bytes(canonical_json({"bundle_format": 1, "files": [entry, {**entry, "path": path}]}))
    with pytest.raises(IntegrityError, match=kind):
        verify_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"bundle_format":2,"files":[]}', "unknown bundle_format 2"),
        (b'{"bundle_format":1,"files":[]}', "lists no file"),
        (b"", "not a manifest"),
        (b"[]", "not a manifest"),
        (b"[" * 100_000, "not a manifest"),
        (b"\xff", "not a manifest"),
    ],
)
def test_verify_manifest_refuses_what_is_no_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(IntegrityError, match=message):
        verify_manifest(tmp_path)


def test_verify_manifest_refuses_another_form_of_the_same_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    write_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes((tmp_path / MANIFEST).read_bytes() + b"\n")
    with pytest.raises(IntegrityError, match="canonical"):
        verify_manifest(tmp_path)


def test_ensure_key_makes_a_private_file_once(tmp_path: Path) -> None:
    key = ensure_key(tmp_path / "deep" / "key.pem")
    assert stat.S_IMODE(key.private.stat().st_mode) == 0o600
    assert ensure_key(tmp_path / "deep" / "key.pem").public_sha256 == key.public_sha256
    assert verify_bytes(b"record", sign_bytes(b"record", key), key.public)
    assert not verify_bytes(b"Record", sign_bytes(b"record", key), key.public)


def test_ensure_key_refuses_what_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(ConfigError, match="no unencrypted private key"):
        ensure_key(tmp_path / "key.pem")


@pytest.mark.parametrize(
    ("verdict", "soak_s", "expected"),
    [
        (Verdict.ACCEPT, 60.0, ("signed-off", "provisional")),
        (Verdict.ACCEPT, 86400.0, ("signed-off", "final")),
        (Verdict.REJECT, 86400.0, ("refused", "none")),
        (Verdict.INCONCLUSIVE, 86400.0, ("refused", "none")),
    ],
)
def test_decide_signs_off_accepted_runs_only(verdict: Verdict, soak_s: float, expected: tuple[str, str]) -> None:
    assert decide(verdict, soak_s, 86400.0) == expected


def test_optimizer_hash_is_a_stable_sha256() -> None:
    assert len(optimizer_hash()) == 64 and optimizer_hash() == optimizer_hash()
    assert package_version()[0].isdigit()
