"""What a file may not be, whatever its name says: decided from its first bytes, before any reader of its format sees them.

A bundle holds weights as safetensors or in a runtime's own format, and text. Pickles run code when they are read, archives and
compressed files hide what they hold, and a damaged header sends a reader out of bounds.
"""

import pickletools
import re
from io import BytesIO
from pathlib import Path, PurePosixPath

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import header_bytes, parse_header
from model_optimizer.release.strict_json import MAX_JSON_BYTES, json_fault
from model_optimizer.release.tree import Content

_HEAD_BYTES = 4096
MAX_TEXT_BYTES = 64 << 20
_CODE_SUFFIXES = frozenset(
    {".py", ".pyc", ".pyo", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".msgpack", ".h5"}
)
"""Formats whose usual readers run or import what they find."""
_JSON, _TEXT = (".json",), (".yaml", ".yml", ".xml")
_MAGIC = (
    (b"PK\x03\x04", "zip archive: torch checkpoints are zips of pickles, and what it unpacks to is unknown"),
    (b"PK\x05\x06", "zip archive: an empty one has no business in a bundle"),
    (b"\x1f\x8b", "gzip: what is in a compressed file cannot be looked at"),
    (b"BZh", "bzip2: what is in a compressed file cannot be looked at"),
    (b"\xfd7zXZ\x00", "xz: what is in a compressed file cannot be looked at"),
    (b"\x28\xb5\x2f\xfd", "zstandard: what is in a compressed file cannot be looked at"),
    (b"7z\xbc\xaf\x27\x1c", "7z archive: what it unpacks to is unknown"),
    (b"\x7fELF", "ELF program: a bundle holds no native code"),
    (b"MZ\x90\x00", "Windows program: a bundle holds no native code"),
    (b"\x89HDF\r\n\x1a\n", "HDF5: its readers for models run code that it holds"),
)
_TAR_AT, _TAR = 257, b"ustar"
_ZIP_END = b"PK\x05\x06"
_NPY = b"\x93NUMPY"
_NPY_OBJECT = re.compile(rb"""['"][<>|=]?O\d*['"]""")
_YAML_OBJECT = re.compile(rb"!!python|!<tag:yaml.org,2002:python")
_XML_ENTITY = re.compile(rb"<!(?:DOCTYPE|ENTITY)", re.IGNORECASE)
_NUM_OPCODES = 12
"""Of a binary pickle in a row; 68 of 256 bytes are opcodes, so that chance makes them, with the first two, below 1e-10."""
_CALLS = frozenset({"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"})
_NAMES = frozenset({"GLOBAL", "STACK_GLOBAL", "INST"})


def wanted(path: str, num_bytes: int, first: bytes) -> int:
    """Return how much of a file's beginning `content_fault` looks at; all of small structured text, a header, or its magic."""
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _JSON:
        return min(num_bytes, MAX_JSON_BYTES + 1)
    if suffix in _TEXT:
        return min(num_bytes, MAX_TEXT_BYTES + 1)
    if suffix == ".safetensors":
        try:
            return 8 + header_bytes(Path(path), num_bytes, first)
        except ConfigError:
            return _HEAD_BYTES
    return _HEAD_BYTES


def content_fault(path: str, content: Content) -> str | None:
    """Return `kind: detail` of what makes a file unfit for a bundle, or None.

    `content.head` holds as many bytes as `wanted` asked for.
    """
    suffix, head = PurePosixPath(path).suffix.lower(), content.head
    if suffix in _CODE_SUFFIXES:
        return f"code: files that end in {suffix} run when they are read; weights are safetensors"
    if suffix == ".safetensors":
        return _safetensors_fault(path, content)
    if fault := _disguise(content):
        return fault
    if suffix in _JSON and (fault := json_fault(head)):
        return f"unsafe JSON: {fault}"
    if suffix in _TEXT and content.num_bytes > MAX_TEXT_BYTES:
        return f"too large: {content.num_bytes} bytes of text, at most {MAX_TEXT_BYTES} are read"
    if suffix in (".yaml", ".yml") and _YAML_OBJECT.search(head):
        return "unsafe YAML: it names Python objects to be made"
    if suffix == ".xml" and _XML_ENTITY.search(head):
        return "unsafe XML: it declares a document type or entities"
    return None


def _safetensors_fault(path: str, content: Content) -> str | None:
    """Return what is wrong with a safetensors file; where it is something else altogether, say what."""
    name = Path(PurePosixPath(path).name)
    try:
        length = header_bytes(name, content.num_bytes, content.head)
        parse_header(name, content.num_bytes, content.head[8 : 8 + length])
    except ConfigError as error:
        return _disguise(content) or f"unsafe safetensors: {error}"
    return "zip archive: one is hidden behind its tensors" if _ends_as_zip(content) else None


def _disguise(content: Content) -> str | None:
    """Return what kind of pickle, archive or program a file is by its bytes, or None."""
    head = content.head
    for magic, fault in _MAGIC:
        if head.startswith(magic):
            return fault
    if head[_TAR_AT:].startswith(_TAR):
        return "tar archive: what it unpacks to is unknown"
    if _ends_as_zip(content):
        return "zip archive: one is hidden behind other bytes"
    if head.startswith(_NPY) and _NPY_OBJECT.search(head[:_HEAD_BYTES]):
        return "pickle: a NumPy file of Python objects, which run code when they are read"
    if _is_pickle(head[:_HEAD_BYTES], is_whole=content.num_bytes <= _HEAD_BYTES):
        return "pickle: it runs code when it is read; weights are safetensors"
    return None


def _ends_as_zip(content: Content) -> bool:
    """Return whether the last bytes are the end of a zip archive whose directory lies where they say."""
    tail = content.tail
    if not tail.startswith(_ZIP_END) or len(tail) != 22 or tail[20:] != b"\0\0":
        return False
    directory_bytes, start = int.from_bytes(tail[12:16], "little"), int.from_bytes(tail[16:20], "little")
    return start + directory_bytes + len(tail) <= content.num_bytes


def _is_pickle(head: bytes, *, is_whole: bool) -> bool:
    """Return whether bytes are a pickle of any protocol: opcodes only, that begin, call or end as one does. Nothing is run."""
    binary = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    seen: list[str] = []
    ended = False
    try:
        for opcode, _, position in pickletools.genops(BytesIO(head)):
            seen.append(opcode.name)
            ended = opcode.name == "STOP" and is_whole and position is not None and position + 1 == len(head.rstrip(b"\r\n"))
    except (ValueError, KeyError, IndexError, UnicodeDecodeError):
        pass  # no opcode, or cut off by the end of what is looked at
    if binary:  # torch's old files are several pickles one after the other
        return "STOP" in seen or len(seen) >= _NUM_OPCODES
    return bool(_NAMES & set(seen)) and bool(_CALLS & set(seen)) and (ended or (not is_whole and len(seen) >= _NUM_OPCODES))
