"""The list of `hostile_bundles`: what is done to a bundle, and the words with which it is refused."""

import json
import os
from pathlib import Path

from benchmarks.hostile_bundles import (
    GOOD,
    WEIGHTS,
    Case,
    Harm,
    backwards,
    crowd,
    device,
    edited,
    entries,
    fifo,
    flip,
    grow,
    hard_link,
    in_bundle,
    in_turn,
    link,
    manifest_with,
    put,
    put_raw,
    remove,
    unix_socket,
)
from benchmarks.hostile_content import DISGUISED, SIGNED, TENSORS
from model_optimizer.release.manifest import MANIFEST, SIGNATURE
from model_optimizer.store import canonical_json

_PLAIN = "a bundle holds only plain files"
_RELATIVE = "entries are relative, without '..', in normal form"
_SLASH = "entries are relative, with '/' between their parts"
_BLANK = "a name that begins or ends with a blank, or ends with a dot, is another one on other systems"
_ONE = "are one file on some file systems"


ON_DISK = (
    Case("symlink to a file outside", link("link", "/etc/hostname"), f"{{b}}/link: symlink: {_PLAIN}"),
    Case("symlink in the place of the weights", link(WEIGHTS, "../../moved"), f"{{b}}/{WEIGHTS}: symlink: {_PLAIN}"),
    Case("symlink in the place of a folder", link("model", "../moved"), f"{{b}}/model: symlink: {_PLAIN}"),
    Case("symlink to nowhere", link("gone", "/nowhere"), f"{{b}}/gone: symlink: {_PLAIN}"),
    Case("symlink in the place of the manifest", link(MANIFEST, "../moved"), f"{{b}}/{MANIFEST}: symlink: {_PLAIN}"),
    Case("symlink in the place of the signature", link(SIGNATURE, "../moved"), f"{{b}}/{SIGNATURE}: symlink: {_PLAIN}"),
    Case("fifo", fifo, f"{{b}}/pipe: special file: {_PLAIN}"),
    Case("socket", unix_socket, f"{{b}}/socket: special file: {_PLAIN}"),
    Case("device", device, f"{{b}}/null: special file: {_PLAIN}"),
    Case(
        "hard link from outside",
        hard_link,
        f"{{b}}/{WEIGHTS}: hard link: 1 of its names lie outside the bundle; copy the bundle",
    ),
    Case("more files than any bundle", crowd, "{b}: too many files: more than 10000 with their folders"),
    Case(
        "name with a line break",
        put("a\nb"),
        "{b}/'a\\nb': unsafe path: control, format or private characters in a name",
    ),
    Case(
        "name that reads backwards",
        put("exe\u202etxt.json"),
        "{b}/'exe\\u202etxt.json': unsafe path: control, format or private characters in a name",
    ),
    Case("name that is not UTF-8", put_raw(b"caf\xe9"), "{b}/'caf\\udce9': unsafe path: it is not UTF-8"),
    Case("name in decomposed form", put("cafe\u0301.txt"), "{b}/cafe\u0301.txt: unsafe path: its Unicode form is not NFC"),
    Case("device of Windows", put("model/CON.json"), "{b}/model/CON.json: unsafe path: 'CON' is a device on other systems"),
    Case("name with a dot at its end", put("config.yaml."), f"{{b}}/config.yaml.: unsafe path: {_BLANK}"),
    Case("name with a blank at its end", put("config.yaml "), f"{{b}}/config.yaml : unsafe path: {_BLANK}"),
    Case("name of a hidden stream", put("a:b"), "{b}/a:b: unsafe path: ':' in a name means something else on other systems"),
    Case("name with backslashes", put("..\\evil"), f"{{b}}/..\\evil: unsafe path: {_SLASH}"),
    Case(
        "folders in folders",
        put("d/" * 16 + "x"),
        "{b}/" + "d/" * 16 + "x: unsafe path: 17 levels deep, at most 16 are allowed",
    ),
    Case(
        "path of many bytes",
        put("/".join(["n" * 180] * 3)),
        "{b}/" + "/".join(["n" * 180] * 3) + ": unsafe path: 542 bytes, at most 512 are allowed",
    ),
    Case("file added", put("note.txt"), "{b}/note.txt: added: manifest.json does not list it"),
    Case("file removed", remove("config.yaml"), "{b}/config.yaml: missing: manifest.json lists it"),
    Case(
        "file renamed",
        in_turn(remove("config.yaml"), put("config.yml", GOOD["config.yaml"])),
        "{b}/config.yaml: missing: manifest.json lists it; {b}/config.yml: added: manifest.json does not list it",
    ),
    Case(
        "byte of the weights flipped", flip(WEIGHTS, -1), f"{{b}}/{WEIGHTS}: modified: sha256 <digest>, {MANIFEST} says <digest>"
    ),
    Case(
        "byte of the code flipped",
        flip("health_check.sh", 3),
        f"{{b}}/health_check.sh: modified: sha256 <digest>, {MANIFEST} says <digest>",
    ),
    Case("file cut short", grow("config.yaml", 3), f"{{b}}/config.yaml: modified: 3 bytes, {MANIFEST} says 11"),
    Case(
        "file grown into a bomb",
        grow(WEIGHTS, 1 << 40),
        f"{{b}}/{WEIGHTS}: modified: {1 << 40} bytes, {MANIFEST} says {len(GOOD[WEIGHTS])}",
    ),
    Case(
        "manifest grown into a bomb",
        grow(MANIFEST, 1 << 40),
        f"{{b}}/{MANIFEST}: too large: {1 << 40} bytes, at most {16 << 20} are read",
    ),
    Case(
        "signature grown into a bomb",
        grow(SIGNATURE, 1 << 40),
        f"{{b}}/{SIGNATURE}: too large: {1 << 40} bytes, at most {16 << 20} are read",
    ),
)


def _entry(name: str, path: str, fault: str, shown: str = "") -> Case:
    return Case(
        f"entry {name}", entries({"path": path}), f"{{b}}/{MANIFEST}: unsafe path {shown or ascii(path)}: {fault}", "blessed"
    )


def _not_manifest(name: str, harm: Harm, detail: str) -> Case:
    return Case(f"manifest {name}", harm, f"{{b}}/{MANIFEST}: modified: it is not a manifest: {detail}", "blessed")


def sparse(bundle: Path) -> None:
    """Let the weights claim a tebibyte, and the manifest with them."""
    os.truncate(bundle / WEIGHTS, 1 << 40)
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    files = [{**entry, "num_bytes": 1 << 40} if entry["path"] == WEIGHTS else entry for entry in manifest["files"]]
    (bundle / MANIFEST).write_bytes(canonical_json({**manifest, "files": files}))


IN_MANIFEST = (
    _entry("that climbs", "../x", _RELATIVE),
    _entry("that climbs from within", "model/../../x", _RELATIVE),
    _entry("that is absolute", "/etc/passwd", _SLASH),
    _entry("with a dot", "./config.yaml", _RELATIVE),
    _entry("with two slashes", "model//config.json", _RELATIVE),
    _entry("with backslashes", "model\\config.json", _SLASH),
    _entry("of a drive", "C:/config.yaml", "':' in a name means something else on other systems"),
    _entry("without a name", "", _SLASH),
    _entry("with a control character", "a\x00b", "control, format or private characters in a name"),
    _entry("that is a lone surrogate", "a\ud800", "it is not UTF-8"),
    _entry("of a device", "model/nul", "'nul' is a device on other systems"),
    _entry("of a very long name", "n" * 256, "a name of 256 bytes, at most 255 are allowed", ascii("n" * 80)),
    _entry("for the manifest itself", MANIFEST, "the manifest lists neither itself nor the signature"),
    _entry("for the signature", SIGNATURE, "the manifest lists neither itself nor the signature"),
    Case("entry twice", entries({}), f"{{b}}/{MANIFEST}: duplicate entry 'config.yaml'", "blessed"),
    Case(
        "entry in another case",
        entries({"path": "CONFIG.yaml"}),
        f"{{b}}/{MANIFEST}: name collision: 'config.yaml' and 'CONFIG.yaml' {_ONE}",
        "blessed",
    ),
    Case(
        "entry with a ligature",
        entries({"path": "con\ufb01g.yaml"}),
        f"{{b}}/{MANIFEST}: name collision: 'config.yaml' and 'con\\ufb01g.yaml' {_ONE}",
        "blessed",
    ),
    Case(
        "entry below a file",
        entries({"path": "Config.yaml/x"}),
        f"{{b}}/{MANIFEST}: name collision: 'config.yaml' and 'Config.yaml' {_ONE}",
        "blessed",
    ),
    Case(
        "entry that looks like the signature",
        entries({"path": "Model.sig"}),
        f"{{b}}/{MANIFEST}: name collision: 'model.sig' and 'Model.sig' {_ONE}",
        "blessed",
    ),
    Case(
        "file in a folder of another case",
        put("MODEL/x.txt"),
        f"{{b}}/{MANIFEST}: name collision: 'MODEL' and 'model/config.json' {_ONE}",
        "resealed",
    ),
    Case(
        "more entries than any bundle",
        entries(*({"path": str(number)} for number in range(10_000))),
        f"{{b}}/{MANIFEST}: too many files: 10009, at most 10000 are allowed",
        "blessed",
    ),
    Case(
        "entry of a sparse bomb",
        sparse,
        f"{{b}}/{WEIGHTS}: sparse: {1 << 40} bytes of which 4096 are there; it would fill disks",
        "blessed",
    ),
    _not_manifest(
        "with a digest in capitals",
        entries({"path": "x", "sha256": "A" * 64}),
        "files.9.sha256: String should match pattern '^[0-9a-f]{64}$'",
    ),
    _not_manifest(
        "with a short digest",
        entries({"path": "x", "sha256": "a" * 40}),
        "files.9.sha256: String should match pattern '^[0-9a-f]{64}$'",
    ),
    _not_manifest(
        "with a digest and a line break",
        entries({"path": "x", "sha256": "a" * 64 + "\n"}),
        "files.9.sha256: String should match pattern '^[0-9a-f]{64}$'",
    ),
    _not_manifest(
        "with a named digest",
        entries({"path": "x", "sha256": "sha256:" + "a" * 57}),
        "files.9.sha256: String should match pattern '^[0-9a-f]{64}$'",
    ),
    _not_manifest(
        "with a negative size",
        entries({"path": "x", "num_bytes": -1}),
        "files.9.num_bytes: Input should be greater than or equal to 0",
    ),
    _not_manifest(
        "with half a byte",
        entries({"path": "x", "num_bytes": 1.5}),
        "files.9.num_bytes: Input should be a valid integer, got a number with a fractional part",
    ),
    _not_manifest(
        "with an unknown field", entries({"path": "x", "url": "http://x"}), "files.9.url: Extra inputs are not permitted"
    ),
    _not_manifest(
        "with unknown fields of its own", manifest_with(include="/etc/passwd"), "include: Extra inputs are not permitted"
    ),
    _not_manifest("without files", manifest_with(files=None), "files: Field required"),
    _not_manifest("without a format", manifest_with(bundle_format=None), "it states no bundle_format"),
    _not_manifest("that is a list", put(MANIFEST, b"[]"), "it states no bundle_format"),
    _not_manifest("that is empty", put(MANIFEST, b""), "not JSON: Expecting value at character 0"),
    _not_manifest("that is no UTF-8", put(MANIFEST, b"\xff"), "not JSON: it is not UTF-8"),
    _not_manifest("nested without end", put(MANIFEST, b"[" * 100_000), "JSON nested more than 100 levels deep"),
    _not_manifest(
        "with a key twice", put(MANIFEST, b'{"bundle_format":1,"files":[],"files":[]}'), "JSON with the key 'files' twice"
    ),
    Case(
        "manifest of an unknown format",
        manifest_with(bundle_format=2),
        f"{{b}}/{MANIFEST}: unknown bundle_format 2; this version reads 1",
        "blessed",
    ),
    Case(
        "manifest of a format in words",
        manifest_with(bundle_format="1"),
        f"{{b}}/{MANIFEST}: unknown bundle_format '1'; this version reads 1",
        "blessed",
    ),
    Case(
        "manifest of a format that is true",
        manifest_with(bundle_format=True),
        f"{{b}}/{MANIFEST}: unknown bundle_format True; this version reads 1",
        "blessed",
    ),
    Case("manifest of no file", manifest_with(files=[]), f"{{b}}/{MANIFEST}: modified: it lists no file", "blessed"),
    Case("manifest out of order", backwards, f"{{b}}/{MANIFEST}: modified: it is not in canonical form", "blessed"),
    Case(
        "manifest with a blank",
        edited(in_bundle(MANIFEST), b'"files":', b'"files": '),
        f"{{b}}/{MANIFEST}: modified: it is not in canonical form",
        "blessed",
    ),
    Case("manifest removed", remove(MANIFEST), f"{{b}}/{MANIFEST}: missing: what the bundle should hold is unknown"),
)


CASES: tuple[Case, ...] = (*ON_DISK, *IN_MANIFEST, *SIGNED, *DISGUISED, *TENSORS)
