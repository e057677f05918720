"""kill -9 before every single change that deploying and going back make: `current` is always a complete, verified release."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deploy_fixtures import die_at, fit, make_bundles

from model_optimizer.errors import HealthCheckFailed
from model_optimizer.release.deploy import Checks, deploy, rollback, status
from model_optimizer.release.deployment_root import DeploymentRoot, Reason
from model_optimizer.release.health import Health
from model_optimizer.release.verify import verify_bundle

WHO = Reason("tester", "a test")
FIT = Checks(fit, fit)
MOST = 400
STRIDES = [pytest.param(8, id="every-8th"), pytest.param(1, id="every", marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("killed")
    make_bundles(root, tiny_llama)
    return root


@pytest.fixture
def scene(made: Path, tmp_path: Path) -> Iterator["Scene"]:
    memory = Path("/dev/shm")  # what is tested is a kill, not a power cut: durable writes may cost nothing
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    place = Path(tempfile.mkdtemp(dir=memory, prefix="mo-killed-")) if usable else tmp_path
    yield Scene(made, place)
    shutil.rmtree(place)


class Scene:
    """A deployment root that is set up anew for every kill."""

    def __init__(self, made: Path, place: Path):
        self.bundles = made / "bundles"
        self.key = made / "keys" / "key.pem.pub"
        self.root = place / "root"
        self.template = place / "template"

    def deploy(self, name: str, checks: Checks = FIT) -> None:
        deploy(self.bundles / name, self.root, WHO, public_key=self.key, checks=checks)

    def prepare(self, *names: str) -> None:
        """Deploy `names`; `set_up` will return to this."""
        for name in names:
            self.deploy(name)
        if names:
            self.root.rename(self.template)

    def set_up(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        if self.template.exists():
            shutil.copytree(self.template, self.root, symlinks=True)

    def current(self) -> str | None:
        """Return what is current after checking every byte of it, as a server would find it."""
        link = self.root / "current"
        if not link.is_symlink():
            return None
        return verify_bundle(link, public_key=self.key).name

    def targets(self) -> list[str | None]:
        return [move.to_bundle for move in DeploymentRoot(self.root).history()]

    def every_kill(self, action: Callable[[], object], stride: int) -> list[str | None]:
        """Kill `action` before its changes, every `stride`-th and each of the last ones; return what was current after each.

        After each kill the action is called again, undisturbed.
        """
        seen = []
        number = 1
        while number < MOST:
            self.set_up()
            if die_at(self.root, number, action):
                seen.append(self.current())
                action()
                number += stride
            elif stride == 1:
                return seen
            else:
                number, stride = number - stride + 1, 1
        raise AssertionError(f"more than {MOST} changes")


@pytest.mark.parametrize("stride", STRIDES)
def test_deploy_leaves_the_old_or_the_new_release_when_killed(scene: Scene, stride: int) -> None:
    def action() -> None:
        scene.deploy("chat-v1")
        assert (scene.current(), scene.targets()) == ("chat-v1", ["chat-v0", "chat-v1"])

    scene.prepare("chat-v0")
    seen = scene.every_kill(action, stride)
    assert len(seen) * stride > 40
    assert seen == sorted(seen, key=str)  # once it moved, it stays moved
    assert set(seen) == {"chat-v0", "chat-v1"}


@pytest.mark.parametrize("stride", STRIDES)
def test_first_deploy_leaves_nothing_or_the_release_when_killed(scene: Scene, stride: int) -> None:
    def action() -> None:
        scene.deploy("chat-v1")
        assert (scene.current(), scene.targets()) == ("chat-v1", ["chat-v1"])

    seen = scene.every_kill(action, stride)
    assert len(seen) * stride > 40 and set(seen) == {None, "chat-v1"}


def test_rollback_leaves_the_old_or_the_new_release_when_killed(scene: Scene) -> None:
    def action() -> None:
        if status(scene.root).current == "chat-v1":
            rollback(scene.root, WHO)
        else:  # the kill came after the move: named, it is a no-op that files what is pending
            rollback(scene.root, WHO, "v0")
        assert (scene.current(), scene.targets()) == ("chat-v0", ["chat-v0", "chat-v1", "chat-v0"])

    scene.prepare("chat-v0", "chat-v1")
    seen = scene.every_kill(action, 1)
    assert len(seen) >= 6 and set(seen) == {"chat-v0", "chat-v1"}


@pytest.mark.parametrize("stride", STRIDES)
def test_automatic_rollback_leaves_one_of_the_two_releases_when_killed(scene: Scene, stride: int) -> None:
    def fail(_release: Path) -> Health:
        raise HealthCheckFailed("no answer")

    def action() -> None:
        try:
            scene.deploy("chat-v1", Checks(fit, fail))
        except HealthCheckFailed:
            return

    scene.prepare("chat-v0")
    seen = scene.every_kill(action, stride)
    assert len(seen) * stride > 45
    assert set(seen) == {"chat-v0", "chat-v1"} and seen[-1] == "chat-v0"


@pytest.mark.parametrize("stride", STRIDES)
def test_repair_of_a_damaged_release_keeps_current_when_killed(scene: Scene, stride: int) -> None:
    def action() -> None:
        scene.deploy("chat-v0")
        assert scene.current() == "chat-v0"

    scene.prepare("chat-v0", "chat-v1")
    (scene.template / "releases" / "chat-v0" / "config.yaml").write_text("x")
    seen = scene.every_kill(action, stride)
    assert len(seen) * stride > 40 and set(seen) == {"chat-v0", "chat-v1"}
