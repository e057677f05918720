"""A disk that fills up while the bundle is written: a small file system in memory, which only root may mount."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from release_fixtures import DOCUMENTS, make_inputs
from report_fixtures import samples

from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.release import Release
from model_optimizer.errors import StorageError
from model_optimizer.protocols import Quiet
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.stage import package_release
from model_optimizer.release.verify import verify_bundle
from model_optimizer.store import ARTIFACT, Store, stage_key


@contextmanager
def disk(place: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of so many bytes at `place`; skip where that is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system in memory cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def package(inputs: PackageInputs, root: Path) -> Stored[Release]:
    def make(workspace: Path) -> Release:
        bundles, documents = root / "bundles", DOCUMENTS
        return package_release(inputs, workspace, bundles=bundles, documents=documents, samples=samples(), progress=Quiet())

    return Store(root / "store").produce(Stage.PACKAGE, stage_key(inputs), Release, make)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> PackageInputs:
    return make_inputs(tmp_path_factory.mktemp("stages"), tiny_llama)


@pytest.fixture(scope="module")
def needed_bytes(inputs: PackageInputs, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What an undisturbed release takes on such a disk."""
    root = tmp_path_factory.mktemp("whole") / "disk"
    with disk(root, 64 << 20):
        package(inputs, root)
        return shutil.disk_usage(root).used


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.9, 0.98])
def test_package_on_a_full_disk_leaves_nothing_that_counts_and_goes_on_with_more_room(
    inputs: PackageInputs, needed_bytes: int, tmp_path: Path, share: float
) -> None:
    root = tmp_path / "disk"
    with disk(root, int(share * needed_bytes)):
        with pytest.raises(StorageError, match=r"the disk of .*disk.* is full .* free space and run again, it continues there"):
            package(inputs, root)
        assert not list(root.glob(f"store/*/*/{ARTIFACT}"))
        for bundle in root.glob("bundles/chat-v*/"):  # public only when whole
            verify_bundle(bundle, public_key=next(inputs.config.signer.key.parent.glob("*.pub")))
        more = ["mount", "-o", f"remount,size={3 * needed_bytes}", str(root)]
        subprocess.run(more, check=True)
        made = package(inputs, root).artifact
        assert sorted(path.name for path in root.glob("bundles/chat-v*/")) == ["chat-v0", "chat-v1"]
        facts = verify_bundle(root / "bundles" / "chat-v1", public_key=next(inputs.config.signer.key.parent.glob("*.pub")))
        assert facts.manifest_sha256 == made.manifest_sha256
        assert not list(root.rglob(".*publishing*"))
