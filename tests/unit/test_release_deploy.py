"""Deploy, go back, say what is there: on real bundles of a tiny model."""

import json
import multiprocessing
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deploy_fixtures import fit, make_bundles

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.errors import ConfigError, HealthCheckFailed, IntegrityError, StorageError, UnsupportedError
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.release.deploy import Checks, Deployed, Status, copy_file, deploy, rollback, status
from model_optimizer.release.deployment_root import HISTORY, DeploymentRoot, Reason
from model_optimizer.release.health import Health, check_device, check_health
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.release.sign import SigningKey
from model_optimizer.release.signoff import read_record, write_record
from model_optimizer.release.verify import verify_bundle

WHO = Reason("tester", "a test")
FIT = Checks(fit, fit)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with bundles/ and keys/."""
    root = tmp_path_factory.mktemp("deploy")
    make_bundles(root, tiny_llama)
    return root


@pytest.fixture(scope="module")
def bundles(made: Path) -> Path:
    return made / "bundles"


@pytest.fixture(scope="module")
def key(made: Path) -> Path:
    return made / "keys" / "key.pem.pub"


@pytest.fixture
def root(tmp_path: Path, bundles: Path, key: Path) -> Path:
    """A root that chat-v0 and then chat-v1 were deployed to."""
    for name in ("chat-v0", "chat-v1"):
        deploy(bundles / name, tmp_path / "root", WHO, public_key=key, checks=FIT)
    return tmp_path / "root"


def names(root: Path) -> tuple[str | None, str | None]:
    seen = status(root)
    return seen.current, seen.previous


def test_deploy_makes_a_verified_copy_current_after_running_its_samples(tmp_path: Path, bundles: Path, key: Path) -> None:
    root = tmp_path / "root"
    done = deploy(bundles / "chat-v1", root, WHO, public_key=key)
    assert (done.bundle, done.health.num_samples, done.health.device) == ("chat-v1", 2, "device: ok (cpu)")
    assert (root / "current").readlink() == Path("releases/chat-v1")
    facts = verify_bundle(root / "current", public_key=key)
    assert facts.manifest_sha256 == file_sha256(bundles / "chat-v1" / MANIFEST)
    assert (root / "current" / "model" / "model.safetensors").stat().st_nlink == 1
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == [
        "current",
        "deployment.json",
        "history.jsonl",
        "releases",
    ]


def test_deploy_writes_who_what_why_from_and_to(root: Path, bundles: Path) -> None:
    rollback(root, Reason("anna", "errors rose"))
    lines = [json.loads(line) for line in (root / HISTORY).read_text().splitlines()]
    assert [(line["who"], line["what"], line["why"], line["from_bundle"], line["to_bundle"]) for line in lines] == [
        ("tester", "deploy", "a test", None, "chat-v0"),
        ("tester", "deploy", "a test", "chat-v0", "chat-v1"),
        ("anna", "rollback", "errors rose", "chat-v1", "chat-v0"),
    ]
    assert lines[1]["manifest_sha256"] == file_sha256(bundles / "chat-v1" / MANIFEST)
    assert lines[0]["at"] < lines[1]["at"] < lines[2]["at"]


def test_deploy_of_the_current_bundle_changes_nothing(root: Path, bundles: Path, key: Path) -> None:
    before = (root / HISTORY).read_bytes()
    done = deploy(bundles / "chat-v1", root, WHO, public_key=key, checks=FIT)
    assert done.switched.move is None
    assert (root / HISTORY).read_bytes() == before
    assert names(root) == ("chat-v1", "chat-v0")


def test_deploy_of_a_held_bundle_takes_over_its_newer_record(tmp_path: Path, root: Path, made: Path, key: Path) -> None:
    shutil.copytree(made / "bundles", tmp_path / "bundles")
    bundle = tmp_path / "bundles" / "chat-v1"
    signer = SigningKey(private=made / "keys" / "key.pem", public=key)
    write_record(bundle, read_record(bundle, key).model_copy(update={"level": "final"}), signer)
    deploy(bundle, root, WHO, public_key=key, checks=FIT)
    assert {row.bundle: row.level for row in status(root).releases} == {"chat-v0": "none", "chat-v1": "final"}
    assert read_record(root / "releases" / "chat-v1", key).level == "final"


def test_deploy_refuses_what_is_not_signed_off_without_a_reason(tmp_path: Path, bundles: Path, key: Path) -> None:
    words = r"chat-v3 is not signed off \(verdict REJECT; gates: everyday_facts_difference\); .*, or give --override REASON$"
    with pytest.raises(ConfigError, match=words):
        deploy(bundles / "chat-v3", tmp_path / "root", WHO, public_key=key, checks=FIT)
    with pytest.raises(ConfigError, match="in words"):
        deploy(bundles / "chat-v3", tmp_path / "root", Reason("me", "", " "), public_key=key, checks=FIT)
    assert not (tmp_path / "root").exists()
    deploy(bundles / "chat-v3", tmp_path / "root", Reason("me", "", "canary of one user"), public_key=key, checks=FIT)
    assert status(tmp_path / "root").moves[0].override == "canary of one user"


@pytest.mark.parametrize("place", ["model/config.json", "model.sig", "health_check.sh"])
def test_deploy_refuses_a_changed_bundle_and_leaves_the_root_alone(tmp_path: Path, bundles: Path, key: Path, place: str) -> None:
    shutil.copytree(bundles, tmp_path / "bundles")
    with (tmp_path / "bundles" / "chat-v1" / place).open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(IntegrityError, match=place) as caught:
        deploy(tmp_path / "bundles" / "chat-v1", tmp_path / "root", WHO, public_key=key, checks=FIT)
    assert caught.value.exit_code == 6
    assert not (tmp_path / "root").exists()


def test_deploy_refuses_a_bundle_that_changes_while_it_is_copied(tmp_path: Path, bundles: Path, key: Path, root: Path) -> None:
    def swap(source: Path, destination: Path) -> None:
        copy_file(source, destination)
        if source.name == "config.json":
            destination.write_bytes(destination.read_bytes().replace(b"1", b"2"))

    with pytest.raises(IntegrityError, match=r"config\.json"):
        deploy(bundles / "chat-v2", root, WHO, public_key=key, checks=FIT, transfer=swap)
    assert names(root) == ("chat-v1", "chat-v0")
    assert DeploymentRoot(root).names() == ("chat-v0", "chat-v1")


def test_deploy_refuses_a_record_that_changes_while_it_is_copied(tmp_path: Path, bundles: Path, key: Path, root: Path) -> None:
    def swap(source: Path, destination: Path) -> None:
        copy_file(source, destination)
        if source.name == "chat-v2.signoff.json":
            destination.write_bytes(destination.read_bytes().replace(b'"level":"provisional"', b'"level":"final"'))

    with pytest.raises(IntegrityError, match="its sign-off record was modified while it was copied"):
        deploy(bundles / "chat-v2", root, WHO, public_key=key, checks=FIT, transfer=swap)
    assert names(root) == ("chat-v1", "chat-v0")


def test_deploy_of_a_bundle_that_waits_for_its_sign_off_needs_an_override(tmp_path: Path, made: Path, key: Path) -> None:
    shutil.copytree(made / "bundles", tmp_path / "bundles")
    bundle = tmp_path / "bundles" / "chat-v1"
    signer = SigningKey(private=made / "keys" / "key.pem", public=key)
    changes = {"decision": "waiting", "level": "none", "request": None, "request_signature": ""}
    write_record(bundle, read_record(bundle, key).model_copy(update=changes), signer)
    with pytest.raises(
        ConfigError, match=r"chat-v1 is not signed off \(its record says waiting\); chat-v1 waits for its sign-off"
    ):
        deploy(bundle, tmp_path / "root", WHO, public_key=key, checks=FIT)
    assert not (tmp_path / "root").exists()


def test_deploy_refuses_a_folder_with_other_things(tmp_path: Path, bundles: Path, key: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not a deployment root but holds notes\.txt"):
        deploy(bundles / "chat-v1", tmp_path, WHO, public_key=key, checks=FIT)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_deploy_refuses_another_bundle_of_a_name_that_is_held(
    tmp_path: Path, bundles: Path, root: Path, key: Path, tiny_llama: Path
) -> None:
    other = make_bundles(tmp_path / "other", tiny_llama)
    with pytest.raises(ConfigError, match="holds another chat-v1"):
        deploy(other / "chat-v1", root, WHO, public_key=tmp_path / "other" / "keys" / "key.pem.pub", checks=FIT)
    assert names(root) == ("chat-v1", "chat-v0")


def test_deploy_repairs_a_damaged_release_unless_it_is_current(root: Path, bundles: Path, key: Path) -> None:
    for name in ("chat-v0", "chat-v1"):
        with (root / "releases" / name / "config.yaml").open("ab") as stream:
            stream.write(b"#")
    with pytest.raises(IntegrityError, match="chat-v1 is damaged and current"):
        deploy(bundles / "chat-v1", root, WHO, public_key=key, checks=FIT)
    with pytest.raises(IntegrityError, match=r"chat-v0/config\.yaml: modified"):
        rollback(root, WHO)
    assert status(root).fault is not None
    deploy(bundles / "chat-v0", root, WHO, public_key=key, checks=FIT)
    deploy(bundles / "chat-v1", root, WHO, public_key=key, checks=FIT)
    assert (status(root).current, status(root).fault) == ("chat-v1", None)
    assert not [path for path in root.iterdir() if "incoming" in path.name]


def test_deploy_activates_nothing_when_the_samples_differ(root: Path, bundles: Path, key: Path) -> None:
    with pytest.raises(HealthCheckFailed, match=r"chat-v4: sample 2 of 2 differs from token 5 on") as caught:
        deploy(bundles / "chat-v4", root, WHO, public_key=key)
    assert caught.value.exit_code == 3
    assert names(root) == ("chat-v1", "chat-v0")
    assert DeploymentRoot(root).names() == ("chat-v0", "chat-v1")


@pytest.mark.parametrize("error", [HealthCheckFailed("no answer"), RuntimeError("engine fell over"), KeyboardInterrupt()])
def test_deploy_goes_back_by_itself_when_the_check_after_fails(
    root: Path, bundles: Path, key: Path, error: BaseException
) -> None:
    def fail(release: Path) -> Health:
        assert (release.name, release.readlink()) == ("current", Path("releases/chat-v2"))
        raise error

    with pytest.raises(type(error)) as caught:
        deploy(bundles / "chat-v2", root, WHO, public_key=key, checks=Checks(fit, fail))
    if isinstance(error, HealthCheckFailed):
        assert str(caught.value) == "chat-v2: no answer; current is chat-v1 again"
    seen = status(root)
    assert (seen.current, seen.previous) == ("chat-v1", "chat-v0")
    assert [move.what for move in seen.moves][-2:] == ["deploy", "automatic rollback"]


def test_deploy_takes_the_link_away_when_the_first_deployment_fails_its_check(tmp_path: Path, bundles: Path, key: Path) -> None:
    def fail(_release: Path) -> Health:
        raise HealthCheckFailed("no answer")

    with pytest.raises(HealthCheckFailed, match="nothing is deployed, as before"):
        deploy(bundles / "chat-v1", tmp_path / "root", WHO, public_key=key, checks=Checks(fit, fail))
    assert names(tmp_path / "root") == (None, None)
    with pytest.raises(ConfigError, match="nothing to roll back to from an empty root; releases here: chat-v1"):
        rollback(tmp_path / "root", WHO)


def test_deploy_leaves_a_move_of_somebody_else_alone_when_its_check_fails(root: Path, bundles: Path, key: Path) -> None:
    def move_and_fail(_release: Path) -> Health:
        rollback(root, Reason("other"), "v0")
        raise HealthCheckFailed("no answer")

    with pytest.raises(HealthCheckFailed):
        deploy(bundles / "chat-v2", root, WHO, public_key=key, checks=Checks(fit, move_and_fail))
    assert status(root).current == "chat-v0"


def test_rollback_goes_further_back_each_time_and_never_to_what_was_fled(root: Path, bundles: Path, key: Path) -> None:
    deploy(bundles / "chat-v2", root, WHO, public_key=key, checks=FIT)
    seen = []
    for _ in range(2):
        rollback(root, WHO)
        seen.append(names(root))
    assert seen == [("chat-v1", "chat-v0"), ("chat-v0", None)]
    with pytest.raises(ConfigError, match=r"nothing to roll back to from chat-v0; releases here: chat-v0, chat-v1, chat-v2"):
        rollback(root, WHO)


@pytest.mark.parametrize("version", ["chat-v0", "v0", "0"])
def test_rollback_takes_a_named_version_without_the_source(tmp_path: Path, bundles: Path, key: Path, version: str) -> None:
    shutil.copytree(bundles, tmp_path / "bundles")
    root = tmp_path / "root"
    for name in ("chat-v0", "chat-v1"):
        deploy(tmp_path / "bundles" / name, root, WHO, public_key=key, checks=FIT)
    shutil.rmtree(tmp_path / "bundles")
    assert rollback(root, WHO, version).move is not None
    assert rollback(root, WHO, version).move is None
    assert names(root) == ("chat-v0", None)
    assert rollback(root, WHO, "v1").move is not None
    assert names(root) == ("chat-v1", "chat-v0")


def test_rollback_refuses_an_unknown_version_and_a_folder_that_is_no_root(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no release 'v7'; known: chat-v0, chat-v1"):
        rollback(root, WHO, "v7")
    with pytest.raises(ConfigError, match=r"no release '\.\./\.\./etc'; known"):
        rollback(root, WHO, "../../etc")
    for call in (lambda: rollback(tmp_path, WHO), lambda: status(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="is not a deployment root"):
            call()


def test_rollback_stays_when_the_earlier_release_lacks_a_file(root: Path) -> None:
    (root / "releases" / "chat-v0" / "model" / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"chat-v0/model/model\.safetensors: missing"):
        rollback(root, WHO)
    assert status(root).current == "chat-v1"


def test_rollback_takes_less_than_100_ms(root: Path) -> None:
    times_ms = sorted(rollback(root, WHO, ("v0", "v1")[turn % 2]).elapsed_ms for turn in range(20))
    assert times_ms[len(times_ms) // 2] < 100


def test_rollback_needs_no_readable_history_when_the_version_is_named(root: Path) -> None:
    (root / HISTORY).write_text("{}\n")
    with pytest.raises(IntegrityError, match=r"history\.jsonl line 1"):
        rollback(root, WHO)
    assert rollback(root, WHO, "v0").move is not None


def test_history_drops_a_torn_last_line_and_goes_on(root: Path) -> None:
    with (root / HISTORY).open("ab") as stream:
        stream.write(b'{"at":"2026-1')
    assert names(root) == ("chat-v1", "chat-v0")
    rollback(root, WHO)
    assert [move.to_bundle for move in DeploymentRoot(root).history()] == ["chat-v0", "chat-v1", "chat-v0"]


@pytest.mark.parametrize("target", ["releases/chat-v9", "/etc", "releases/../releases"])
def test_status_refuses_a_link_out_of_the_releases(root: Path, target: str) -> None:
    (root / "current").unlink()
    (root / "current").symlink_to(target)
    with pytest.raises(IntegrityError, match="which is no release of this root"):
        status(root)
    rollback(root, WHO, "v1")
    assert status(root).current == "chat-v1"


def test_deploy_mends_a_link_that_leads_nowhere(root: Path, bundles: Path, key: Path) -> None:
    (root / "current").unlink()
    (root / "current").symlink_to("releases/chat-v9")
    with pytest.raises(ConfigError, match="chat-v0 is older than chat-v1"):
        deploy(bundles / "chat-v0", root, WHO, public_key=key, checks=FIT)
    deploy(bundles / "chat-v1", root, WHO, public_key=key, checks=FIT)
    assert status(root).current == "chat-v1"


def test_deploy_tells_of_a_root_that_cannot_be_made(tmp_path: Path, bundles: Path, key: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        deploy(bundles / "chat-v1", tmp_path / "file" / "root", WHO, public_key=key, checks=FIT)


def test_two_deployments_at_once_both_end_complete(root: Path, bundles: Path, key: Path) -> None:
    def one(name: str) -> Deployed | None:
        try:
            return deploy(bundles / name, root, WHO, public_key=key, checks=FIT)
        except ConfigError as error:  # who comes after a newer one
            assert "which was current in" in str(error)
            return None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, ["chat-v2", "chat-v1", "chat-v2", "chat-v0"]))
    seen: Status = status(root)
    assert seen.fault is None
    moves = DeploymentRoot(root).history()
    assert [move.from_bundle for move in moves[1:]] == [move.to_bundle for move in moves[:-1]]
    assert DeploymentRoot(root).names() == ("chat-v0", "chat-v1", "chat-v2")
    assert seen.bounds[0].newest == 2


def test_readers_never_see_a_gap_over_a_thousand_swaps(bundles: Path, key: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # a durable write costs nothing there: more swaps a second, more chances for a gap
    root = (memory if memory.is_dir() and os.access(memory, os.W_OK) else tmp_path) / f"mo-readers-{os.getpid()}"
    known = {(bundles / name / MANIFEST).read_bytes() for name in ("chat-v0", "chat-v1")}
    try:
        for name in ("chat-v0", "chat-v1"):
            deploy(bundles / name, root, WHO, public_key=key, checks=FIT)
        here, there = multiprocessing.Pipe()
        reader = multiprocessing.get_context("fork").Process(
            target=read_until_told, args=(root / "current" / MANIFEST, known, there)
        )
        reader.start()
        moved = sum(rollback(root, WHO, ("v0", "v1")[turn % 2]).move is not None for turn in range(1000))
        here.send("enough")
        num_reads, faults = here.recv()
        reader.join()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert (moved, faults) == (1000, [])
    assert num_reads > 1000


def read_until_told(path: Path, known: set[bytes], end: "multiprocessing.connection.Connection") -> None:
    """Read a file over and over; send how often, and every time it was absent or torn."""
    num_reads, faults = 0, []
    while not end.poll():
        try:
            if path.read_bytes() not in known:
                faults.append("torn")
        except OSError as error:
            faults.append(str(error))
        num_reads += 1
    end.send((num_reads, faults))


def test_check_health_repeats_every_sample_of_the_bundle(bundles: Path) -> None:
    assert check_health(bundles / "chat-v0").num_samples == 2
    assert check_device(bundles / "chat-v0").num_samples == 0


def test_check_health_refuses_another_framework_version(tmp_path: Path, bundles: Path) -> None:
    shutil.copytree(bundles / "chat-v1", tmp_path / "chat-v1")
    place = tmp_path / "chat-v1" / "model" / "metadata.json"
    place.write_text(place.read_text().replace('"framework_version":"2.', '"framework_version":"1.'))
    with pytest.raises(UnsupportedError, match=r"1\."):
        check_health(tmp_path / "chat-v1")


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("data/sample.json", "{}"),
        ("data/sample.json", '{"samples": []}'),
        ("model/kv_cache_config.json", "[]"),
        ("model/config.json", "{}"),
        ("model/metadata.json", "{"),
    ],
)
def test_check_health_names_what_does_not_open(tmp_path: Path, bundles: Path, place: str, content: str) -> None:
    shutil.copytree(bundles / "chat-v1", tmp_path / "chat-v1")
    (tmp_path / "chat-v1" / place).write_text(content)
    with pytest.raises((HealthCheckFailed, ConfigError, UnsupportedError)):
        check_health(tmp_path / "chat-v1")


def test_check_device_tells_an_unfit_device_from_a_broken_script(tmp_path: Path, bundles: Path) -> None:
    shutil.copytree(bundles / "chat-v1", tmp_path / "chat-v1")
    script = tmp_path / "chat-v1" / "health_check.sh"
    text = script.read_text()
    script.write_text(text.replace("INSTRUCTION_SETS=''", "INSTRUCTION_SETS='avx9000'"))
    with pytest.raises(UnsupportedError, match="avx9000"):
        check_device(tmp_path / "chat-v1")
    script.write_text("exit 7")
    with pytest.raises(HealthCheckFailed, match="ended with 7"):
        check_device(tmp_path / "chat-v1")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_the_health_check(bundles: Path) -> None:
    for script in (PACKAGE_ROOT / "release" / "data" / "health_check.sh", bundles / "chat-v1" / "health_check.sh"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")
