"""The local Prefect server: one per folder, and gone with the last run even when that was killed."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from outside import own_surroundings, wait_until
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

RUN = """
import sys
from pathlib import Path
from flows.server import LocalServer
server = LocalServer(Path(sys.argv[1]))
server.wait()
print(server.api_url, flush=True)
sys.stdin.read()
"""


class Run:
    """A process that shares the server of a folder until its input ends."""

    def __init__(self, folder: Path):
        environment = own_surroundings() | {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def api_url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


def is_served(folder: Path) -> bool:
    with (folder / "alive.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A folder with an up-to-date database, copied from the session's server: making one takes 8 s of a core."""
    folder = tmp_path_factory.mktemp("prefect")
    made = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition(":///")[2]
    with closing(sqlite3.connect(made)) as source, closing(sqlite3.connect(folder / "prefect.db")) as copy:
        source.backup(copy)
    return folder


def test_local_server_is_shared_and_outlives_the_run_that_started_it(folder: Path) -> None:
    first, second = Run(folder), Run(folder)
    url = first.api_url()
    assert url.startswith("http://127.0.0.1:") and second.api_url() == url
    first.end()
    with urllib.request.urlopen(f"{url}/health") as answer:
        assert answer.status == 200
    second.end()
    assert not is_served(folder)  # the last run waits for its end, so that the folder can be removed at once


def test_local_server_ends_when_its_last_run_was_killed_with_its_group(folder: Path) -> None:
    run = Run(folder)
    assert run.api_url() and is_served(folder)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    wait_until(lambda: not is_served(folder))
