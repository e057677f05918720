"""One Prefect server for all runs in one folder. It ends with the last of them, however that ends.

Prefect's own temporary server belongs to one process: two runs would open one SQLite file from two servers, and after
kill -9 it stays behind. Here file locks, which the kernel drops with their holder, say who is there:

- `start.lock`: somebody looks for the server or starts it,
- `alive.lock`: held by the server,
- `users.lock`: held shared by every run; the server waits to hold it alone, and then no run is left.

`python -m flows.server FOLDER FD` is the server; FD is a listening socket, so that its address is known at once.
"""

import atexit
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    import uvicorn

START_S = 180.0
"""Longest start: migration of a new database on two busy cores took 40 s."""
END_S = 15.0
"""Longest end; then the server leaves without ceremony."""
LOG_TAIL = 2000
"""Characters of the server's log that an error shows."""


class LocalServer:
    """A run's share in the server of one folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "start.lock"):
            self._users = _lock(folder / "users.lock", fcntl.LOCK_SH)  # waits for a server that is just ending
            if not _alive(folder):
                _start(folder)
            self.api_url = str(json.loads((folder / "server.json").read_bytes())["api_url"])
        atexit.register(self.leave)  # registered before prefect is imported, so it runs after prefect has sent its last events

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            RuntimeError: it ended, or was not ready within `START_S` seconds.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.api_url}/health", timeout=START_S):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if not _alive(self._folder):
                    break
                time.sleep(0.1)
        log = self._folder / "server.log"
        raise RuntimeError(f"the Prefect server of {self._folder} does not answer; {log} ends: {_tail(log)}")

    def leave(self) -> None:
        """Give the share back; the last run waits for the server to end, so that nothing is written afterwards."""
        if self._users < 0:
            return
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            last = True
        except BlockingIOError:
            last = False
        fcntl.flock(self._users, fcntl.LOCK_UN)
        os.close(self._users)
        self._users = -1
        deadline = time.monotonic() + END_S
        while last and time.monotonic() < deadline and _alive(self._folder):
            time.sleep(0.05)


def _start(folder: Path) -> None:
    """Start the server in a session of its own, so that a signal to the run's group does not reach it."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, (folder / "server.log").open("ab") as log:
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        command = [sys.executable, "-P", "-m", "flows.server", str(folder), str(descriptor)]
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(descriptor,)
        )
        while not _alive(folder):  # a fraction of a second: the server locks before it imports prefect
            if started.poll() is not None:
                raise RuntimeError(f"the Prefect server ended at once; {log.name} ends: {_tail(folder / 'server.log')}")
            time.sleep(0.02)
    document = {"api_url": f"http://127.0.0.1:{port}/api", "pid": started.pid}
    write_atomically(folder / "server.json", json.dumps(document).encode())


def _lock(path: Path, operation: int) -> int:
    """Return a descriptor that holds the lock until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, operation)
    return descriptor


def _alive(folder: Path) -> bool:
    """Return whether a server holds its lock."""
    try:
        os.close(_lock(folder / "alive.lock", fcntl.LOCK_SH | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return " ".join(text[-LOG_TAIL:].split()) or "(empty)"


def serve(folder: Path, descriptor: int) -> None:
    """Serve the API until no run is left."""
    _lock(folder / "alive.lock", fcntl.LOCK_EX)
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=2))
    threading.Thread(target=_end_with_last_user, args=(folder, server), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=descriptor)])


def _end_with_last_user(folder: Path, server: "uvicorn.Server") -> None:
    _lock(folder / "users.lock", fcntl.LOCK_EX)
    server.should_exit = True
    time.sleep(END_S - 5)
    os._exit(1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
