"""One Prefect server and one workplace for all flow tests; flows run in this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness
from tiny import write_project


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=300):
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, prefect_server: None) -> Iterator[Path]:
    """A tiny project in the current directory; yields its profile."""
    folder, before = tmp_path_factory.mktemp("project"), Path.cwd()
    profile = write_project(folder, tiny_llama)
    os.chdir(folder)
    yield profile
    os.chdir(before)
