"""A journal survives a kill: whole records stay, a torn one is dropped and written again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model_optimizer.artifacts.base import Frozen
from model_optimizer.journal import Journal


class Record(Frozen):
    label: str
    value: float


RECORDS = [Record(label="a", value=1.5), Record(label="b", value=0.1 + 0.2), Record(label="ü", value=-3.0)]


def open_journal(path: Path, key: str = "k") -> Journal[Record]:
    return Journal(path, key, Record)


def write(path: Path) -> None:
    journal = open_journal(path)
    for record in RECORDS:
        journal.append(record)


def test_journal_returns_every_record_exactly(tmp_path: Path) -> None:
    write(tmp_path / "new" / "j")
    assert open_journal(tmp_path / "new" / "j").records == RECORDS


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_journal_drops_a_torn_last_record_and_continues(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "j")
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content[:-cut])
    journal = open_journal(tmp_path / "j")
    assert journal.records == RECORDS[:2]
    assert "torn line" in caplog.text
    journal.append(RECORDS[2])
    assert (tmp_path / "j").read_bytes() == content


def test_journal_drops_everything_behind_an_unreadable_record(tmp_path: Path) -> None:
    write(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(b"".join(lines[:2]) + b"{}\n" + lines[3])
    assert open_journal(tmp_path / "j").records == RECORDS[:1]
    assert (tmp_path / "j").read_bytes() == b"".join(lines[:2])


def test_journal_keeps_values_that_are_not_finite(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for value in (float("nan"), float("-inf")):
        journal.append(Record(label="", value=value))
    assert [str(record.value) for record in open_journal(tmp_path / "j").records] == ["nan", "-inf"]


def test_journal_of_another_key_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_journal(tmp_path / "j", "one").append(RECORDS[0])
    assert open_journal(tmp_path / "j", "one").records == RECORDS[:1]
    assert open_journal(tmp_path / "j", "two").records == []
    assert "begun anew" in caplog.text
    assert open_journal(tmp_path / "j", "two").records == []


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from pydantic import BaseModel
from model_optimizer.journal import Journal
class Record(BaseModel):
    number: int
journal = Journal(Path(sys.argv[1]), "k", Record)
for number in range(len(journal.records), len(journal.records) + 5):
    journal.append(Record(number=number))
with open(sys.argv[1], "ab") as stream:
    stream.write(b'{"num'); stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_journal_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(path)], env=os.environ, check=False)
        assert done.returncode == -signal.SIGKILL
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()[1:-1]]
    assert numbers == list(range(10))
