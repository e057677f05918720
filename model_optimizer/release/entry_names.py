"""Which names files of a bundle may have: the same ones on every operating system, and nothing that leaves the bundle."""

import unicodedata
from collections.abc import Iterable

MAX_DEPTH = 16
MAX_PATH_BYTES = 512
MAX_PART_BYTES = 255
"""Of one name. Source: NAME_MAX of Linux; Windows and macOS allow 255 characters."""
_NUMBERED = tuple(f"{port}{number}" for port in ("com", "lpt") for number in "123456789¹²³")
_DEVICES = frozenset({"con", "prn", "aux", "nul", "conin$", "conout$", *_NUMBERED})
"""Source: Microsoft, Naming Files, Paths, and Namespaces."""
_FORBIDDEN = frozenset('<>:"|?*')
"""Characters that Windows refuses or reads as something else (drives, streams, wildcards)."""


def path_fault(path: str) -> str | None:
    """Return why `path` cannot name a file of a bundle, or None."""
    if not path or path.startswith("/") or "\\" in path:
        return "entries are relative, with '/' between their parts"
    try:
        num_bytes = len(path.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if num_bytes > MAX_PATH_BYTES:
        return f"{num_bytes} bytes, at most {MAX_PATH_BYTES} are allowed"
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return f"{len(parts)} levels deep, at most {MAX_DEPTH} are allowed"
    return next((fault for part in parts if (fault := _part_fault(part))), None)


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """Return two paths that are one on a file system without case or with another Unicode form, or None.

    Folders count too, and so does a file where another path has a folder.
    """
    spelled: dict[str, str] = {}
    files: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for length in range(1, len(parts)):
            folder = "/".join(parts[:length])
            if (known := spelled.setdefault(folded(folder), folder)) != folder:
                return known, path
        if (twin := files.setdefault(folded(path), path)) != path:
            return twin, path
    return next(((file, spelled[key]) for key, file in files.items() if key in spelled), None)


def folded(path: str) -> str:
    """Return the form in which two names are equal that any file system may take for one."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def _part_fault(part: str) -> str | None:
    if part in ("", ".", ".."):
        return "entries are relative, without '..', in normal form"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"a name of {len(part.encode())} bytes, at most {MAX_PART_BYTES} are allowed"
    if not part.isprintable():
        return "control, format or private characters in a name"
    if unicodedata.normalize("NFC", part) != part:
        return "its Unicode form is not NFC"
    if part[-1] in ". " or part[0] == " ":
        return "a name that begins or ends with a blank, or ends with a dot, is another one on other systems"
    if found := _FORBIDDEN & set(part):
        return f"{min(found)!r} in a name means something else on other systems"
    if part.split(".")[0].rstrip().casefold() in _DEVICES:
        return f"{part.split('.')[0]!r} is a device on other systems"
    return None
