"""QA-086, the second half: an output directory is written by one process at a time, and a dead one has nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.claim import claimed
from model_optimizer.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from flows.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_by_another(folder: Path) -> subprocess.Popen[str]:
    """Return a process that has the folder until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_claimed_names_process_and_time_of_who_has_it_and_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = held_by_another(folder)
    with (
        pytest.raises(ConfigError, match=rf"out is being written by process {process.pid} since \d{{4}}-\d\d-\d\d \d\d:\d\d UTC"),
        claimed(folder),
    ):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert (tmp_path / ".out.lock").exists()  # the dead one's file, which holds nobody up
    with claimed(folder):
        assert (tmp_path / ".out.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_claimed_gives_the_folder_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claimed(tmp_path / "out"):
        raise RuntimeError
    with claimed(tmp_path / "out"):
        pass
