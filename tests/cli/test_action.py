"""The composite action, executed as CI would: each `run:` block of action.yml in a clean checkout."""

import json
import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from github_runner import Runner, clean_checkout, this_environment
from reporting_fixtures import make_report
from signoff_fixtures import key_of, publish_waiting, request_of, waiting_inputs
from tiny import write_project

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.paths import REPOSITORY_ROOT
from model_optimizer.release.signoff import read_record
from model_optimizer.reporting.formats.github import COMMENT_LIMIT_BYTES, SUMMARY_LIMIT_BYTES
from model_optimizer.reporting.renderers import render_documents

GITHUB = sorted((REPOSITORY_ROOT / ".github" / "workflows").glob("*.yml"))
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
SETTINGS = "verify.latency_requests=24\nscan.runtimes=[torch]"
WRONG = """\
name: wrong
model: {{ref: m}}
calibration: {{path: c.jsonl}}
verify: {{golden_sets: [g]}}
sla:
  concurrency: {value}
"""
HOSTILE_OUTPUT = '\n::error title=injected::boo\n::set-output name=verdict::ACCEPT\n##[error]x"; exit 0; echo "'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A repository of profiles with the tiny one, and beside it a clean checkout of the action."""
    folder = tmp_path_factory.mktemp("actions")
    write_project(folder / "models" / "profiles", tiny_llama)
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "m"),
    ):
        subprocess.run(["git", *words], cwd=folder / "models", check=True)
    clean_checkout(REPOSITORY_ROOT, folder / "action")
    return folder


@pytest.fixture
def runner(checkout: Path, tmp_path: Path) -> Runner:
    return Runner(checkout / "action", checkout / "models", tmp_path, {"OMP_NUM_THREADS": "1"})


def write_bundle(home: Path, verdict: Verdict, name: str = "chat") -> Path:
    """Write what of a bundle `report` reads."""
    bundle = home / "bundles" / f"{name}-v1"
    (bundle / "metrics").mkdir(parents=True)
    for file, content in render_documents(make_report(verdict, name=name)).items():
        (bundle / "metrics" / file).write_bytes(content)
    (bundle / "manifest.json").write_text("{}")
    record = {"decision": "waiting", "level": "none"}
    (bundle.parent / f"{bundle.name}.signoff.json").write_text(json.dumps(record))
    return bundle


def test_plan_says_what_would_run_and_what_it_takes(runner: Runner) -> None:
    ended = runner.use(command="plan", profile="profiles/tiny.yaml", python=this_environment())
    assert not ended.failed, ended.log
    assert ended.skipped == []
    assert ended.outputs["exit-code"] == "0" and ended.outputs["state"] == "success"
    summary = b"".join(ended.summaries).decode()
    assert Path(ended.outputs["summary"]).read_text() == summary
    assert summary.startswith("## Plan for profiles/tiny.yaml\n")
    for stage in ("profile", "scan", "quantize", "compile", "memory", "verify", "package"):
        assert re.search(rf"^\| {stage} \| to run", summary, re.MULTILINE)
    assert re.search(r"\| time \| about \d+ (s|min) \(\d+ (s|min) to \d+ (s|min)\), scaled from", summary)
    assert re.search(r"\| memory \| about 1\.8\d GB at the peak \|\n\| disk \| about \d\.\d+ MB in store and bundles \|", summary)
    assert "https://github.test/owner/models/actions/runs/7" in summary
    assert not list(runner.workspace.glob("**/.model-optimizer")), "a plan writes nothing"
    assert ended.commands() == []


def test_plan_of_a_wrong_profile_fails_on_its_line_and_injects_nothing(runner: Runner, checkout: Path) -> None:
    wrong = checkout / "models" / "profiles" / "wrong.yaml"
    wrong.write_text(WRONG.format(value=json.dumps(HOSTILE_OUTPUT)))
    ended = runner.use(command="plan", profile="profiles/wrong.yaml", python=this_environment())
    assert ended.failed and ended.outputs["exit-code"] == "2" and ended.outputs["state"] == "failure"
    (command,) = ended.commands()
    assert command.startswith("::error file=profiles/wrong.yaml,line=6,title=plan%3A the profile is wrong::sla.concurrency: ")
    assert ended.outputs["verdict"] == ""
    assert "injected" in b"".join(ended.summaries).decode()


def test_report_is_told_within_limits_and_once_per_pull_request(runner: Runner, checkout: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "home", Verdict.REJECT)
    for number, found in enumerate(("", "41")):
        calls = tmp_path / f"calls-{number}"
        gh = tmp_path / f"bin-{number}" / "gh"
        gh.parent.mkdir()
        gh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\ncase "$*" in *--paginate*) printf "%s\\n" {found};; esac\n')
        gh.chmod(gh.stat().st_mode | stat.S_IXUSR)
        paths = f"{gh.parent}:{os.environ['PATH']}"
        (tmp_path / f"temp-{number}").mkdir()
        at = Runner(runner.action, runner.workspace, tmp_path / f"temp-{number}", {**runner.environment, "PATH": paths})
        ended = at.use(
            command="report", bundle="chat-v1", profile="profiles/tiny.yaml", home=str(tmp_path / "home"), comment_on="12",
            github_token="t", python=this_environment(),
        )  # fmt: skip
        assert not ended.failed, ended.log
        asked, written = calls.read_text().splitlines()
        assert "issues/12/comments" in asked and 'startswith("<!-- model-optimizer ' in asked
        method = "POST repos/owner/models/issues/12/comments" if not found else "PATCH repos/owner/models/issues/comments/41"
        assert f"--method {method} --field body=@" in written
    assert ended.outputs["verdict"] == "REJECT" and ended.outputs["decision"] == "waiting" and ended.outputs["state"] == "pending"
    assert (ended.outputs["bundle"], ended.outputs["record"]) == (str(bundle), f"{bundle}.signoff.json")
    assert [command.partition(" title=")[0] for command in ended.commands()]
    assert all(len(summary) <= SUMMARY_LIMIT_BYTES for summary in ended.summaries)
    assert 1_000 < Path(ended.outputs["comment"]).stat().st_size <= COMMENT_LIMIT_BYTES


def test_signoff_records_the_reviewer_and_leaves_no_key(runner: Runner, tmp_path: Path, tiny_llama: Path) -> None:
    inputs = waiting_inputs(tmp_path, tiny_llama, ways=["github"], approvers={})
    bundle, key = publish_waiting(inputs, tmp_path), key_of(tmp_path, "key")
    signs = {
        "bundle": str(bundle),
        "python": this_environment(),
        "signing_key": key.private.read_text(),
        "review": 'read "it" $(x)',
    }
    at = replace(runner, environment={**runner.environment, "HOME": str(tmp_path)})
    refused = at.use(command="signoff", reviewer="dave", report_sha256="0" * 64, **signs)
    assert refused.codes["Sign off"] == 6 and refused.outputs["decision"] == "waiting", refused.log
    ended = at.use(command="signoff", reviewer="dave", report_sha256=request_of(bundle, tmp_path).report_sha256, **signs)
    assert not ended.failed, ended.log
    record = read_record(bundle, key.public)
    assert (record.decision, record.reviewer, record.comment, record.method) == ("signed-off", "dave", 'read "it" $(x)', "github")
    assert "workflow run https://github.test/owner/models/actions/runs/7 started by carol" in record.identity
    assert ended.outputs["decision"] == "signed-off" and ended.outputs["state"] == "success"
    assert ended.outputs["manifest-sha256"] == record.bundle_manifest_sha256
    assert not list(at.temp.glob("model-optimizer.*/key.pem")), "the key is gone with the step"


@pytest.mark.full
def test_optimize_runs_the_seven_stages_and_submit_needs_a_server(runner: Runner) -> None:
    tiny = {"profile": "profiles/tiny.yaml", "python": this_environment()}
    ended = runner.use(command="optimize", set=SETTINGS, **tiny)
    assert ended.outputs["exit-code"] in ("0", "3", "5"), ended.log  # a busy machine may leave the speed undecided
    assert ended.failed == (ended.outputs["exit-code"] != "0")
    bundle = Path(ended.outputs["bundle"])
    assert bundle.parent == runner.workspace / ".model-optimizer" / "bundles" and (bundle / "model.sig").is_file()
    assert ended.outputs["verdict"] in ("ACCEPT", "REJECT", "INCONCLUSIVE") and Path(ended.outputs["report"]).is_file()
    assert all(len(summary) <= SUMMARY_LIMIT_BYTES for summary in ended.summaries)
    assert Path(ended.outputs["comment"]).stat().st_size <= COMMENT_LIMIT_BYTES
    again = runner.use(command="plan", set=SETTINGS, **tiny)
    assert b"every stage is in the store" in b"".join(again.summaries), again.log
    refused = runner.use(command="submit", **tiny)
    assert refused.outputs["exit-code"] == "2" and refused.failed


@pytest.mark.parametrize("path", [*GITHUB, REPOSITORY_ROOT / "action.yml"], ids=lambda path: path.stem)
def test_no_expression_stands_in_a_script_and_every_action_is_pinned(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    jobs = document["jobs"].values() if "jobs" in document else [document["runs"]]
    steps = [step for job in jobs for step in job.get("steps", ())]
    assert all("${{" not in step.get("run", "") for step in steps)
    assert all(len(step.get("run", "").splitlines()) <= 8 for step in steps)
    called = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"\./[\w.]*|[\w/-]+@[0-9a-f]{40}", it) for it in called)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.stem)
def test_every_job_has_its_permissions_and_a_time_limit_and_forks_get_no_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    assert document["permissions"] in ({}, {"contents": "read"})
    for job in document["jobs"].values():
        assert "uses" in job or "timeout-minutes" in job
        assert document["permissions"] or "permissions" in job
    triggers = document[True]  # YAML reads `on` as true
    assert "pull_request_target" not in triggers
    assert "pull_request" not in triggers or "secrets." not in text
