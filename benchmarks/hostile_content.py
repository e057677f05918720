"""The rest of the list of `hostile_cases`: what signatures and records must not let pass, and what no content may be."""

import base64
import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

from benchmarks.hostile_bundles import (
    CONFIG,
    GOOD,
    WEIGHTS,
    Case,
    Harm,
    edited,
    entries,
    flip,
    in_turn,
    make_good,
    put,
    remove,
    safetensors,
    tensor,
)
from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.release import SignOff
from model_optimizer.models.headers import ITEM_BITS
from model_optimizer.release.manifest import MANIFEST, METADATA, REPORT, SIGNATURE
from model_optimizer.release.sign import SigningKey, ensure_key, sign_digests
from model_optimizer.release.signoff import record_path, record_signature_path, write_record

_PICKLE = (
    b"\x80\x04\x95&\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x05print\x94\x93\x94\x8c\tunpickled\x94\x85\x94R\x94."
)
"""Calls `print` when it is read, the harmless stand-in for any call; written by hand, for nothing here pickles."""
_PICKLE_2 = b"\x80\x02c__builtin__\nprint\nq\x00X\t\x00\x00\x00unpickledq\x01\x85q\x02Rq\x03."
_PICKLE_0 = b"c__builtin__\nprint\np0\n(Vunpickled\np1\ntp2\nRp3\n."
_TORCH_LEGACY = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00X\r\x00\x00\x00little_endianq\x01\x88s." + _PICKLE_2
)
"""The beginning of a torch file from before zip archives: magic number, protocol and system as pickles of their own."""


def _zip(name: str = "archive/data.pkl") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, _PICKLE)
    return stream.getvalue()


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../etc/passwd"))
    return stream.getvalue()


def _npy() -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + _PICKLE


def _other_key(bundle: Path) -> SigningKey:
    return ensure_key(bundle.parent.parent / "other.pem")


def _digests(bundle: Path) -> dict[str, str]:
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name != SIGNATURE]
    return {path.relative_to(bundle).as_posix(): file_sha256(path) for path in files}


def _signed_by_another(bundle: Path) -> None:
    sign_digests(bundle, _digests(bundle), _other_key(bundle))


def _signature_over_others(bundle: Path) -> None:
    """Put the valid signature of the same key over other content in the place of the right one."""
    key = ensure_key(bundle.parent.parent / "key.pem")
    sign_digests(bundle, {**_digests(bundle), CONFIG: "1" * 64}, key)


def _signature_over_more(bundle: Path) -> None:
    key = ensure_key(bundle.parent.parent / "key.pem")
    sign_digests(bundle, {**_digests(bundle), "extra": "1" * 64}, key)


def _forged_payload(bundle: Path) -> None:
    """Change what was signed and keep the signature."""
    signature = json.loads((bundle / SIGNATURE).read_bytes())
    payload = base64.b64decode(signature["dsseEnvelope"]["payload"]).replace(b"config.yaml", b"config.yamk")
    signature["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    (bundle / SIGNATURE).write_text(json.dumps(signature))


def _record_by_another(bundle: Path) -> None:
    record = SignOff.model_validate_json(record_path(bundle).read_bytes())
    for path in (record_path(bundle), record_signature_path(bundle)):
        path.unlink()
    write_record(bundle, record, _other_key(bundle))


def _record_with(**changes: str) -> Harm:
    """Sign another record with the right key."""

    def harm(bundle: Path) -> None:
        record = SignOff.model_validate_json(record_path(bundle).read_bytes()).model_copy(update=changes)
        for path in (record_path(bundle), record_signature_path(bundle)):
            path.unlink()
        write_record(bundle, record, ensure_key(bundle.parent.parent / "key.pem"))

    return harm


def _record_of_another(bundle: Path) -> None:
    key = ensure_key(bundle.parent.parent / "key.pem")
    other = make_good(bundle.parent, key, "other-v1")
    for place in (record_path, record_signature_path):
        place(other).replace(place(bundle))


_BAD_RECORD = (
    "{b}.signoff.json: bad signature: {b}.signoff.sig does not fit it under the key {folder}/key.pem.pub, nor under "
    "that of an approver for whom this key vouches"
)
_OTHERS = "bad signature: it was made over other files, or other content, than are here"
_INCOMPLETE = "missing: the bundle {b} has no complete sign-off record"

SIGNED = (
    Case("record edited", edited(record_path, b'"baseline"', b'"signed-off"'), _BAD_RECORD),
    Case("record signed by another key", _record_by_another, _BAD_RECORD),
    Case("record of another bundle", _record_of_another, "{b}.signoff.json: it was signed for other-v1, not for {b}"),
    Case("record removed", lambda bundle: record_path(bundle).unlink(), f"{{b}}.signoff.json: {_INCOMPLETE}"),
    Case(
        "signature of the record removed",
        lambda bundle: record_signature_path(bundle).unlink(),
        f"{{b}}.signoff.sig: {_INCOMPLETE}",
    ),
    Case(
        "signature removed",
        remove(SIGNATURE),
        f"{{b}}/{SIGNATURE}: missing: the bundle is not signed; --allow-unsigned loads it all the same",
    ),
    Case(
        "signature by another key",
        _signed_by_another,
        f"{{b}}/{SIGNATURE}: bad signature: Key mismatch: The public key hash in the signature's verification material does not "
        "match the provided public key.",
        "blessed",
    ),
    Case("signature over other content", _signature_over_others, f"{{b}}/{SIGNATURE}: {_OTHERS}", "blessed"),
    Case("signature over a file that is not there", _signature_over_more, f"{{b}}/{SIGNATURE}: {_OTHERS}", "blessed"),
    Case(
        "signature with another payload",
        _forged_payload,
        f"{{b}}/{SIGNATURE}: bad signature: it was not made with this key or was changed",
        "blessed",
    ),
    Case(
        "signature that is no JSON",
        put(SIGNATURE, b"signed!"),
        f"{{b}}/{SIGNATURE}: bad signature: not JSON: Expecting value at character 0",
        "blessed",
    ),
    Case(
        "signature nested without end",
        put(SIGNATURE, b'{"a":' * 50_000),
        f"{{b}}/{SIGNATURE}: bad signature: JSON nested more than 100 levels deep",
        "blessed",
    ),
    Case(
        "signature with a key twice",
        put(SIGNATURE, b'{"mediaType": 1, "mediaType": 2}'),
        f"{{b}}/{SIGNATURE}: bad signature: JSON with the key 'mediaType' twice",
        "blessed",
    ),
    Case(
        "signature exchanged after sign-off",
        flip(SIGNATURE, -10),
        f"{{b}}/{SIGNATURE}: modified: sha256 <digest>, the sign-off record says <digest>",
    ),
    Case(
        "manifest edited to fit",
        in_turn(put(CONFIG, b"{}"), entries({"path": "x"})),
        f"{{b}}/{MANIFEST}: modified: sha256 <digest>, the sign-off record says <digest>",
    ),
    Case(
        "report other than signed off",
        _record_with(report_sha256="1" * 64),
        f"{{b}}/{REPORT}: modified: it is not the report that was signed off",
    ),
    Case(
        "optimizer other than signed off",
        _record_with(optimizer_hash="1" * 64),
        f"{{b}}/{METADATA}: optimizer hash <digest> is not the one signed off, <digest> ({{b}}.signoff.json)",
    ),
)

_RUNS = "pickle: it runs code when it is read; weights are safetensors"
_ZIP = "zip archive: torch checkpoints are zips of pickles, and what it unpacks to is unknown"


def _content(name: str, place: str, content: bytes, fault: str) -> Case:
    return Case(name, put(place, content), f"{{b}}/{place}: {fault}", "resealed")


DISGUISED = (
    _content("pickle as safetensors", WEIGHTS, _PICKLE, _RUNS),
    _content("pickle as JSON", CONFIG, _PICKLE, _RUNS),
    _content("pickle of protocol 2 as weights", "model/engine.bin", _PICKLE_2, _RUNS),
    _content("pickle of text as notes", "notes.txt", _PICKLE_0, _RUNS),
    _content(
        "pickle by its name",
        "model/data.pkl",
        b"x",
        "code: files that end in .pkl run when they are read; weights are safetensors",
    ),
    _content(
        "torch checkpoint",
        "model/pytorch_model.pt",
        _zip(),
        "code: files that end in .pt run when they are read; weights are safetensors",
    ),
    _content("torch checkpoint by another name", "model/weights.bin", _zip(), _ZIP),
    _content("torch checkpoint as safetensors", WEIGHTS, _zip(), _ZIP),
    _content("torch checkpoint of old", "model/pytorch_model.bin", _TORCH_LEGACY, _RUNS),
    _content("zip behind tensors", WEIGHTS, GOOD[WEIGHTS] + _zip(), "zip archive: one is hidden behind other bytes"),
    _content(
        "zip within tensors",
        WEIGHTS,
        safetensors({"a": tensor(0, len(_zip()), len(_zip()), dtype="U8")}, 0) + _zip(),
        "zip archive: one is hidden behind its tensors",
    ),
    _content("zip behind text", "README.md", b"# Model\n" + _zip(), "zip archive: one is hidden behind other bytes"),
    _content(
        "NumPy file of objects",
        "model/scales.npy",
        _npy(),
        "pickle: a NumPy file of Python objects, which run code when they are read",
    ),
    _content(
        "pickle in gzip",
        "model/weights.bin",
        gzip.compress(_PICKLE),
        "gzip: what is in a compressed file cannot be looked at",
    ),
    _content("tar archive", "model/weights.bin", _tar(), "tar archive: what it unpacks to is unknown"),
    _content(
        "code of the model",
        "model/modeling_llama.py",
        b"print()",
        "code: files that end in .py run when they are read; weights are safetensors",
    ),
    _content("native code", "model/op.bin", b"\x7fELF\x02\x01\x01" + bytes(64), "ELF program: a bundle holds no native code"),
    _content(
        "HDF5 weights",
        "model/weights.bin",
        b"\x89HDF\r\n\x1a\n" + bytes(64),
        "HDF5: its readers for models run code that it holds",
    ),
    _content(
        "objects in YAML",
        "config.yaml",
        b"a: !!python/object/apply:print [x]\n",
        "unsafe YAML: it names Python objects to be made",
    ),
    _content(
        "entities in XML",
        "model/openvino_model.xml",
        b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>',
        "unsafe XML: it declares a document type or entities",
    ),
    _content(
        "JSON nested without end",
        "model/tokenizer.json",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "unsafe JSON: JSON nested more than 100 levels deep",
    ),
    _content(
        "JSON with a key twice",
        CONFIG,
        b'{"model_type": "llama", "model_type": "gpt2"}',
        "unsafe JSON: JSON with the key 'model_type' twice",
    ),
    _content(
        "JSON that is no JSON",
        CONFIG,
        b"{'model_type': 'llama'}",
        "unsafe JSON: not JSON: Expecting property name enclosed in double quotes at character 1",
    ),
    _content(
        "JSON of an endless number",
        CONFIG,
        b'{"a": ' + b"9" * 5000 + b"}",
        "unsafe JSON: JSON with a number of 5000 digits, at most 100 are read",
    ),
    Case(
        "metadata without an optimizer",
        put(METADATA, b"{}"),
        f"{{b}}/{METADATA}: it does not state the optimizer_hash",
        "resealed",
    ),
)


def _weights(name: str, content: bytes, fault: str) -> Case:
    return _content(f"tensors {name}", WEIGHTS, content, f"unsafe safetensors: {fault}")


_FILE = "model.safetensors"
TENSORS = (
    _weights(
        "that overlap",
        safetensors({"a": tensor(0, 16, 4), "b": tensor(8, 24, 4)}, 24),
        f"{_FILE}: tensor b starts at byte 8, expected 16: it overlaps its neighbour; copy the file again",
    ),
    _weights(
        "with a gap",
        safetensors({"a": tensor(0, 16, 4), "b": tensor(20, 36, 4)}, 36),
        f"{_FILE}: tensor b starts at byte 20, expected 16: it leaves a gap before it; copy the file again",
    ),
    _weights(
        "beyond the end",
        safetensors({"a": tensor(0, 1 << 40, 1 << 38)}, 16),
        f"{_FILE} holds 108 bytes where its header describes 1099511627868; copy it again",
    ),
    _weights(
        "before the beginning",
        safetensors({"a": tensor(-16, 0, 4)}, 16),
        f"{_FILE}: tensor a starts at byte -16, expected 0: it overlaps its neighbour; copy the file again",
    ),
    _weights(
        "that end before they begin",
        safetensors({"a": tensor(0, 16, 4), "b": tensor(16, 8, 2)}, 16),
        f"{_FILE}: tensor b of F32 [2] has -8 bytes, not 8; copy it again",
    ),
    _weights(
        "with bytes behind",
        safetensors({"a": tensor(0, 16, 4)}, 20),
        f"{_FILE} holds 90 bytes where its header describes 86; copy it again",
    ),
    _weights(
        "of another size than shape",
        safetensors({"a": tensor(0, 16, 5)}, 16),
        f"{_FILE}: tensor a of F32 [5] has 16 bytes, not 20; copy it again",
    ),
    _weights(
        "of a shape that overflows",
        safetensors({"a": tensor(0, 0, 1 << 32, 1 << 32)}, 0),
        f"{_FILE}: tensor a of F32 [4294967296, 4294967296] has 0 bytes, not 73786976294838206464; copy it again",
    ),
    _weights(
        "of negative shape",
        safetensors({"a": tensor(0, 16, -2, -2)}, 16),
        f"{_FILE}: tensor a of F32 [-2, -2] has 16 bytes, not 16; copy it again",
    ),
    _weights(
        "of an unknown type",
        safetensors({"a": tensor(0, 16, 4, dtype="OBJ")}, 16),
        f"{_FILE}: tensor a has the unknown type 'OBJ'; known: {', '.join(ITEM_BITS)}",
    ),
    _weights(
        "of one name",
        safetensors(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8
        ),
        f"{_FILE} has an unreadable safetensors header; copy the file again",
    ),
    _weights(
        "with a header longer than the file",
        (1 << 40).to_bytes(8, "little") + b"{}",
        f"{_FILE} is no whole safetensors file: 10 bytes, header of {1 << 40}; copy it again",
    ),
    _weights(
        "with a header that is no JSON",
        safetensors(b"{oops", 16),
        f"{_FILE} has an unreadable safetensors header; copy the file again",
    ),
    _weights(
        "with a nested header",
        safetensors(b'{"a":' * 50_000, 16),
        f"{_FILE} has an unreadable safetensors header; copy the file again",
    ),
    _weights("cut short", b"\x10\x00", f"{_FILE} is no whole safetensors file: 2 bytes, header of 16; copy it again"),
)
