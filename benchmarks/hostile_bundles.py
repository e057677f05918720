"""Bundles that must be refused, each with the exact words: the corpus of the release test and of `benchmarks/release.py`.

Every case spoils a small good bundle. `resealed` cases are then listed, signed and signed off again with the right key, so that
nothing but the content itself can give them away; `blessed` ones keep their spoiled manifest and are signed off as they are.
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import IntegrityError
from model_optimizer.release.manifest import MANIFEST, METADATA, REPORT, SIGNATURE, write_manifest
from model_optimizer.release.sign import SigningKey, ensure_key, seal, sign_digests
from model_optimizer.release.signoff import write_record
from model_optimizer.release.verify import verify_bundle
from model_optimizer.release.writer import BundleWriter
from model_optimizer.store import canonical_json

WEIGHTS = "model/model.safetensors"
CONFIG = "model/config.json"
_HASH = "0" * 64
_DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
Harm = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One way to spoil a bundle; `{b}` in `reason` stands for its name and `<digest>` for twelve digits of one."""

    name: str
    harm: Harm
    reason: str
    then: Literal["nothing", "resealed", "blessed"] = "nothing"


def safetensors(header: object, num_data_bytes: int) -> bytes:
    """Return a file with a header as given, true or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(num_data_bytes)


def tensor(start: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


GOOD = {
    "config.yaml": b"name: chat\n",
    "data/sample.json": b'{"decoding":"greedy","samples":[]}',
    "health_check.sh": b"#!/bin/sh\nexit 0\n",
    METADATA: canonical_json({"bundle_format": 1, "optimizer_hash": _HASH}),
    CONFIG: b'{"model_type": "llama"}',
    "model/tokenizer.json": b'{"model": {"vocab": {"a": 0, "b": 1}}}',
    WEIGHTS: safetensors({"a": tensor(0, 16, 2, 2), "b": tensor(16, 24, 4, dtype="F16")}, 24),
    REPORT: b'{"report_format": 1}',
    "provenance.json": b'{"_type": "https://in-toto.io/Statement/v1"}',
}


def make_good(bundles: Path, key: SigningKey, name: str = "chat-v1") -> Path:
    """Write the small bundle that every case spoils."""
    bundle = bundles / name
    bundle.mkdir(parents=True)
    writer = BundleWriter(bundle)
    for place, content in GOOD.items():
        writer.write(place, content)
    seal(writer, key)
    bless(bundle, key)
    return bundle


def reseal(bundle: Path, key: SigningKey) -> None:
    """List, sign and sign off a bundle as it lies there."""
    (bundle / SIGNATURE).unlink(missing_ok=True)
    write_manifest(bundle)
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name != SIGNATURE]
    sign_digests(bundle, {path.relative_to(bundle).as_posix(): file_sha256(path) for path in files}, key)
    bless(bundle, key)


def bless(bundle: Path, key: SigningKey) -> None:
    """Sign off manifest, signature and report of a bundle as they lie there."""
    record = SignOff(
        bundle=bundle.name,
        bundle_manifest_sha256=file_sha256(bundle / MANIFEST),
        signature_sha256=file_sha256(bundle / SIGNATURE),
        report_sha256=file_sha256(bundle / REPORT),
        optimizer_hash=_HASH,
        gates=(),
        verdict=None,
        decision="baseline",
        level="none",
        reviewer="nobody",
        identity="nobody's",
        signed_at="2026-11-30T00:00:00+00:00",
    )
    write_record(bundle, record, key)


def make_template(folder: Path) -> Path:
    """Make the key and the good bundle that `refusal` copies for every case."""
    make_good(folder / "bundles", ensure_key(folder / "key.pem"))
    return folder


def refusal(case: Case, template: Path, folder: Path) -> str:
    """Make the bundle of a case in a new folder and return the words with which it is refused; "" where it is accepted."""
    shutil.copytree(template, folder)
    key, bundle = ensure_key(folder / "key.pem"), folder / "bundles" / "chat-v1"
    case.harm(bundle)
    if case.then == "resealed":
        reseal(bundle, key)
    elif case.then == "blessed":
        bless(bundle, key)
    try:
        verify_bundle(bundle, public_key=key.public)
    except IntegrityError as error:
        return _DIGEST.sub("<digest>", str(error).replace(str(folder), "{folder}").replace(bundle.name, "{b}"))
    return ""


def is_possible(case: Case) -> bool:
    """Return whether this user may make the case: device nodes are root's."""
    return case.name != "device" or os.geteuid() == 0


def put(place: str, content: bytes = b"x") -> Harm:
    """Write a file."""

    def harm(bundle: Path) -> None:
        (bundle / place).parent.mkdir(parents=True, exist_ok=True)
        (bundle / place).write_bytes(content)

    return harm


def put_raw(name: bytes) -> Harm:
    """Write a file whose name is given in bytes."""

    def harm(bundle: Path) -> None:
        Path(os.fsdecode(os.fsencode(bundle) + b"/" + name)).write_bytes(b"x")

    return harm


def link(place: str, to: str) -> Harm:
    """Put a symbolic link in the place of whatever lies there."""

    def harm(bundle: Path) -> None:
        if (bundle / place).exists():
            (bundle / place).rename(bundle.parent / "moved")
        (bundle / place).symlink_to(to)

    return harm


def grow(place: str, num_bytes: int) -> Harm:
    """Make a file claim a size that it does not occupy."""

    def harm(bundle: Path) -> None:
        os.truncate(bundle / place, num_bytes)

    return harm


def remove(place: str) -> Harm:
    def harm(bundle: Path) -> None:
        (bundle / place).unlink()

    return harm


def flip(place: str, position: int) -> Harm:
    """Flip the lowest bit of one byte."""

    def harm(bundle: Path) -> None:
        content = bytearray((bundle / place).read_bytes())
        content[position] ^= 1
        (bundle / place).write_bytes(bytes(content))

    return harm


def in_turn(*harms: Harm) -> Harm:
    def harm(bundle: Path) -> None:
        for one in harms:
            one(bundle)

    return harm


def fifo(bundle: Path) -> None:
    os.mkfifo(bundle / "pipe")


def unix_socket(bundle: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(bundle)  # the address of a socket is at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
    finally:
        os.fchdir(here)
        os.close(here)


def device(bundle: Path) -> None:
    os.mknod(bundle / "null", 0o020666, os.makedev(1, 3))


def hard_link(bundle: Path) -> None:
    os.link(bundle / WEIGHTS, bundle.parent / "outside")


def crowd(bundle: Path) -> None:
    (bundle / "crowd").mkdir()
    for number in range(10_001):
        (bundle / "crowd" / str(number)).touch()


def entries(*changes: dict[str, object], instead: bool = False) -> Harm:
    """Add entries to the manifest, or put them in the place of all that are there; each begins as a true one."""

    def harm(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST).read_bytes())
        true = manifest["files"][0]
        manifest["files"] = [*([] if instead else manifest["files"]), *({**true, **change} for change in changes)]
        (bundle / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))

    return harm


def manifest_with(**changes: object) -> Harm:
    """Change fields of the manifest."""

    def harm(bundle: Path) -> None:
        manifest = {**json.loads((bundle / MANIFEST).read_bytes()), **changes}
        manifest = {name: value for name, value in manifest.items() if value is not None}
        (bundle / MANIFEST).write_bytes(canonical_json(manifest))

    return harm


def backwards(bundle: Path) -> None:
    """List the files the other way round."""
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    (bundle / MANIFEST).write_bytes(canonical_json({**manifest, "files": manifest["files"][::-1]}))


def edited(place: Callable[[Path], Path], old: bytes, new: bytes) -> Harm:
    """Replace bytes of a file in or beside the bundle."""

    def harm(bundle: Path) -> None:
        content = place(bundle).read_bytes()
        assert old in content
        place(bundle).write_bytes(content.replace(old, new))

    return harm


def in_bundle(place: str) -> Callable[[Path], Path]:
    return lambda bundle: bundle / place
