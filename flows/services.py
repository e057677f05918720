"""`make services`: the servers of deploy/compose.yaml from this machine's own programs, on loopback, without Docker.

`python -m flows.services start|stop|status`. Each is a process of its own that outlives this one; `services.json` in the folder
says which. What is not installed is not started, and said by name with what installs it; without PostgreSQL the two servers
that would use it keep SQLite files.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import psutil
from pydantic import RootModel, ValidationError

from flows.bootstrap import home
from flows.service_programs import START_ORDER, Missing, Plan, Setting
from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError, ModelOptimizerError
from model_optimizer.store import canonical_json, write_atomically

STATE = "services.json"
START_S = 180.0
"""Longest start of one: the migration of a new database on two busy cores took 40 s."""
STOP_S = 20.0
LOG_TAIL = 1500
"""Characters of a log that an error shows."""


class Service(Frozen):
    """One process that this module started; `created` tells it from a later one with its number."""

    pid: int
    created: float
    port: int
    url: str


class _State(RootModel[dict[str, Service]]):
    """services.json."""


@dataclass(slots=True)
class Outcome:
    """What `start` did."""

    running: dict[str, Service] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Name -> why it was not started and what would help."""
    notes: list[str] = field(default_factory=list)

    def exports(self) -> tuple[str, ...]:
        """Return lines for a shell."""
        urls = {name: service.url for name, service in self.running.items()}
        known = {
            "PREFECT_API_URL": urls.get("prefect"),
            "MLFLOW_TRACKING_URI": urls.get("mlflow"),
            "REDIS_URL": urls.get("redis"),
            "DATABASE_URL": urls.get("postgres"),
            "PROMETHEUS_URL": urls.get("prometheus"),
        }
        return tuple(f"export {name}={url}" for name, url in known.items() if url is not None)


def start(folder: Path, names: Iterable[str] = START_ORDER) -> Outcome:
    """Start what does not run yet, one after the other, and return when all answer.

    Raises:
        ConfigError: an unknown name, a process that ended, or one that does not answer in time; its log's end is shown.
        StorageError: the folder cannot be written.
    """
    wanted = tuple(names)
    if unknown := set(wanted) - START_ORDER.keys():
        raise ConfigError(f"unknown service {', '.join(sorted(unknown))}; known: {', '.join(START_ORDER)}")
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    with filelock.FileLock(folder / "lock"):
        known = _read(folder)
        for name in (name for name in START_ORDER if name in wanted):
            if name in known and _process(known[name]) is not None:
                outcome.running[name] = known[name]
                continue
            urls = {it: service.url for it, service in outcome.running.items()}
            setting = Setting(folder / name, _port(known.get(name)), urls)
            plan = START_ORDER[name](setting)
            if isinstance(plan, Missing):
                outcome.missing[name] = plan.because
                continue
            outcome.notes += plan.notes
            outcome.running[name] = known[name] = _spawn(plan, setting)
            _write(folder, known)
            _wait(name, known[name], plan, setting)
    return outcome


def stop(folder: Path) -> tuple[str, ...]:
    """End every process that `start` left, the last first; return their names."""
    if not (folder / STATE).is_file():
        return ()
    ended = []
    with filelock.FileLock(folder / "lock"):
        known = _read(folder)
        for name in sorted(known, key=list(START_ORDER).index, reverse=True):
            process = _process(known[name])
            if process is not None:
                _end(process, signal.SIGINT if name == "postgres" else signal.SIGTERM)  # SIGINT: without waiting for clients
                ended.append(name)
    return tuple(ended)


def status(folder: Path) -> dict[str, Service]:
    """Return what runs."""
    return {name: service for name, service in _read(folder).items() if _process(service) is not None}


def _log(setting: Setting) -> Path:
    return setting.folder.with_suffix(".log")


def _spawn(plan: Plan, setting: Setting) -> Service:
    """Start a process in a session of its own, so that what ends this one does not reach it."""
    with _log(setting).open("ab") as log:
        started = subprocess.Popen(
            plan.command,
            cwd=setting.folder,
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=plan.user,
            group=plan.user,
            extra_groups=None if plan.user is None else (),
        )
    return Service(pid=started.pid, created=psutil.Process(started.pid).create_time(), port=setting.port, url=plan.url)


def _wait(name: str, service: Service, plan: Plan, setting: Setting) -> None:
    """Return when the service answers and what comes after that is done.

    Raises:
        ConfigError: it ended, or does not answer in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if plan.answers():
            plan.finish()
            return
        if _process(service) is None:
            raise ConfigError(f"{name} ended at once; {_log(setting)} ends: {_tail(_log(setting))}")
        time.sleep(0.1)
    if process := _process(service):
        _end(process, signal.SIGKILL)
    raise ConfigError(f"{name} did not answer within {START_S:.0f} s; {_log(setting)} ends: {_tail(_log(setting))}")


def _process(service: Service) -> psutil.Process | None:
    """Return the process where it still is the one that was started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(service.pid)
        if abs(process.create_time() - service.created) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _end(process: psutil.Process, how: signal.Signals) -> None:
    """Ask a process to end, and end it with its whole group where it takes too long."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(how)
        with suppress(psutil.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it led its group; workers of MLflow may be left


def _port(earlier: Service | None) -> int:
    """Return the port that a service had before, so that exported addresses stay true; a free one where that is taken."""
    for port in (earlier.port if earlier else 0, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return int(probe.getsockname()[1])
    raise ConfigError("no port is free on 127.0.0.1")


def _read(folder: Path) -> dict[str, Service]:
    try:
        return dict(_State.model_validate_json((folder / STATE).read_bytes()).root)
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        raise ConfigError(f"{folder / STATE} cannot be read; end what runs by hand and remove the file") from error


def _write(folder: Path, known: dict[str, Service]) -> None:
    """Write the state; its addresses hold passwords, so nobody else may read it."""
    write_atomically(folder / STATE, canonical_json({name: service.model_dump() for name, service in known.items()}))
    (folder / STATE).chmod(0o600)


def _tail(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].split()) or "(empty)"


def main(arguments: list[str]) -> int:
    """Run one command; exports go to stdout, everything else to stderr, so that a shell can eval what it gets."""
    parser = argparse.ArgumentParser(prog="python -m flows.services", description="servers for tests and one machine")
    parser.add_argument("what", choices=("start", "stop", "status"))
    parser.add_argument("names", nargs="*", help=f"for start: some of {', '.join(START_ORDER)}; left out: all")
    parser.add_argument("--folder", type=Path, default=home() / "services")
    asked = parser.parse_args(arguments)
    try:
        if asked.what == "stop":
            print("stopped:", ", ".join(stop(asked.folder)) or "nothing ran", file=sys.stderr)
            return 0
        if asked.what == "status":
            outcome = Outcome(running=status(asked.folder))
        else:
            outcome = start(asked.folder, asked.names or START_ORDER)
    except ModelOptimizerError as error:
        print(f"services: {error}", file=sys.stderr)
        return error.exit_code
    for line in outcome.exports():
        print(line)
    for name, because in outcome.missing.items():
        print(f"# {name} is not started: {because}", file=sys.stderr)
    for note in outcome.notes:
        print(f"# {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
