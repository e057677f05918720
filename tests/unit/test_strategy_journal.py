"""A scan's journal survives a kill: whole rows stay, a torn one is dropped and written again."""

from pathlib import Path

import pytest

from model_optimizer.artifacts.base import Frozen
from model_optimizer.strategy.journal import Journal


class Row(Frozen):
    label: str
    value: float


ROWS = [Row(label="a", value=1.5), Row(label="b", value=0.1 + 0.2), Row(label="c", value=-3.0)]


def write(path: Path) -> None:
    journal = Journal(path, Row)
    for row in ROWS:
        journal.append(row)


def test_journal_returns_every_row_exactly(tmp_path: Path) -> None:
    write(tmp_path / "j")
    assert Journal(tmp_path / "j", Row).rows == ROWS


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_journal_drops_a_torn_last_row_and_continues(tmp_path: Path, cut: int) -> None:
    write(tmp_path / "j")
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content[:-cut])
    journal = Journal(tmp_path / "j", Row)
    assert journal.rows == ROWS[:2]
    journal.append(ROWS[2])
    assert (tmp_path / "j").read_bytes() == content


def test_journal_drops_everything_behind_an_unreadable_row(tmp_path: Path) -> None:
    write(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(lines[0] + b"{}\n" + lines[2])
    assert Journal(tmp_path / "j", Row).rows == ROWS[:1]
    assert (tmp_path / "j").read_bytes() == lines[0]
