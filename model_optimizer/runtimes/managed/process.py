"""A server in an interpreter of its own: started, waited for, watched, and ended with everything that it started."""

import contextlib
import http.client
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from model_optimizer.errors import UnsupportedError

HOST = "127.0.0.1"
_LOOK_EVERY_S = 0.2
_END_S, _CHILDREN_END_S = 8.0, 2.0
"""For it to end by itself, and for what it started once it has ended."""
_TAIL_BYTES = 8192
_WORDS = 300


class ManagedProcess:
    """One server process; its output goes to a file, of which the end is quoted where it fails."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None):
        """Start it.

        Raises:
            UnsupportedError: it cannot be started, or the log cannot be written.
        """
        self._name = Path(command[0]).name
        try:
            # without a name of its own the file is gone with the last process that holds it, however that ends
            self._log = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise UnsupportedError(f"{command[0]} cannot be started: {error}; check managed.command and managed.log") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self, port: int, path: str, timeout_s: float) -> None:
        """Ask again and again until it answers with 200.

        Raises:
            UnsupportedError: it ended, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while get(port, path)[0] != 200:
            if self.has_ended:
                raise UnsupportedError(f"{self.epitaph()}; see managed.log, or run it by hand")
            if time.monotonic() > deadline:
                raise UnsupportedError(f"{self._name} does not answer after {timeout_s:g} s; raise managed.start_timeout_s")
            time.sleep(_LOOK_EVERY_S)

    def check(self) -> None:
        """Make sure that it still runs.

        Raises:
            RuntimeError: it has ended.
        """
        if self.has_ended:
            raise RuntimeError(self.epitaph())

    def epitaph(self) -> str:
        """Say how it ended, and its last line."""
        return f"{self._name} ended with {self._process.poll()}; its last words: {self._last_words()}"

    def resident_bytes(self) -> int:
        """Return the resident size of it and everything that it started."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total

    def end(self) -> None:
        """End it and everything that it started: kindly, then not."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            family = [*own.children(recursive=True), own]
        if not self.has_ended:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)  # it may take its children with it
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            family = psutil.wait_procs(family, timeout=_CHILDREN_END_S)[1]
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][-_WORDS:] if lines else "none"


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, key: str = "") -> tuple[int, bytes]:
    """Return status and body; status 0 where nobody answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
