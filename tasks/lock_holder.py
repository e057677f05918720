"""Who holds the lock of a SQLite database: the hint that `database is locked` leaves out."""

import os
from pathlib import Path

LOCKS = Path("/proc/locks")
LOCKED_WORDS = ("database is locked", "database table is locked")
SQLITE = "sqlite:///"


def lock_hint(uri: str, message: str) -> str:
    """Return a clause that names who holds the database of `uri`; nothing where `message` does not say that it is locked."""
    if not uri.startswith(SQLITE) or not any(words in message for words in LOCKED_WORDS):
        return ""
    database = Path(uri.removeprefix(SQLITE).partition("?")[0])
    found = holders(database)
    who = ", ".join(f"process {pid} ({command})" for pid, command in found) or "another process"
    return f"; {who} holds {database}: it may be an `mlflow ui`, a backup or a file browser; once it ends the records are sent"


def holders(database: Path) -> tuple[tuple[int, str], ...]:
    """Return number and command line of every other process that holds a lock on the database or on its journal's index."""
    inodes = {str(path.stat().st_ino) for path in (database, database.with_name(f"{database.name}-shm")) if path.exists()}
    found: dict[int, str] = {}
    for line in LOCKS.read_text(encoding="ascii").splitlines() if LOCKS.exists() else ():
        words = line.replace("->", "").split()  # 1: POSIX ADVISORY WRITE 4711 08:01:131 1073741824 1073742335
        pid, inode = int(words[4]), words[5].rpartition(":")[2]
        if words[1] == "POSIX" and inode in inodes and pid not in (-1, 0, os.getpid()):
            found[pid] = _command(pid)
    return tuple(sorted(found.items()))


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return "ended"
    return " ".join(words)[:80] or "unnamed"
