"""A disk that is full or read-only: one line that names the folder, exit 2, and nothing half-written that counts as done.

The disks are small file systems in memory, which only root may mount; elsewhere these tests are skipped.
"""

import errno
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from entry import Command
from pydantic import BaseModel
from safetensors.numpy import save_file
from tiny import write_project

from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.disk import free_bytes, require_writable, storage_fault
from model_optimizer.errors import StorageError
from model_optimizer.journal import Journal
from model_optimizer.store import ARTIFACT, Store, file_refs, write_atomically

KIB, MIB = 2**10, 2**20
Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a file system in memory with the given options."""
    mounted: list[Path] = []

    def call(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a file system in memory cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield call
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # weights may still be mapped into this process


def fill(folder: Path, leave_bytes: int) -> Path:
    """Write one file that leaves only so much room."""
    filler = folder / "filler"
    filler.write_bytes(bytes(free_bytes(folder) - leave_bytes))
    return filler


class Note(StageArtifact):
    text: str


class Line(BaseModel):
    text: str


def write_plainly(directory: Path) -> None:
    (directory / "big.bin").write_bytes(bytes(2 * MIB))


def write_tensors(directory: Path) -> None:
    save_file({"a": np.zeros(MIB, np.float32)}, directory / "big.safetensors")


def write_array(directory: Path) -> None:
    np.zeros(MIB, np.float32).tofile(directory / "big.npy")


def write_journal(directory: Path) -> None:
    journal = Journal(directory / "journal.jsonl", "k", Line)
    for _ in range(100):
        journal.append(Line(text="x" * 32 * KIB))


def write_whole(directory: Path) -> None:
    write_atomically(directory / "big.json", bytes(2 * MIB))


@pytest.mark.parametrize("write", [write_plainly, write_tensors, write_array, write_journal, write_whole])
def test_produce_counts_nothing_as_done_when_the_disk_is_full(mount: Mount, write: Callable[[Path], None]) -> None:
    disk = mount("size=1m")

    def make(directory: Path) -> Note:
        write(directory)
        return Note(text="done", files=file_refs(directory, directory))

    store = Store(disk / "store")
    with pytest.raises(StorageError, match=r"the disk of .*store.* is full \(\d\.\d MiB free\)") as caught:
        store.produce("note", "k", Note, make)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert store.find("note", "k", Note) is None
    assert not list(disk.rglob(ARTIFACT)) and not list(disk.rglob(".artifact*"))


def test_produce_goes_on_where_the_full_disk_stopped_it(mount: Mount) -> None:
    disk = mount("size=1m")
    filler = fill(disk, 256 * KIB)
    seen: list[int] = []

    def make(directory: Path) -> Note:
        journal = Journal(directory / "journal.jsonl", "k", Line)
        seen.append(len(journal.records))
        while len(journal.records) < 20:
            journal.append(Line(text="x" * 20 * KIB))
        return Note(text="done")

    with pytest.raises(StorageError):
        Store(disk / "store").produce("note", "k", Note, make)
    filler.unlink()
    assert Store(disk / "store").produce("note", "k", Note, make).artifact.text == "done"
    assert seen[0] == 0 and 5 <= seen[1] < 13  # 256 KiB hold at most 12 records of 20 KiB


def test_write_atomically_keeps_the_old_file_when_the_disk_is_full(mount: Mount) -> None:
    disk = mount("size=1m")
    write_atomically(disk / "note.txt", b"old")
    with pytest.raises(StorageError, match="is full"):
        write_atomically(disk / "note.txt", bytes(2 * MIB))
    assert (disk / "note.txt").read_bytes() == b"old"
    assert [path.name for path in disk.iterdir()] == ["note.txt"]


def test_store_names_a_read_only_disk(mount: Mount) -> None:
    disk = mount("size=1m")
    Store(disk / "store").produce("note", "k", Note, lambda _: Note(text="held"))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert Store(disk / "store").find("note", "k", Note) is not None  # reading goes on
    with pytest.raises(StorageError, match=r"disk0/store.* cannot be written \(Read-only file system\)"):
        Store(disk / "store").produce("note", "other", Note, lambda _: Note(text="new"))


def test_require_writable_tells_room_and_need_in_mib(mount: Mount) -> None:
    disk = mount("size=3m")
    require_writable(disk / "a" / "b", 2 * MIB)
    with pytest.raises(StorageError, match=r"disk0 has 3\.0 MiB free, and at least 8\.0 MiB are needed"):
        require_writable(disk / "a" / "b", 8 * MIB)


def test_storage_fault_blames_the_disk_only_where_it_is_to_blame(tmp_path: Path) -> None:
    def chained(inner: Exception) -> Exception:
        outer = RuntimeError("build failed")
        outer.__cause__ = inner
        return outer

    full = OSError(errno.ENOSPC, "No space left on device")
    assert "is full" in str(storage_fault(chained(full), tmp_path))
    assert "is full" in str(storage_fault(RuntimeError("I/O error: No space left on device (os error 28)"), tmp_path))
    assert "cannot be written" in str(storage_fault(PermissionError(errno.EACCES, "denied", str(tmp_path / "a")), tmp_path))
    assert storage_fault(PermissionError(errno.EACCES, "denied", "/somewhere/else"), tmp_path) is None
    assert storage_fault(ValueError("something else"), tmp_path) is None


@pytest.fixture
def project(mount: Mount, tiny_llama: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that puts the tiny project on a disk of its own."""

    def call(options: str) -> Path:
        disk = mount(options)
        shutil.copytree(tiny_llama, disk / "model")
        write_project(disk / "project", disk / "model")
        return disk / "project"

    return call


def test_run_starts_nothing_on_a_disk_that_is_too_small(project: Callable[[str], Path], command: Command) -> None:
    folder = project("size=4m")
    done = command("run", "tiny.yaml", cwd=folder)
    assert (done.code, done.out, len(done.err.strip().splitlines())) == (2, "", 1), done.err
    assert f"{folder} has " in done.err and "MiB free, and at least 8.3 MiB are needed" in done.err
    assert not (folder / ".model-optimizer").exists()


def test_run_and_plan_on_a_read_only_disk(project: Callable[[str], Path], command: Command) -> None:
    folder = project("size=64m")
    subprocess.run(["mount", "-o", "remount,ro", str(folder.parent)], check=True)
    done = command("run", "tiny.yaml", cwd=folder)
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.err
    assert f"{folder} cannot be written" in done.err
    planned = command("plan", "tiny.yaml", "--json", cwd=folder)  # a plan writes nothing, so it works
    assert planned.code == 0, planned.err
    assert len(json.loads(planned.out)["stages"]) == 7


def test_quantize_leaves_no_output_when_the_disk_fills_up_on_the_way(project: Callable[[str], Path], command: Command) -> None:
    folder = project("size=4m")
    fill(folder, 200 * KIB)  # the checkpoint alone takes 0.1 MB twice, and sensitivity its journal
    done = command(
        "quantize", "--model_path", "../model", "--calibration_data", "calibration.jsonl", "--output_path", "out", cwd=folder
    )
    assert done.code == 2, done.err
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("model-optimizer: the disk of ") and "is full" in last and str(folder) in last
    assert "Traceback" not in done.err
    assert not (folder / "out").exists()
    assert not list(folder.rglob(f"quantize/*/{ARTIFACT}"))
