"""Which older releases may become current: the newest that was, the floor, signed exceptions. Real bundles of a tiny model."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deploy_fixtures import fit, make_bundles

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.errors import ConfigError, HealthCheckFailed, IntegrityError
from model_optimizer.release.deploy import Bound, Checks, deploy, rollback, status
from model_optimizer.release.deployment_root import MARKER, DeploymentRoot, Reason
from model_optimizer.release.downgrade import FLOORS, Permit, newest, permit_path, raise_floor, split_name, write_permit
from model_optimizer.release.health import Health
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.release.sign import SigningKey, ensure_key

WHO = Reason("tester", "a test")
FAULT = Reason("security", "CVE in the tokenizer of v1")
FIT = Checks(fit, fit)
TOMORROW = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("downgrade")
    make_bundles(root, tiny_llama)
    return root


@pytest.fixture(scope="module")
def key(made: Path) -> SigningKey:
    return SigningKey(private=made / "keys" / "key.pem", public=made / "keys" / "key.pem.pub")


@pytest.fixture
def place(made: Path, key: SigningKey, tmp_path: Path) -> "Place":
    return Place(made / "bundles", tmp_path / "root", key)


class Place:
    """A root, the bundles and their key."""

    def __init__(self, bundles: Path, root: Path, key: SigningKey):
        self.bundles, self.root, self.key = bundles, root, key

    def deploy(self, *versions: int, checks: Checks = FIT) -> None:
        for version in versions:
            deploy(self.bundles / f"chat-v{version}", self.root, WHO, public_key=self.key.public, checks=checks)

    def rollback(self, version: str | None = None) -> None:
        rollback(self.root, WHO, version, public_key=self.key.public)

    def permit(self, version: int, expires_at: datetime = TOMORROW, key: SigningKey | None = None) -> Permit:
        reason = Reason("tester", "v2 loses memory, v1 was rebuilt")
        return write_permit(self.root, self.bundles / f"chat-v{version}", reason, key or self.key, expires_at)

    @property
    def current(self) -> str | None:
        return status(self.root).current


def test_deploy_refuses_a_version_below_the_newest_that_was_current(place: Place) -> None:
    place.deploy(1, 2)
    with pytest.raises(
        ConfigError, match=r"chat-v0 is older than chat-v2, which was current in .*allow-rollback chat-v0"
    ) as caught:
        place.deploy(0)
    assert caught.value.exit_code == 2
    assert place.current == "chat-v2"
    assert DeploymentRoot(place.root).names() == ("chat-v1", "chat-v2"), "a refused bundle is not even copied"


def test_deploy_refuses_it_after_going_back_too(place: Place) -> None:
    place.deploy(0, 2)
    place.rollback()
    with pytest.raises(ConfigError, match="chat-v1 is older than chat-v2"):
        place.deploy(1)
    place.deploy(2)  # what was newest may come back
    assert place.current == "chat-v2"


def test_deploy_of_the_directly_previous_release_is_as_good_as_rollback(place: Place) -> None:
    place.deploy(0, 1, 2)
    place.deploy(1)
    assert (place.current, status(place.root).previous) == ("chat-v1", "chat-v0")


def test_deploy_forgets_a_version_that_failed_its_check_at_once(place: Place) -> None:
    def fail(_release: Path) -> Health:
        raise HealthCheckFailed("no answer")

    place.deploy(0)
    with pytest.raises(HealthCheckFailed):
        place.deploy(2, checks=Checks(fit, fail))
    assert status(place.root).bounds[0].newest == 0
    place.deploy(1)
    assert place.current == "chat-v1"


def test_newest_needs_no_history_for_what_is_current(place: Place) -> None:
    place.deploy(2)
    (place.root / "history.jsonl").unlink()
    assert newest((), "chat-v2") == {"chat": 2}
    with pytest.raises(ConfigError, match="chat-v1 is older than chat-v2"):
        place.deploy(1)


def test_rollback_to_any_release_of_the_root_stays_possible(place: Place) -> None:
    place.deploy(0, 1, 2)
    place.rollback("v0")
    assert place.current == "chat-v0"


def test_floor_binds_rollback_and_deploy_and_shows_in_status(place: Place) -> None:
    place.deploy(1, 2)
    raise_floor(place.root, "chat-v2", FAULT)
    with pytest.raises(ConfigError, match=r"chat-v1 is below the floor chat-v2 of .*\(CVE in the tokenizer of v1; security\)"):
        place.rollback()
    with pytest.raises(ConfigError, match="below the floor"):
        place.deploy(1)
    seen = status(place.root)
    assert seen.current == "chat-v2"
    because = f"CVE in the tokenizer of v1 (security, {datetime.now(UTC):%Y-%m-%d})"
    assert seen.bounds == (Bound(family="chat", newest=2, floor=2, because=because),)
    assert {row.bundle: row.below_floor for row in seen.releases} == {"chat-v1": True, "chat-v2": False}


def test_floor_never_falls_and_needs_a_reason(place: Place) -> None:
    place.deploy(2)
    assert raise_floor(place.root, "chat-v2", FAULT).version == 2
    with pytest.raises(ConfigError, match=r"the floor of chat .* is v2 .* never falls to v1"):
        raise_floor(place.root, "chat-v1", FAULT)
    with pytest.raises(ConfigError, match="needs its reason"):
        raise_floor(place.root, "chat-v3", Reason("me", " "))
    with pytest.raises(ConfigError, match="no name of a bundle"):
        raise_floor(place.root, "chat", FAULT)
    assert json.loads((place.root / FLOORS).read_bytes())["chat"]["version"] == 2


def test_nothing_moves_while_the_floors_cannot_be_read(place: Place) -> None:
    place.deploy(1, 2)
    (place.root / FLOORS).write_text('{"chat": 1}')
    for call in (place.rollback, lambda: place.deploy(3), lambda: raise_floor(place.root, "chat-v1", FAULT)):
        with pytest.raises((IntegrityError, ConfigError), match=r"floors\.json|not signed off"):
            call()
    assert (place.root / "current").readlink() == Path("releases/chat-v2")


def test_the_way_back_by_itself_is_not_held_up_by_a_floor(place: Place) -> None:
    def fail(_release: Path) -> Health:
        raise HealthCheckFailed("no answer")

    place.deploy(0)
    raise_floor(place.root, "chat-v1", FAULT)
    with pytest.raises(HealthCheckFailed, match="current is chat-v0 again"):
        place.deploy(1, checks=Checks(fit, fail))
    assert place.current == "chat-v0"


def test_permit_lets_one_older_bundle_in_and_the_history_names_it(place: Place) -> None:
    place.deploy(2)
    permit = place.permit(1)
    assert permit.manifest_sha256 == file_sha256(place.bundles / "chat-v1" / MANIFEST)
    assert permit.root_id == json.loads((place.root / MARKER).read_bytes())["root_id"]
    place.deploy(1)
    moves = status(place.root).moves
    assert (moves[-1].to_bundle, moves[-1].permit_sha256) == ("chat-v1", file_sha256(place.root / "permits" / "chat-v1.json"))
    assert moves[0].permit_sha256 is None
    place.deploy(2)
    with pytest.raises(ConfigError, match="chat-v0 is older than chat-v2"):
        place.deploy(0)


def test_permit_opens_the_floor_for_rollback_too(place: Place) -> None:
    place.deploy(1, 2)
    raise_floor(place.root, "chat-v2", FAULT)
    place.permit(1)
    place.rollback()
    assert place.current == "chat-v1"


def test_permit_ends_with_its_time(place: Place) -> None:
    place.deploy(2)
    with pytest.raises(ConfigError, match="would be over"):
        place.permit(1, datetime.now(UTC) - timedelta(seconds=1))
    place.permit(1)
    path = permit_path(DeploymentRoot(place.root), "chat-v1")
    over = json.loads(path.read_bytes()) | {"expires_at": "2026-01-01T00:00:00+00:00"}
    resign(path, over, place.key)
    with pytest.raises(ConfigError, match="chat-v1 is older than chat-v2"):
        place.deploy(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"root_id": "0" * 32}, "it was signed for the root 00000000000000000000000000000000, not for this one"),
        ({"manifest_sha256": "0" * 64}, "with the manifest 000000000000, not"),
        ({"bundle": "chat-v0"}, "it was signed for chat-v0"),
        ({"permit_format": 2}, "not for this one"),
        ({"expires_at": "soon"}, "no permit that this version reads"),
        ({"uses": 3}, "no permit that this version reads"),
    ],
)
def test_permit_holds_for_nothing_else(place: Place, change: dict[str, object], words: str) -> None:
    place.deploy(2)
    place.permit(1)
    path = permit_path(DeploymentRoot(place.root), "chat-v1")
    resign(path, json.loads(path.read_bytes()) | change, place.key)
    with pytest.raises(IntegrityError, match=words):
        place.deploy(1)
    assert place.current == "chat-v2"


def test_permit_of_another_key_or_with_a_changed_byte_is_refused(place: Place, tmp_path: Path) -> None:
    place.deploy(2)
    place.permit(1, key=ensure_key(tmp_path / "stranger.pem"))
    with pytest.raises(IntegrityError, match=r"permits/chat-v1\.json: bad signature"):
        place.deploy(1)
    place.permit(1)
    path = permit_path(DeploymentRoot(place.root), "chat-v1")
    path.write_bytes(path.read_bytes().replace(b"rebuilt", b"Rebuilt"))
    with pytest.raises(IntegrityError, match="bad signature"):
        place.deploy(1)
    path.with_suffix(".sig").unlink()
    with pytest.raises(IntegrityError, match="bad signature"):
        place.deploy(1)
    assert place.current == "chat-v2"


def test_permit_does_not_travel_to_another_root(place: Place, tmp_path: Path) -> None:
    place.deploy(2)
    other = Place(place.bundles, tmp_path / "other", place.key)
    other.deploy(2)
    other.permit(1)
    shutil.copytree(other.root / "permits", place.root / "permits")
    with pytest.raises(IntegrityError, match="not for this one"):
        place.deploy(1)


def test_a_root_of_an_earlier_version_gets_its_id_with_the_first_permit(place: Place) -> None:
    place.deploy(2)
    (place.root / MARKER).write_bytes(b'{"deployment_format":1}')
    assert DeploymentRoot.open(place.root).root_id() is None
    root_id = place.permit(1).root_id
    assert len(root_id) == 32 and DeploymentRoot.open(place.root).root_id() == root_id
    place.deploy(1)
    assert place.permit(1).root_id == root_id
    (place.root / MARKER).write_bytes(b'{"deployment_format":2}')
    with pytest.raises(ConfigError, match="unknown format"):
        status(place.root)


@pytest.mark.parametrize(("name", "expected"), [("chat-v3", ("chat", 3)), ("chat-13b-awq-int4-v12", ("chat-13b-awq-int4", 12))])
def test_split_name_returns_family_and_version(name: str, expected: tuple[str, int]) -> None:
    assert split_name(name) == expected


def resign(path: Path, document: dict[str, object], key: SigningKey) -> None:
    """Write what the holder of the key could have signed."""
    from model_optimizer.release.sign import sign_bytes
    from model_optimizer.store import canonical_json

    content = canonical_json(document)
    path.write_bytes(content)
    path.with_suffix(".sig").write_bytes(sign_bytes(content, key))
