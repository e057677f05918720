"""Processes outside the test process, and waiting for what they do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefect.settings import PREFECT_API_URL

from model_optimizer.artifacts.base import Stage

REPOSITORY = Path(__file__).parents[2]
LONGEST_S = 300.0


def wait_until(condition: Callable[[], bool], *, poll_s: float = 0.05) -> None:
    """Return when the condition holds; fail after `LONGEST_S` seconds."""
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(poll_s)


def surroundings(**more: str) -> dict[str, str]:
    """Return the environment of a process that talks to the test's Prefect server."""
    return {
        **os.environ,
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        **more,
    }


def own_surroundings() -> dict[str, str]:
    """Return the environment of a process that starts its own Prefect server, as on a user's machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}


@contextmanager
def running(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Keep a process running for the body; its output goes to `process.log` in the folder; it is ended, if need be by force."""
    with (folder / "process.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # a worker that is asked twice at once may never end
                process.kill()
                process.wait()


def prefect_command(*arguments: str) -> list[str]:
    """Return the `prefect` command of this interpreter's environment."""
    return [str(Path(sys.executable).with_name("prefect")), *arguments]


def model_optimizer_command(*arguments: str) -> list[str]:
    """Return the `model-optimizer` command of this interpreter's environment."""
    return [str(Path(sys.executable).with_name("model-optimizer")), *arguments]


def made_at(root: Path) -> dict[str, str]:
    """Return when every finished entry of the seven stages was begun, by `stage/key`."""
    found = {}
    for stage in Stage:
        for path in (root / "store" / stage).glob("*/artifact.json"):
            found[f"{stage}/{path.parent.name}"] = json.loads(path.read_bytes())["produced"]["started_at"]
    return found
