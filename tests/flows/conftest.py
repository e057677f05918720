"""One Prefect server and one workplace for all flow tests; flows run in this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from from_commit import Story, run_and_retry
from prefect.client.orchestration import get_client
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


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, prefect_server: None) -> Story:
    """A flow run from a git commit that failed in compile and was retried; two tests look at it."""
    with get_client(sync_client=True) as client:
        return run_and_retry(tmp_path_factory.mktemp("commit"), tiny_llama, client)
