"""kill -9 of a run's process group inside a stage; `make bench NAME=resume_kill9` does it in all seven."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL
from tiny import write_project

from benchmarks.killing import Runs, copy_folder, differing_files, finished, forget, inside, staged
from model_optimizer.artifacts.base import Stage

Completed = tuple[dict[tuple[str, str], str], dict[str, Any]]
"""What was finished at the kill, and the outcome of the run after it."""
BEFORE_VERIFY = ("profile", "scan", "quantize", "compile", "memory")
TRIES = 5
"""Between staging and publication lie milliseconds, which a busy machine can miss."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, prefect_server: None) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("kill9")
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(folder / "prefect")}
    with Runs(write_project(folder / "project", tiny_llama), environment, ("scan.runtimes=[torch]",)) as started:
        yield started


@pytest.fixture(scope="module")
def folder(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a first run was killed inside verify."""
    folder = tmp_path_factory.mktemp("killed")
    assert runs.killed(folder, inside(Stage.VERIFY), 0.1)
    return folder


@pytest.fixture(scope="module")
def completed(runs: Runs, folder: Path) -> Completed:
    return finished(folder), runs.complete(folder)


def test_run_killed_in_verify_goes_on_there(folder: Path, completed: Completed) -> None:
    before, outcome = completed
    assert {stage for stage, _ in before} == set(BEFORE_VERIFY)
    after = finished(folder)
    assert {entry: after[entry] for entry in before} == before
    assert outcome["stages"] == dict.fromkeys(BEFORE_VERIFY, True) | {"verify": False, "package": False}


@pytest.fixture(scope="module")
def packaged(runs: Runs, folder: Path, completed: Completed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of an undisturbed run that finds six stages in the store and makes the package."""
    copy = copy_folder(folder, tmp_path_factory.mktemp("packaged") / "folder")
    assert completed
    forget(copy, Stage.PACKAGE)
    return runs.complete(copy)


def test_run_killed_between_staging_and_publication_ends_with_the_manifest_of_an_undisturbed_run(
    runs: Runs, folder: Path, packaged: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(TRIES):
        copy = copy_folder(folder, tmp_path / str(number))
        forget(copy, Stage.PACKAGE)
        if runs.killed(copy, staged):
            break
    else:
        pytest.fail(f"the moment was missed {TRIES} times")
    outcome = runs.complete(copy)
    assert outcome["manifest_sha256"] == packaged["manifest_sha256"]
    assert outcome["stages"] == dict.fromkeys((*BEFORE_VERIFY, "verify"), True) | {"package": False}
    bundles = copy / ".model-optimizer" / "bundles"
    assert differing_files(bundles / "tiny-v1", Path(packaged["bundle"])) == {"model.sig"}
    assert not (bundles / ".tiny.publishing").exists()
