"""The commands that need no run: instant, documented, machine-readable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from model_optimizer.paths import REPOSITORY_ROOT
from model_optimizer.profile import load_profile
from model_optimizer.release.version import optimizer_hash, package_version

COMMAND = str(Path(sys.executable).with_name("model-optimizer"))


def call(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_prints_version_and_optimizer_hash(tmp_path: Path) -> None:
    assert call("--version", cwd=tmp_path).split() == ["model-optimizer", package_version(), f"({optimizer_hash()})"]


def test_help_names_every_command(tmp_path: Path) -> None:
    text = call("--help", cwd=tmp_path)
    for command in (
        "run",
        "plan",
        "submit",
        "quantize",
        "diagnose",
        "report",
        "compare",
        "verify-bundle",
        "deploy",
        "rollback",
        "status",
        "store",
        "init",
        "doctor",
        "schema",
    ):
        assert command in text


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_and_version_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom flows.cli.main import main\n"
        f"sys.argv = ['model-optimizer', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'prefect', 'mlflow', 'scipy', 'onnx'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip().endswith("[]"), done.stderr


def test_schema_file_of_the_editor_is_current(tmp_path: Path) -> None:
    stored = json.loads((REPOSITORY_ROOT / "docs" / "profile.schema.json").read_text())
    assert json.loads(call("schema", cwd=tmp_path)) == stored, "write it anew: model-optimizer schema > docs/profile.schema.json"


def test_init_writes_a_profile_that_loads(tmp_path: Path) -> None:
    call("init", "my_model.yaml", "--model", "./weights", cwd=tmp_path)
    profile = load_profile(tmp_path / "my_model.yaml")
    assert (profile.name, profile.model.ref, profile.verify.soak.duration) == ("my-model", "./weights", 86400.0)


def test_doctor_reports_libraries_as_json(tmp_path: Path) -> None:
    facts = json.loads(call("doctor", "--json", cwd=tmp_path))
    assert facts["libraries"]["torch"].startswith("2.")
    assert facts["disk_free_bytes"] > 0


def test_plan_says_that_everything_is_to_run_in_an_empty_folder(tmp_path: Path) -> None:
    rows = json.loads(call("plan", str(REPOSITORY_ROOT / "profiles" / "quickstart.yaml"), "--json", cwd=tmp_path))["stages"]
    assert [row["stage"] for row in rows] == ["profile", "scan", "quantize", "compile", "memory", "verify", "package"]
    assert all(row["state"].startswith("to run") for row in rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("profile", sorted((REPOSITORY_ROOT / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_profile_loads(profile: Path) -> None:
    assert load_profile(profile).name
