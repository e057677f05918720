"""`plan` where the target is another machine: all else is checked, and that is said."""

import json
from pathlib import Path

import pytest
from entry import Command
from tiny import write_project

from model_optimizer.errors import UnsupportedError
from model_optimizer.hardware.catalogue import probe_kind


@pytest.fixture
def elsewhere() -> str:
    """A device of the catalogue that this machine does not have."""
    for name in ("l40s", "h100-sxm", "a100-80g"):
        try:
            probe_kind(name)
        except UnsupportedError:
            return name
    pytest.skip("this machine has every device that the test knows")


def test_plan_checks_the_rest_where_the_target_is_another_machine(
    elsewhere: str, command: Command, tmp_path: Path, tiny_llama: Path
) -> None:
    profile = write_project(tmp_path, tiny_llama)
    text = f"{profile.read_text()}target: {{hardware: {elsewhere}, framework: vllm==0.24.0}}\n"
    profile.write_text(text)
    planned = command("plan", "tiny.yaml", "--json", "--github", "told", cwd=tmp_path)
    assert planned.code == 0, planned.err
    document = json.loads(planned.out)
    assert [row["state"][:6] for row in document["stages"]] == ["to run"] * 7
    assert document["warnings"][0].startswith("Checked on another machine than the target") and len(document["warnings"]) == 1
    assert 0 < document["estimate"]["wall_lower_s"] < document["estimate"]["wall_s"] < document["estimate"]["wall_upper_s"]
    assert "**Checked on another machine" in (tmp_path / "told" / "comment.md").read_text()
    profile.write_text(text.replace("words", "nowhere"))
    refused = command("plan", "tiny.yaml", "--github", "told", cwd=tmp_path)
    assert refused.code == 2 and "nowhere" in refused.err
    assert (tmp_path / "told" / "annotations.txt").read_text().startswith("::error file=tiny.yaml,line=")
