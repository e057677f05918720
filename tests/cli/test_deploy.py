"""`deploy`, `rollback`, `status`, `store list` and `store gc`: what they print and how they end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deploy_fixtures import make_bundles

from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.store import Store

COMMAND = str(Path(sys.executable).with_name("model-optimizer"))


class Note(StageArtifact):
    text: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("deploy-cli")
    make_bundles(root, tiny_llama)
    (root / ".model-optimizer").mkdir()
    (root / ".model-optimizer" / "bundles").symlink_to(root / "bundles")
    return root


def call(place: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([COMMAND, *arguments], cwd=place, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_deploy_rollback_and_status_agree(place: Path) -> None:
    key = ("--public-key", "keys/key.pem.pub")
    code, out, _ = call(place, "deploy", "bundles/chat-v0", "--to", "root", *key, "--by", "anna", "--why", "first")
    assert code == 0 and out.startswith("chat-v0 is current in root (before: nothing; switched in ")
    assert out.endswith("device: ok (cpu), 2 samples equal")
    code, out, _ = call(place, "deploy", "chat-v1", "--to", "root", *key, "--json")  # by name, from this folder's bundles
    document = json.loads(out)
    assert (code, document["bundle"], document["move"]["from_bundle"]) == (0, "chat-v1", "chat-v0")
    assert (document["health"]["num_samples"], document["switch_ms"] > 0) == (2, True)
    code, out, _ = call(place, "rollback", "--to", "root", "--json")
    assert (code, json.loads(out)["bundle"]) == (0, "chat-v0")
    assert call(place, "rollback", "--to", "root", "v1")[0] == 0
    code, out, _ = call(place, "status", "--to", "root", "--json")
    seen = json.loads(out)
    assert (seen["current"], seen["previous"], seen["fault"]) == ("chat-v1", "chat-v0", None)
    first, second, *_ = seen["moves"]
    assert (first["who"], first["why"]) == ("anna", "first")
    assert "@" in second["who"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("deploy", "chat-v9", "--to", "r"), 2, "no bundle 'chat-v9'"),
        (("deploy", "chat-v3", "--to", "r", "--public-key", "keys/key.pem.pub"), 2, "chat-v3 is not signed off"),
        (("deploy", "chat-v4", "--to", "r", "--public-key", "keys/key.pem.pub"), 3, "sample 2 of 2 differs from token 5"),
        (("deploy", "chat-v1", "--to", "keys", "--public-key", "keys/key.pem.pub"), 2, "holds key.pem, key.pem.pub"),
        (("rollback", "--to", "bundles"), 2, "is not a deployment root"),
        (("status", "--to", "nowhere"), 2, "is not a deployment root"),
        (("store", "gc", "--unused-for", "soon"), 2, "give a number with one of s, min, h, d, w"),
    ],
)
def test_a_fault_is_one_line_with_its_code(place: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    seen, out, error = call(place, *arguments)
    assert (seen, out) == (code, "")
    assert words in error and "\n" not in error


def test_deploy_of_a_changed_bundle_ends_with_6(place: Path, tmp_path: Path) -> None:
    other = make_bundles(tmp_path, place / "quantize" / "checkpoint")
    (other / "chat-v1" / "config.yaml").write_text("x")
    code, _, error = call(tmp_path, "deploy", "bundles/chat-v1", "--to", "root", "--public-key", "keys/key.pem.pub")
    assert code == 6 and "chat-v1/config.yaml: modified" in error and "\n" not in error
    assert not (tmp_path / "root").exists()


def test_store_list_and_gc_name_what_is_old(tmp_path: Path) -> None:
    root = tmp_path / ".model-optimizer" / "store"
    for key, days in {"a" * 64: 40, "b" * 64: 1}.items():
        Store(root).produce("scan", key, Note, lambda _directory: Note(text="x"))
        stamp = time.time() - days * 86400
        os.utime(root / "scan" / key / "artifact.json", (stamp, stamp))
    listed = json.loads(call(tmp_path, "store", "list", "--json")[1])
    assert [(row["key"][0], row["state"]) for row in listed] == [("a", "finished"), ("b", "finished")]
    planned = json.loads(call(tmp_path, "store", "gc", "--dry-run", "--json")[1])
    code, out, _ = call(tmp_path, "store", "gc", "--unused-for", "30d")
    assert code == 0 and out.splitlines()[-1] == f"1 entries, {planned['num_bytes'] / 1e6:.1f} MB removed"
    assert [row["key"][0] for row in json.loads(call(tmp_path, "store", "list", "--json")[1])] == ["b"]
