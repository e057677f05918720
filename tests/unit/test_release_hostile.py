"""Every hostile bundle is refused in its exact words, nothing outside a bundle is opened, and no exchange in between wins."""

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.hostile_bundles import GOOD, WEIGHTS, Case, is_possible, make_good, make_template, refusal, safetensors, tensor
from benchmarks.hostile_cases import CASES
from model_optimizer.artifacts.base import file_sha256
from model_optimizer.errors import IntegrityError
from model_optimizer.release.entry_names import collision, path_fault
from model_optimizer.release.hostile import content_fault, wanted
from model_optimizer.release.manifest import METADATA, SIGNATURE, verify_manifest
from model_optimizer.release.sign import ensure_key, seal
from model_optimizer.release.signoff import record_path, record_signature_path
from model_optimizer.release.strict_json import json_fault
from model_optimizer.release.tree import OpenTree
from model_optimizer.release.verify import verify_bundle
from model_optimizer.release.writer import BundleWriter, files_below


class Payload:
    """Calls `print` when it is unpickled: the harmless stand-in for any call."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("unpickled",)


OPEN_PATHS = """
import os, sys
from pathlib import Path
from model_optimizer.artifacts.base import file_sha256
from model_optimizer.errors import IntegrityError
from model_optimizer.release import openssf
from model_optimizer.release.verify import verify_bundle
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event in ("open", "os.open") else None)
folder = Path(sys.argv[1])
try:
    verify_bundle(folder / "bundles" / "chat-v1", public_key=folder / "key.pem.pub")
except IntegrityError:
    pass
print("\\n".join(opened))
"""


QA_090 = {
    "byte of the weights flipped": "model/model.safetensors: modified",
    "file added": "note.txt: added",
    "file removed": "config.yaml: missing",
    "file renamed": "config.yaml: missing: manifest.json lists it; {b}/config.yml: added",
    "symlink to a file outside": "link: symlink",
    "entry that climbs": "manifest.json: unsafe path '../x'",
    "entry that is absolute": "manifest.json: unsafe path '/etc/passwd'",
    "entry twice": "manifest.json: duplicate entry 'config.yaml'",
    "manifest edited to fit": "manifest.json: modified",
    "manifest of no file": "manifest.json: modified: it lists no file",
    "signature by another key": "model.sig: bad signature",
}
"""The variants of the case, each with file and kind. Of archives there is nothing to extract: no command reads one."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("hostile") / "template")


def test_corpus_holds_sixty_distinct_cases_and_more() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 130


def test_corpus_holds_the_eleven_variants_of_qa_090_with_file_and_kind() -> None:
    reasons = {case.name: case.reason for case in CASES}
    assert len(QA_090) == 11
    assert [name for name, words in QA_090.items() if not reasons[name].startswith(f"{{b}}/{words}")] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verify_bundle_refuses_every_hostile_bundle_in_its_words(case: Case, template: Path, tmp_path: Path) -> None:
    if not is_possible(case):
        pytest.skip("only root may make device nodes")
    assert refusal(case, template, tmp_path / "case") == case.reason


def test_verify_bundle_accepts_the_bundle_that_every_case_spoils(template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path / "moved")
    facts = verify_bundle(tmp_path / "moved" / "bundles" / "chat-v1", public_key=tmp_path / "moved" / "key.pem.pub")
    assert (facts.num_files, facts.documents[METADATA]) == (11, GOOD[METADATA])


@pytest.mark.parametrize(
    "name", ["pickle as safetensors", "torch checkpoint by another name", "tensors that overlap", "code of the model"]
)
def test_verify_bundle_refuses_hostile_content_that_nobody_signed(template: Path, tmp_path: Path, name: str) -> None:
    """`--allow-unsigned` does without signature and record, not without looking."""
    case = next(case for case in CASES if case.name == name)
    assert refusal(case, template, tmp_path / "case") == case.reason
    bundle = tmp_path / "case" / "bundles" / "chat-v1"
    for path in (bundle / SIGNATURE, record_path(bundle), record_signature_path(bundle)):
        path.unlink()
    with pytest.raises(IntegrityError, match=re.escape(case.reason.removeprefix("{b}/"))):
        verify_bundle(bundle, public_key=None, allow_unsigned=True)


def test_verify_bundle_opens_nothing_outside_the_bundle(template: Path, tmp_path: Path) -> None:
    """Links, absolute entries and climbing entries name a canary; no process that verifies them opens it."""
    canary = tmp_path / "canary.json"
    canary.write_text("{}")
    folder = tmp_path / "case"
    shutil.copytree(template, folder)
    bundle = folder / "bundles" / "chat-v1"
    for place in (WEIGHTS, "model/config.json"):
        (bundle / place).unlink()
        (bundle / place).symlink_to(canary)
    done = subprocess.run([sys.executable, "-c", OPEN_PATHS, folder], capture_output=True, text=True, check=True)
    opened = done.stdout.splitlines()
    assert str(bundle) in opened
    assert not [path for path in opened if "canary" in path or "model.safetensors" in path]


def test_verify_bundle_returns_verified_bytes_while_files_are_exchanged(template: Path, tmp_path: Path) -> None:
    """One thread swaps metadata.json for a link and for other content; what is returned is never the other content."""
    shutil.copytree(template, tmp_path / "swap")
    bundle = tmp_path / "swap" / "bundles" / "chat-v1"
    public_key = tmp_path / "swap" / "key.pem.pub"
    evil = tmp_path / "evil.json"
    evil.write_bytes(GOOD[METADATA].replace(b"0000", b"1111"))
    place, side = bundle / METADATA, tmp_path / "side"
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            side.symlink_to(evil)
            side.replace(place)
            shutil.copyfile(evil, side)
            side.replace(place)
            side.write_bytes(GOOD[METADATA])
            side.replace(place)

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes = []
    try:
        for _ in range(60):
            with contextlib.suppress(IntegrityError):
                outcomes.append(verify_bundle(bundle, public_key=public_key).documents[METADATA])
    finally:
        stop.set()
        thread.join()
    assert set(outcomes) <= {GOOD[METADATA]}


def test_verify_bundle_accepts_the_self_checks_own_links(tmp_path: Path) -> None:
    """The scratch root of the self-check holds second names of a bundle's files, also after a kill."""
    key = ensure_key(tmp_path / "key.pem")
    bundle = make_good(tmp_path / "bundles", key)
    scratch = tmp_path / "bundles" / ".chat.self-check" / "releases" / "chat-v1"
    scratch.mkdir(parents=True)
    for name in ("config.yaml", "health_check.sh"):
        os.link(bundle / name, scratch / name)
    assert verify_bundle(bundle, public_key=key.public).signed
    os.link(bundle / "config.yaml", tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match=r"config\.yaml: hard link"):
        verify_bundle(bundle, public_key=key.public)


def test_tree_refuses_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 100)
    with OpenTree(tmp_path) as tree, pytest.raises(IntegrityError, match="log: modified while it was read"):

        def grow(path: str, num_bytes: int, _first: bytes) -> int:
            with (tmp_path / path).open("ab") as stream:
                stream.write(b"y")
            return num_bytes

        tree.read("log", grow)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [[1, 2], {"a": 1.5}, "text", print, Payload()], ids=["list", "dict", "str", "function", "call"])
def test_content_fault_finds_a_pickle_of_any_protocol(tmp_path: Path, protocol: int, value: object) -> None:
    (tmp_path / "weights.bin").write_bytes(pickle.dumps(value, protocol))
    assert "pickle" in (_fault(tmp_path, "weights.bin") or "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"config\nfoo\n# a title\n"),
        ("notes.txt", b"(lp0\nof the list)\n"),
        ("vocab.txt", b"cat\ndog\nRob\n."),
        ("weights.data", b"\x80\x02" + bytes(5000)),
        ("weights.data", b"\x80\x04\x01\x02\x03" * 2000),
        ("scales.npy", b"\x93NUMPY\x01\x00\x40\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }" + bytes(8)),
        ("model.safetensors", safetensors({"\u00e9": tensor(0, 0, 0)}, 0)),
        ("model.safetensors", safetensors({"__metadata__": {"format": "pt"}, "a": tensor(0, 630, 630, dtype="U8")}, 630)),
        ("model.xml", b"<?xml version='1.0'?><net name='x'/>"),
        ("config.json", b'{"time_step_limit": [0.0, Infinity], "deep": ' + b"[" * 90 + b"]" * 90 + b"}"),
    ],
)
def test_content_fault_leaves_honest_files_alone(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert _fault(tmp_path, name) is None


def _fault(folder: Path, name: str) -> str | None:
    with OpenTree(folder) as tree:
        return content_fault(name, tree.read(name, wanted))


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 1_000_000, b"[" * 1_000_000, b'{"a":"' + b"[" * 1_000_000, b'["\\'])
def test_json_fault_takes_linear_time_on_hostile_text(text: bytes) -> None:
    assert json_fault(text) is not None


def test_path_fault_accepts_what_bundles_hold() -> None:
    names = (
        "model/model-00001-of-00002.safetensors",
        ".gitattributes",
        "a b.txt",
        "model/中文.txt",
        "engines/onnx.v2/x",
        "console.log",
    )
    assert [path_fault(name) for name in names] == [None] * len(names)


def test_collision_names_both_paths() -> None:
    assert collision(["a/b", "c", "A/d"]) == ("a", "A/d")
    assert collision(["stra\u00dfe", "STRASSE"]) == ("stra\u00dfe", "STRASSE")
    assert collision(["a", "a/b"]) == ("a", "a")
    assert collision(["a/b", "a/c", "b"]) is None


def test_writer_knows_what_lies_on_disk(tmp_path: Path) -> None:
    """Digests and sizes of what was written equal a second reading, across the edges of a buffer; a later file stands."""
    sizes = (0, 1, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (7 << 20) + 3, (13 << 20) + 5)
    (tmp_path / "source").mkdir()
    for size in sizes:
        (tmp_path / "source" / str(size)).write_bytes(os.urandom(size))
    writer = BundleWriter(tmp_path / "b")
    writer.copy(files_below("f", tmp_path / "source"))
    writer.write("twice.sh", b"first")
    writer.write("twice.sh", b"2nd")
    refs = {ref.path: (ref.num_bytes, ref.sha256) for ref in writer.files}
    with OpenTree(tmp_path / "b") as tree:
        seen = {path: tree.read(path) for path in tree.entries()}
    assert refs == {path: (content.num_bytes, content.sha256) for path, content in seen.items()}
    assert sorted(content.num_bytes for content in seen.values()) == sorted((*sizes, 3))
    assert (tmp_path / "b" / "twice.sh").stat().st_mode & 0o777 == 0o755


def test_seal_signs_what_was_written_and_reads_nothing_again(tmp_path: Path) -> None:
    """A file that changes between writing and signing is found: its digest is that of the bytes that were written."""
    key = ensure_key(tmp_path / "key.pem")
    bundle = tmp_path / "b-v1"
    bundle.mkdir()
    writer = BundleWriter(bundle)
    writer.write("a.txt", b"written")
    (bundle / "a.txt").write_bytes(b"changed")
    manifest_sha256, signature_sha256 = seal(writer, key)
    assert (file_sha256(bundle / "manifest.json"), file_sha256(bundle / SIGNATURE)) == (manifest_sha256, signature_sha256)
    with pytest.raises(IntegrityError, match=r"a\.txt: modified"):
        verify_manifest(bundle)
    stock = Path(sys.executable).with_name("model_signing")
    command = [stock, "verify", "key", bundle, "--signature", bundle / SIGNATURE, "--public_key", key.public]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    (bundle / "a.txt").write_bytes(b"written")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
