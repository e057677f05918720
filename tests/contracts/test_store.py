"""The store is the only truth: finished means intact, everything else is made again."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from model_optimizer.artifacts.base import FileRef, StageArtifact, StageInputs, Stored, Tree
from model_optimizer.code_version import code_version, reachable_packages
from model_optimizer.store import Store, file_refs, stage_key, write_atomically


class Note(StageArtifact):
    text: str


class Counted(Note):
    made_by: int = 0


def make_note(directory: Path) -> Note:
    write_atomically(directory / "note.txt", b"hello")
    return Note(text="hello", files=file_refs(directory, directory / "note.txt"))


def refuse(_directory: Path) -> Note:
    raise AssertionError("made again")


def test_produce_returns_the_held_entry_without_making_it(tmp_path: Path) -> None:
    first = Store(tmp_path).produce("note", "k", Note, make_note)
    again = Store(tmp_path).produce("note", "k", Note, refuse)
    assert (first.cached, again.cached) == (False, True)
    assert again.artifact == first.artifact
    assert again.artifact.files[0].num_bytes == 5


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "artifact", "no-artifact"])
def test_produce_makes_a_damaged_entry_again(tmp_path: Path, harm: str) -> None:
    Store(tmp_path).produce("note", "k", Note, make_note)
    entry = tmp_path / "note" / "k"
    match harm:
        case "flip":
            (entry / "note.txt").write_bytes(b"hellO")
        case "truncate":
            (entry / "note.txt").write_bytes(b"hell")
        case "remove":
            (entry / "note.txt").unlink()
        case "artifact":
            (entry / "artifact.json").write_text("{")
        case "no-artifact":
            (entry / "artifact.json").unlink()
    again = Store(tmp_path).produce("note", "k", Note, make_note)
    assert not again.cached
    assert (entry / "note.txt").read_bytes() == b"hello"
    assert Store(tmp_path).find("note", "k", Note) is not None


def test_produce_keeps_the_journal_of_a_killed_call(tmp_path: Path) -> None:
    def die(directory: Path) -> Note:
        (directory / "journal").write_text("half")
        raise KeyboardInterrupt

    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.produce("note", "k", Note, die)
    assert store.find("note", "k", Note) is None
    stored = store.produce("note", "k", Note, lambda directory: Note(text=(directory / "journal").read_text()))
    assert stored.artifact.text == "half"


def test_refresh_makes_an_intact_entry_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.produce("note", "k", Note, lambda directory: Note(text="old"))
    assert store.produce("note", "k", Note, lambda directory: Note(text="new"), refresh=True).artifact.text == "new"


def _produce_and_count(root: str, barrier: "multiprocessing.synchronize.Barrier") -> None:
    barrier.wait()

    def make(directory: Path) -> Note:
        with (Path(root) / "calls").open("a") as calls:
            calls.write("x")
        return make_note(directory)

    Store(Path(root)).produce("note", "k", Note, make)


def test_produce_works_once_when_two_processes_want_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    workers = [context.Process(target=_produce_and_count, args=(str(tmp_path), barrier)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "x"


def test_write_atomically_leaves_the_old_content_when_the_new_cannot_be_written(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Keys


class ExampleInputs(StageInputs):
    __module__ = "model_optimizer.profiling.stage"
    model: Tree
    upstream: Stored[Note] | None = None


def _inputs(tmp_path: Path, **changes: object) -> ExampleInputs:
    values = {"fingerprint": "f", "model": Tree(digest="d", path=tmp_path)} | changes
    return ExampleInputs.model_validate(values)


def test_stage_key_ignores_where_things_lie(tmp_path: Path) -> None:
    assert stage_key(_inputs(tmp_path)) == stage_key(_inputs(tmp_path, model=Tree(digest="d", path=tmp_path / "elsewhere")))


@pytest.mark.parametrize("change", ["digest", "fingerprint", "upstream"])
def test_stage_key_changes_with_content_machine_and_upstream(tmp_path: Path, change: str) -> None:
    stored = Store(tmp_path).produce("note", "k", Note, make_note)
    changed = {
        "digest": _inputs(tmp_path, model=Tree(digest="other", path=tmp_path)),
        "fingerprint": _inputs(tmp_path, fingerprint="other"),
        "upstream": _inputs(tmp_path, upstream=stored),
    }[change]
    assert stage_key(changed) != stage_key(_inputs(tmp_path))


def test_stage_key_ignores_measured_values_of_upstream(tmp_path: Path) -> None:
    stored = Store(tmp_path).produce("note", "k", Note, make_note)
    other = stored.model_copy(update={"artifact": Note(text="measured otherwise"), "cached": True})
    assert stage_key(_inputs(tmp_path, upstream=stored)) == stage_key(_inputs(tmp_path, upstream=other))


def test_code_version_reaches_what_a_stage_imports_and_no_more() -> None:
    assert {"profiling", "artifacts", "errors"} <= set(reachable_packages("profiling"))
    assert "reporting" not in reachable_packages("profiling")
    assert code_version("profiling") != code_version("errors")


def test_file_ref_digests_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    ref = FileRef.of(tmp_path, tmp_path / "a")
    assert ref.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert json.loads(ref.model_dump_json()) == {"path": "a", "num_bytes": 3, "sha256": ref.sha256}


def test_tree_digest_depends_on_names_and_bytes_only(tmp_path: Path) -> None:
    for root, name, content in [("one", "a", b"x"), ("two", "a", b"x"), ("three", "b", b"x"), ("four", "a", b"y")]:
        (tmp_path / root).mkdir()
        (tmp_path / root / name).write_bytes(content)
    digests = [Tree.of(tmp_path / root).digest for root in ("one", "two", "three", "four")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def make_folder(directory: Path) -> Note:
    write_atomically(directory / "folder" / "note.txt", b"hello")
    return Note(text="hello", files=file_refs(directory, directory / "folder"))


def die_before_the_rename(root: Path) -> None:
    """Make an entry and be killed when its file is written and has not got its name yet."""
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    Store(root).produce("note", "k", Note, make_folder)


def test_produce_lists_no_unfinished_file_of_a_killed_maker(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=die_before_the_rename, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and len(list((tmp_path / "note" / "k" / "folder").iterdir())) == 1
    made = Store(tmp_path).produce("note", "k", Note, make_folder)
    assert [ref.path for ref in made.artifact.files] == ["folder/note.txt"]
    assert [path.name for path in (made.directory / "folder").iterdir()] == ["note.txt"]
