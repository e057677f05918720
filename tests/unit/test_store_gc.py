"""What gc removes, what it leaves, and that neither a kill nor a run beside it breaks anything."""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import filelock
import pytest
from deploy_fixtures import die_at

from model_optimizer import store_gc as subject
from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.store import ARTIFACT, Store, file_refs, lock_path, write_atomically
from model_optimizer.store_gc import collect, entries

DAY_S = 86400.0


class Note(StageArtifact):
    text: str


def make_note(directory: Path) -> Note:
    write_atomically(directory / "note.txt", b"hello" * 100)
    write_atomically(directory / "part" / "more.txt", b"x" * 24)
    return Note(text="hello", files=file_refs(directory, directory / "note.txt", directory / "part"))


def refuse(_directory: Path) -> Note:
    raise AssertionError("made again")


def age(path: Path, days: float) -> None:
    """Set a file or folder, and all below it, back by so many days."""
    stamp = time.time() - days * DAY_S
    for place in (*path.rglob("*"), path):
        os.utime(place, (stamp, stamp))


def store_with(root: Path, **ages_days: float) -> Store:
    store = Store(root)
    for key, days in ages_days.items():
        store.produce("note", key, Note, make_note)
        age(root / "note" / key, days)
    return store


def keys(root: Path) -> list[str]:
    return [entry.key for entry in entries(root)]


def test_collect_removes_what_was_not_used_for_so_long(tmp_path: Path) -> None:
    store = store_with(tmp_path, old=40, fresh=10)
    size = sum(path.stat().st_size for path in (tmp_path / "note" / "old").rglob("*") if path.is_file())
    done = collect(tmp_path, 30 * DAY_S)
    assert [(entry.key, entry.num_bytes) for entry in done.removed] == [("old", size)]
    assert done.num_bytes == size > 524
    assert keys(tmp_path) == ["fresh"]
    assert store.find("note", "old", Note) is None
    assert store.produce("note", "fresh", Note, refuse).cached


def test_a_hit_keeps_an_entry(tmp_path: Path) -> None:
    store = store_with(tmp_path, hit=40, missed=40)
    assert store.find("note", "hit", Note) is not None
    assert [entry.key for entry in collect(tmp_path, 30 * DAY_S).removed] == ["missed"]


def test_collect_removes_an_old_half_made_entry_and_leaves_a_young_one(tmp_path: Path) -> None:
    for key, days in {"old": 31, "young": 31}.items():
        (tmp_path / "note" / key).mkdir(parents=True)
        (tmp_path / "note" / key / "journal").write_text("half")
        age(tmp_path / "note" / key, days)
    (tmp_path / "note" / "young" / "journal").write_text("half and more")
    done = collect(tmp_path, 30 * DAY_S)
    assert [(entry.key, entry.state) for entry in done.removed] == [("old", "half-made")]
    assert (tmp_path / "note" / "young" / "journal").read_text() == "half and more"


@pytest.mark.parametrize("dry_run", [True, False])
def test_collect_leaves_an_entry_whose_lock_is_held(tmp_path: Path, dry_run: bool) -> None:
    store_with(tmp_path, old=40)
    with filelock.FileLock(lock_path(tmp_path / "note" / "old")):
        done = collect(tmp_path, 30 * DAY_S, dry_run=dry_run)
    assert done.removed == ()
    assert [(kept.entry.key, kept.because) for kept in done.kept] == [("old", "a run is working on it")]
    assert keys(tmp_path) == ["old"]


def test_dry_run_names_the_same_entries_and_changes_nothing(tmp_path: Path) -> None:
    store_with(tmp_path, old=40, fresh=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    planned = collect(tmp_path, 30 * DAY_S, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [entry.key for entry in planned.removed] == [entry.key for entry in collect(tmp_path, 30 * DAY_S).removed] == ["old"]


def test_collect_of_no_store_is_empty(tmp_path: Path) -> None:
    assert collect(tmp_path / "nowhere", 0).removed == ()
    assert not (tmp_path / "nowhere").exists()


def test_collect_leaves_bundles_and_other_files_of_the_folder_alone(tmp_path: Path) -> None:
    store_with(tmp_path / "store", old=40)
    for place in ("bundles/chat-v1/manifest.json", "runs/a.json", "mlflow.db"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x")
    age(tmp_path, 400)
    collect(tmp_path / "store", 0)
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["a.json", "manifest.json", "mlflow.db", "old.lock"]


def test_a_killed_gc_leaves_the_entry_intact_or_unfinished(tmp_path: Path) -> None:
    root = tmp_path / "store"
    seen = []
    for number in range(1, 50):
        shutil.rmtree(root, ignore_errors=True)
        store_with(root, old=40)
        if not die_at(root, number, lambda: collect(root, 30 * DAY_S)):
            break
        held = Store(root).find("note", "old", Note)
        seen.append(held is not None)
        if held is None:  # made again from whatever is left, complete
            assert Store(root).produce("note", "old", Note, make_note).cached is False
            shutil.rmtree(root / "note" / "old")
        else:
            assert all((held.directory / ref.path).stat().st_size == ref.num_bytes for ref in held.artifact.files)
            age(root / "note" / "old", 40)
        collect(root, 30 * DAY_S)
        assert keys(root) == []
    assert len(seen) >= 6
    assert seen == sorted(seen, reverse=True) and seen[0] and not seen[-1]


def test_collect_gives_back_an_entry_that_was_used_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, old=40)
    replace = os.replace

    def use_then_replace(source: Path, destination: Path) -> None:
        if Path(destination).name == f"{ARTIFACT}.gc":
            assert store.find("note", "old", Note) is not None  # a run that came just now
        replace(source, destination)

    monkeypatch.setattr(subject.os, "replace", use_then_replace)
    done = collect(tmp_path, 30 * DAY_S)
    assert [kept.because for kept in done.kept] == ["it was used meanwhile"]
    assert store.produce("note", "old", Note, refuse).cached


def test_find_takes_an_entry_for_absent_that_goes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_with(tmp_path, old=40)
    utime = os.utime

    def collect_then_stamp(path: Path) -> None:
        monkeypatch.setattr(os, "utime", utime)
        collect(tmp_path, 30 * DAY_S)
        utime(path)

    monkeypatch.setattr(os, "utime", collect_then_stamp)
    assert Store(tmp_path).find("note", "old", Note) is None
    assert Store(tmp_path).produce("note", "old", Note, make_note).cached is False


def test_runs_beside_gc_never_break(tmp_path: Path) -> None:
    names = [f"k{index}" for index in range(4)]
    done = threading.Event()
    in_use = threading.Lock()  # an entry grows old between two uses, never within one
    faults: list[str] = []

    def run() -> None:
        store = Store(tmp_path)
        while not done.is_set():
            for key in names:
                with in_use:
                    held = store.produce("note", key, Note, make_note)
                    places = [held.directory / ref.path for ref in held.artifact.files]
                    faults.extend(str(place) for place in places if not place.is_file())
                    with contextlib.suppress(FileNotFoundError):  # gc has it for a moment
                        age(held.directory / ARTIFACT, 40)

    runs = [threading.Thread(target=run) for _ in range(2)]
    for thread in runs:
        thread.start()
    removed = 0
    started = time.monotonic()
    while (spent := time.monotonic() - started) < 3 or (removed == 0 and spent < 60):
        removed += len(collect(tmp_path, 30 * DAY_S).removed)
    done.set()
    for thread in runs:
        thread.join()
    assert removed > 0
    assert faults == []


def test_find_serves_a_store_that_cannot_be_stamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, old=40)

    def refuse_stamp(_path: Path) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse_stamp)
    assert store.find("note", "old", Note) is not None
