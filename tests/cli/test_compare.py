"""`model-optimizer compare` finds runs by directory, bundle name and run id, and says what differs."""

import json
from pathlib import Path

import pytest
from reporting_fixtures import accepted_after_repair, make_report

from flows.cli.compare import compare_runs, find_run, read_report
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.errors import ConfigError
from model_optimizer.reporting.formats.json import render_json

RUN_ID = "3f2a9c1e-0000-4000-8000-000000000001"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two bundles and three runs, one of which ended early; it is the current directory."""
    home = tmp_path / ".model-optimizer"
    write_bundle(home / "bundles" / "chat-v1", make_report(Verdict.REJECT))
    write_bundle(home / "bundles" / "chat-v2", accepted_after_repair())
    (home / "runs").mkdir()
    documents = {RUN_ID: {"bundle": str(home / "bundles" / "chat-v2")}, "3f2a9c1e-1": {}, "ended-early": {"verdict": None}}
    for name, document in documents.items():
        (home / "runs" / f"{name}.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_bundle(bundle: Path, report: Report) -> None:
    (bundle / "metrics").mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    (bundle / "metrics" / "report.json").write_bytes(render_json(report))


@pytest.mark.parametrize("name", ["chat-v2", ".model-optimizer/bundles/chat-v2", RUN_ID, RUN_ID[:10]])
def test_find_run_takes_a_name_a_directory_and_an_id(folder: Path, name: str) -> None:
    assert find_run(name) == folder / ".model-optimizer" / "bundles" / "chat-v2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chat-v9", "no bundle or run 'chat-v9'"),
        ("", "no bundle or run ''"),
        ("3f2a9c1e", "2 runs begin with '3f2a9c1e'"),
        ("ended", "no bundle or run 'ended'"),
        ("ended-early", "ended before its release"),
    ],
)
def test_find_run_says_what_there_is_when_it_finds_none(folder: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_run(name)


def test_read_report_refuses_a_bundle_without_one_and_a_report_of_another_version(folder: Path) -> None:
    bundle = folder / ".model-optimizer" / "bundles" / "chat-v1"
    path = bundle / "metrics" / "report.json"
    document = json.loads(path.read_text())
    document["stages"][0]["cached"] = True
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"no report of this version \(stages\.0\.cached: "):
        read_report(bundle)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_report(bundle)


def test_compare_runs_prints_machine_readable_differences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_runs("chat-v1", RUN_ID, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["verdict"] == {"left": "REJECT", "right": "ACCEPT"}
    found = {measure["name"]: measure for measure in document["measures"]}
    assert found["everyday_facts_difference"]["difference"] == pytest.approx(0.041)
    assert found["everyday_facts_difference"]["intervals_apart"] is True
    assert found["engine_size_ratio"]["against_own_baseline"] is True
    assert document["only_left"] == ["generation_speed_ratio"]


def test_compare_runs_draws_both_runs_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_runs("chat-v1", "chat-v2", as_json=False)
    text = capsys.readouterr().out
    assert "chat-v1 and chat-v2" in text
    for words in ("REJECT", "ACCEPT", "everyday facts", "+0.041", "not in chat-v2: generation speed ratio", "repairs"):
        assert words in text


def test_compare_runs_writes_a_page_beside_what_it_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_runs("chat-v1", "chat-v2", as_json=True, page=folder / "both.html")
    document = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate for gate in document["gates"]}
    assert gates["everyday_facts_difference"]["difference"] == pytest.approx(0.041)
    interval = gates["everyday_facts_difference"]["difference_interval"]
    assert interval["lower"] < 0.041 < interval["upper"]
    assert document["comparable"] is True and document["strategy"]["repairs"] == {"left": "0", "right": "2"}
    assert "chat-v1 and chat-v2" in (folder / "both.html").read_text(encoding="utf-8")


def test_compare_runs_doubts_golden_sets_of_one_name_with_other_items(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, digest in (("chat-v1", "aa"), ("chat-v2", "bb")):
        statement = {"predicate": {"buildDefinition": [{"name": "golden set everyday-facts", "digest": {"sha256": digest}}]}}
        (folder / ".model-optimizer" / "bundles" / name / "provenance.json").write_text(json.dumps(statement))
    compare_runs("chat-v1", "chat-v2", as_json=False)
    assert "not comparable: golden sets of the same name with other items (everyday-facts)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_compare_runs_refuses_a_run_that_mlflow_does_not_have(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="has no run 0123456789abcdef0123456789abcdef to compare"):
        compare_runs("0123456789abcdef" * 2, "chat-v1", as_json=True)
