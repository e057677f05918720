"""QA-086: four processes and one tracking database, from nothing; and a database that somebody else holds."""

import json
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outside import own_surroundings

from tasks.letters import RunRecord
from tasks.lock_holder import holders
from tasks.tracking import Tracker

NUM_PROCESSES, NUM_RECORDS, METRICS_EACH = 4, 5, 100
FOUR = f"""
import os, sys
from pathlib import Path
import mlflow.tracking
from tasks.tracking import RunRecord, Tracker
children = []
for process in range({NUM_PROCESSES}):
    if (pid := os.fork()) == 0:
        tracker = Tracker(Path(sys.argv[1]), "model-optimizer/four", first_try=True)
        tracker.open()
        for number in range({NUM_RECORDS}):
            name = f"{{process}}-{{number}}"
            metrics = {{f"m{{it:03}}": float(it) for it in range({METRICS_EACH})}}
            tracker.record(RunRecord(record_id=name, parent_id=None, name=name, metrics=metrics))
        done = tracker.flush(240)
        os._exit(0 if done else 1)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""
HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("begin exclusive")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which four processes recorded at once, starting with no database at all."""
    root = tmp_path_factory.mktemp("four")
    done = subprocess.run([sys.executable, "-c", FOUR, str(root)], env=own_surroundings(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("locked", "duplicate column", "Traceback", "already exists"):
        assert words not in done.stderr, done.stderr
    return root


def count(root: Path, query: str) -> int:
    with sqlite3.connect(root / "mlflow.db") as connection:
        (found,) = connection.execute(query).fetchone()
    return int(found)


def test_four_processes_lose_and_double_no_metric(root: Path) -> None:
    assert count(root, "select count(*) from metrics") == NUM_PROCESSES * NUM_RECORDS * METRICS_EACH == 2000
    assert count(root, "select count(*) from latest_metrics") == 2000
    assert count(root, "select count(*) from runs") == count(root, "select count(distinct name) from runs") == 20
    assert list(root.glob("spool/*.json")) == []


def test_four_processes_make_schema_and_experiment_once(root: Path) -> None:
    assert count(root, "select count(*) from alembic_version") == 1
    assert count(root, "select count(*) from experiments where name = 'model-optimizer/four'") == 1
    with sqlite3.connect(root / "mlflow.db") as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]


@contextmanager
def held(database: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a database from another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.communicate()


def test_held_database_is_said_with_its_holder_and_the_record_arrives_afterwards(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = root / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}?timeout=0.2")
    record = RunRecord(record_id="late", parent_id=None, name="late", metrics={"m": 1.0})
    with held(database) as process, caplog.at_level(logging.WARNING):
        assert holders(database) == ((process.pid, " ".join(f"{sys.executable} -c {HOLD}".split())[:80]),)
        tracker = Tracker(root, "model-optimizer/four", first_try=True)
        tracker.record(record)
        assert tracker.flush(60)
        kept = [json.loads(path.read_bytes())["run"]["record_id"] for path in root.glob("spool/*.json")]
    assert kept == ["late"]
    (said,) = [message for message in caplog.messages if "does not answer" in message]
    assert "database is locked" in said and f"process {process.pid} (" in said and "\n" not in said
    assert tracker.flush(60) and list(root.glob("spool/*.json")) == []
    assert count(root, "select count(*) from metrics") == 2001
