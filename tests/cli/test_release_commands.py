"""`floor`, `allow-rollback`, `export` and what `status` shows of them, in this process: what they print and how they end."""

import json
from pathlib import Path

import pytest
from deploy_fixtures import fit, make_bundles
from typer.testing import CliRunner

from flows.cli.main import app
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.release.deploy import Checks, deploy
from model_optimizer.release.deployment_root import Reason

KEY = ("--public-key", "keys/key.pem.pub")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("release-cli")
    make_bundles(root, tiny_llama)
    return root


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def call(*arguments: str) -> str:
    """Return what a command prints; its error is raised as the command line would tell it."""
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done.stdout.strip()


def test_floor_and_signed_exception_steer_what_may_come_back(made: Path) -> None:
    for version in ("chat-v1", "chat-v2"):
        deploy(made / "bundles" / version, made / "root", Reason("me"), public_key=made / KEY[1], checks=Checks(fit, fit))
    told = call("floor", "chat-v2", "--to", "root", "--why", "CVE in v1", "--by", "anna")
    assert told == "nothing older than chat-v2 becomes current in root any more: CVE in v1"
    with pytest.raises(ConfigError, match=r"chat-v1 is below the floor chat-v2 of root \(CVE in v1; anna\)"):
        call("rollback", "--to", "root")
    with pytest.raises(ConfigError, match="model-optimizer allow-rollback chat-v0 --to ROOT --key KEY --reason WHY"):
        call("deploy", "bundles/chat-v0", "--to", "root", *KEY)
    asked = ("allow-rollback", "chat-v1", "--to", "root", "--reason", "v2 leaks")
    permit = json.loads(call(*asked, "--key", "keys/key.pem", "--expires-in", "2h", "--json"))
    assert (permit["bundle"], permit["reason"]) == ("chat-v1", "v2 leaks")
    assert call("rollback", "--to", "root", *KEY).startswith("chat-v1 is current in root (before: chat-v2; ")
    lines = call("status", "--to", "root").splitlines()
    assert any(line.startswith("newest    chat-v2; floor chat-v2: CVE in v1 (anna, ") for line in lines)
    assert any(line.startswith("current   chat-v1") and line.endswith("below the floor") for line in lines)
    seen = json.loads(call("status", "--to", "root", "--json"))
    assert (seen["bounds"][0]["floor"], len(seen["moves"][-1]["permit_sha256"])) == (2, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--to", "elsewhere", "--reason", "x", "--key", "keys/key.pem"), ConfigError, "is not a deployment root"),
        (("--to", "root", "--reason", "x", "--key", "keys/none.pem"), ConfigError, "there is no signing key keys/none.pem"),
        (
            ("--to", "root", "--reason", "x", "--expires-in", "soon"),
            ConfigError,
            "--expires-in 'soon': give a number with one of",
        ),
        (("--to", "root", "--reason", " ", "--key", "keys/key.pem"), ConfigError, "needs its reason in words"),
    ],
)
def test_allow_rollback_names_its_fault(made: Path, arguments: tuple[str, ...], error: type[Exception], words: str) -> None:
    deploy(
        made / "bundles" / "chat-v1", made / "root", Reason("me", "", "again"), public_key=made / KEY[1], checks=Checks(fit, fit)
    )
    with pytest.raises(error, match=words):
        call("allow-rollback", "bundles/chat-v1", *arguments)


def test_export_says_what_it_wrote_and_what_must_be_known() -> None:
    lines = call("export", "bundles/chat-v0", "--to", "repository", "--form", "triton", *KEY).splitlines()
    assert lines[:2] == [
        "chat-v0 is written to repository for triton",
        "- the repository must be mounted at /models, which 1/model.json names",
    ]
    with pytest.raises(ConfigError, match="a new or an empty folder"):
        call("export", "bundles/chat-v0", "--to", "repository", "--form", "triton", *KEY)
    with pytest.raises(ConfigError, match="--set 'image': write KEY=VALUE"):
        call("export", "bundles/chat-v0", "--to", "new", "--form", "kubernetes", "--set", "image", *KEY)
    with pytest.raises(UnsupportedError, match="int8-channel"):
        call("export", "bundles/chat-v1", "--to", "new", "--form", "triton", *KEY)
    with pytest.raises(ConfigError, match=r"there is no public key keys/other\.pub"):
        call("export", "bundles/chat-v1", "--to", "new", "--form", "triton", "--public-key", "keys/other.pub")
