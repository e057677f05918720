"""`make services` with what PyPI and this machine have: real servers on loopback, in a folder that everybody may enter."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import psycopg2
import pytest
import redis

from flows.service_programs import Missing, Setting, plan_grafana, plan_prometheus
from flows.services import STATE, main, start, status, stop
from model_optimizer.errors import ConfigError


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="mo-services-"))
    place.chmod(0o755)
    yield place / "services"
    stop(place / "services")
    shutil.rmtree(place)


def test_postgres_and_redis_answer_keep_their_data_and_end(folder: Path) -> None:
    first = start(folder, ("redis", "postgres"))
    if first.missing:
        pytest.skip("; ".join(first.missing.values()))
    assert list(first.running) == ["postgres", "redis"]
    url = first.running["postgres"].url
    for name in ("prefect", "mlflow"):
        connection = psycopg2.connect(f"{url}/{name}")
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE kept (number integer); INSERT INTO kept VALUES (7)")
        connection.close()
    client = redis.Redis.from_url(first.running["redis"].url)
    client.set("kept", 11)
    client.close()
    again = start(folder, ("postgres", "redis"))
    assert again.running == first.running, "what runs is left alone"
    assert status(folder) == first.running
    processes = [psutil.Process(service.pid) for service in first.running.values()]
    assert stop(folder) == ("redis", "postgres")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert (status(folder), stop(folder)) == ({}, ())
    second = start(folder, ("postgres", "redis"))
    assert {name: service.url for name, service in second.running.items()} == {
        name: service.url for name, service in first.running.items()
    }, "exported addresses stay true"
    connection = psycopg2.connect(f"{url}/mlflow")
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT number FROM kept")
        assert cursor.fetchall() == [(7,)]
    connection.close()
    with redis.Redis.from_url(second.running["redis"].url) as client:
        assert client.get("kept") == b"11"


def test_nobody_without_the_password_gets_in_and_no_other_user_reads_it(folder: Path) -> None:
    outcome = start(folder, ("postgres", "redis"))
    if outcome.missing:
        pytest.skip("; ".join(outcome.missing.values()))
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(f"postgresql://model_optimizer:guess@127.0.0.1:{outcome.running['postgres'].port}/postgres")
    with pytest.raises(redis.exceptions.AuthenticationError), redis.Redis(port=outcome.running["redis"].port) as client:
        client.ping()
    for service in outcome.running.values():
        listening = [it for it in psutil.Process(service.pid).net_connections("inet") if it.status == psutil.CONN_LISTEN]
        assert {it.laddr.ip for it in listening} == {"127.0.0.1"}
        assert not any("guess" in part or service.url in part for part in psutil.Process(service.pid).cmdline())
    for path in (folder / STATE, folder / "postgres" / "password", folder / "redis" / "redis.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_start_tells_what_a_process_said_when_it_ends_at_once(folder: Path) -> None:
    outcome = start(folder, ("redis",))
    if outcome.missing:
        pytest.skip("; ".join(outcome.missing.values()))
    stop(folder)
    (folder / "redis" / "appendonlydir").mkdir(exist_ok=True)
    shutil.rmtree(folder / "redis" / "appendonlydir")
    (folder / "redis" / "appendonly.aof").unlink(missing_ok=True)
    (folder / "redis" / "dump.rdb").write_bytes(b"no database")
    (folder / "redis" / "appendonly.aof").write_bytes(b"neither")
    with pytest.raises(ConfigError, match=r"redis ended at once; .*redis\.log ends: .+"):
        start(folder, ("redis",))
    assert status(folder) == {}


def test_what_is_not_installed_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    setting = Setting(folder / "prometheus", 1, {})
    assert plan_prometheus(setting) == Missing("Prometheus is not installed; apt-get install prometheus")
    assert "docker compose -f deploy/compose.yaml up" in plan_grafana(setting).because
    assert start(folder, ("prometheus", "grafana")).missing.keys() == {"prometheus", "grafana"}
    with pytest.raises(ConfigError, match="unknown service kafka; known: postgres, redis, prefect, mlflow, prometheus, grafana"):
        start(folder, ("kafka",))


def test_main_prints_exports_alone_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "redis", "grafana", "--folder", str(folder)]) == 0
    out, told = capsys.readouterr()
    assert all(line.startswith("export REDIS_URL=redis://:") for line in out.splitlines())
    assert "# grafana is not started: " in told
    assert main(["start", "kafka", "--folder", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("services: unknown service kafka")
    assert main(["stop", "--folder", str(folder)]) == 0


@pytest.mark.full
def test_prefect_and_mlflow_keep_their_data_in_postgres(folder: Path) -> None:
    outcome = start(folder, ("postgres", "prefect", "mlflow"))
    if outcome.missing:
        pytest.skip("; ".join(outcome.missing.values()))
    assert list(outcome.running) == ["postgres", "prefect", "mlflow"]
    assert all(httpx.get(f"{outcome.running[name].url}/health").status_code == 200 for name in ("prefect", "mlflow"))
    tables = {"mlflow": "experiments"} | ({} if outcome.notes else {"prefect": "flow_run"})
    assert outcome.notes in ([], ["prefect keeps its data in SQLite, since no PostgreSQL with pg_trgm was started"])
    for name, table in tables.items():
        connection = psycopg2.connect(f"{outcome.running['postgres'].url}/{name}")
        with connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {table}")
            assert cursor.fetchone() is not None
        connection.close()
