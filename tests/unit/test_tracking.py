"""What reaches MLflow, from a tracker on a database of its own."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from report_fixtures import results
from reporting_fixtures import make_report

from flows.cli.compare import find_subject
from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from model_optimizer.artifacts.release import SignOff, Waiver
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from tasks.facts import candidate_metrics, candidate_model, metrics_of, strategy_params, tables_of
from tasks.letters import DatasetRecord, Letter, RunRecord, VersionRecord
from tasks.mirror import DEPLOY_WAIT_S, mirror_deployment
from tasks.outbox import Outbox
from tasks.record import RunIdentity, end_run_early, open_run
from tasks.tracking import Tracker
from tasks.tracking_server import MANIFEST

EXPERIMENT = "model-optimizer/test"
BEGAN_MS = 1_700_000_000_000
WHY = "mo.failed_because"
STRATEGY = Strategy(weights=WeightRecipe(method="gptq", formats=("int4-g64",)), runtime="torch")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database that is made once: its tables alone take seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def tracker(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Tracker]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = Tracker(tmp_path, f"{EXPERIMENT}/{request.node.name}")
    yield tracker
    assert tracker.flush(30) and not list((tmp_path / "spool").glob("*.json"))


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def runs_of(client: MlflowClient, request: pytest.FixtureRequest) -> list[Run]:
    experiment = client.get_experiment_by_name(f"{EXPERIMENT}/{request.node.name}")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def test_metrics_of_leaves_out_what_was_not_measured() -> None:
    known = Measure(name="p95_latency", dimension=Dimension.SPEED, unit="ms", value=12.5)
    missing = Measure(
        name="energy", dimension=Dimension.RESOURCE, unit="j", value=None, origin=Origin.NOT_MEASURED, reason="no counter"
    )
    assert metrics_of((known, missing)) == {"speed/p95_latency_ms": 12.5}


@pytest.mark.parametrize(
    ("weights", "precision", "group"),
    [
        (WeightRecipe(), "float32", "none"),
        (WeightRecipe(method="gptq", formats=("int4-g64",)), "int4", "g64"),
        (WeightRecipe(method="rtn", formats=("int4-g64", "int8-channel"), bits_budget=6.5), "int4+int8", "g64+channel"),
    ],
)
def test_strategy_params_give_precision_and_group_a_word_each(weights: WeightRecipe, precision: str, group: str) -> None:
    params = strategy_params(Strategy(weights=weights, runtime="torch"))
    assert (params["precision"], params["group"], params["method"]) == (precision, group, weights.method)
    assert params.get("bits_budget") == ("6.5" if weights.bits_budget else None)


def test_candidate_metrics_hold_the_axes_of_the_front() -> None:
    measured = [candidate_metrics(it) for it in results().front.candidates if it.measures]
    assert all({"accuracy/kl_nats", "speed/generation_throughput_tok_per_s"} <= set(metrics) for metrics in measured)


def test_tables_of_a_front_has_a_row_per_candidate() -> None:
    front = results().front
    table = json.loads(tables_of(front)["candidates.json"])
    assert len(table["data"]) == len(front.candidates) and table["columns"][0] == "strategy"


@pytest.mark.parametrize(("because", "status"), [(None, "FINISHED"), ("OSError: no space", "FAILED")])
def test_end_run_early_closes_the_parent_run(
    because: str | None, status: str, tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest
) -> None:
    run = RunIdentity("flow-1", "test", {"mo.profile": "test", "git.sha": "0123456789abcdef"})
    open_run(tracker, run)
    end_run_early(tracker, run, because=because)
    assert tracker.flush(30)
    (found,) = runs_of(client, request)
    assert (found.info.status, found.data.tags.get("mo.failed_because")) == (status, because)
    assert found.info.run_name == "0123456"


def test_record_makes_a_model_whose_metrics_are_linked_to_it(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest
) -> None:
    model = candidate_model("flow-1", STRATEGY, {"mo.profile": "test"})
    for stage, value in (("scan", 0.25), ("verify", 0.5)):
        metrics = {"accuracy/kl_nats": value, f"speed/{stage}_ms": 7.0}
        tracker.record(RunRecord(record_id=stage, parent_id="flow-1", name=stage, metrics=metrics, model=model))
    assert tracker.flush(30)
    experiment = client.get_experiment_by_name(f"{EXPERIMENT}/{request.node.name}")
    assert experiment is not None
    (found,) = client.search_logged_models([experiment.experiment_id])
    assert (found.name, str(found.status)) == ("int4-g64-gptq on torch", "READY")
    assert (found.params["precision"], found.params["group"], found.params["runtime"]) == ("int4", "g64", "torch")
    values = {(metric.key, metric.value) for metric in found.metrics or []}
    assert {("accuracy/kl_nats", 0.5), ("speed/scan_ms", 7.0), ("speed/verify_ms", 7.0)} <= values
    names = {run.info.run_name: run for run in runs_of(client, request)}
    parent = names["flow-1"].info.run_id  # made on the way, for its own record was never sent
    assert {names[name].data.tags["mlflow.parentRunId"] for name in ("scan", "verify")} == {parent}


def test_record_again_after_a_retry_keeps_one_run_and_its_first_parameters(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    record = RunRecord(record_id="flow-1", parent_id=None, name="one", params={"verdict": "REJECT"}, metrics={"x": 1.0})
    tracker.record(record)
    assert tracker.flush(30)
    again = Tracker(tmp_path, f"{EXPERIMENT}/{request.node.name}")
    again.record(record)
    again.record(record.model_copy(update={"params": {"verdict": "ACCEPT"}, "metrics": {"x": 2.0}, "at_ms": record.at_ms + 5}))
    assert again.flush(30)
    (found,) = runs_of(client, request)
    assert found.data.metrics == {"x": 2.0} and found.data.params == {"verdict": "REJECT"}
    assert [point.value for point in client.get_metric_history(found.info.run_id, "x")] == [1.0, 2.0]


def test_record_of_a_retry_drops_the_reason_of_the_failure_and_keeps_the_times_of_its_stages(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    child = RunRecord(record_id="flow-1/scan", parent_id="flow-1", name="2-scan", started_ms=BEGAN_MS, at_ms=BEGAN_MS + 7)
    parent = RunRecord(record_id="flow-1", parent_id=None, name="one", at_ms=BEGAN_MS, failed=True, tags={WHY: "no space"})
    model = candidate_model("flow-1", STRATEGY, {})
    for record in (parent, child.model_copy(update={"model": model})):
        tracker.record(record)
    assert tracker.flush(30)
    retried = parent.model_copy(
        update={"failed": False, "tags": {}, "untagged": (WHY, "never.there"), "at_ms": BEGAN_MS + 90, "model": model}
    )
    again = Tracker(tmp_path, f"{EXPERIMENT}/{request.node.name}")
    for record in (child.model_copy(update={"started_ms": None, "at_ms": BEGAN_MS + 80}), retried):
        again.record(record)
    assert again.flush(30)
    runs = {run.info.run_name: run for run in runs_of(client, request)}
    assert (runs["one"].info.status, runs["one"].info.end_time, WHY in runs["one"].data.tags) == (
        "FINISHED",
        BEGAN_MS + 90,
        False,
    )
    assert runs["2-scan"].info.end_time == BEGAN_MS + 7
    (made,) = runs["2-scan"].outputs.model_outputs
    linked = client.get_run(runs["one"].info.run_id).inputs.model_inputs  # a search leaves them out
    assert [it.model_id for it in linked] == [made.model_id]


def test_record_keeps_times_datasets_and_texts_and_packs_large_ones(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest
) -> None:
    tracker.record(
        RunRecord(
            record_id="verify",
            parent_id=None,
            name="6-verify",
            started_ms=1_700_000_000_000,
            at_ms=1_700_000_060_000,
            datasets=(DatasetRecord(name="words", digest="ab" * 16, source="words", num_items=24),),
            texts={"explanation.md": "# verify", "chosen.json": "x" * 1_000_001},
        )
    )
    assert tracker.flush(30)
    (found,) = runs_of(client, request)
    assert (found.info.end_time - found.info.start_time, found.info.status) == (60_000, "FINISHED")
    (dataset,) = found.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("words", "ab" * 16)
    sizes = {item.path: item.file_size for item in client.list_artifacts(found.info.run_id)}
    assert sizes["explanation.md"] == 8 and sizes["chosen.json.gz"] < 10_000 and "chosen.json" not in sizes


def test_register_files_a_bundle_once_and_moves_aliases(tracker: Tracker, client: MlflowClient) -> None:
    packaged = VersionRecord(
        name="chat", source="file:///b/chat-v1", run_record_id="", tags={"mo.manifest_sha256": "aa"}, aliases=("candidate",)
    )
    tracker.register(packaged)
    tracker.register(packaged)
    moved = VersionRecord(
        name="chat", source="", run_record_id="", manifest_sha256="aa", tags={"deployed.by": "me"}, aliases=("production",)
    )
    tracker.register(moved)
    unknown = {"manifest_sha256": "bb", "known_only": True}
    tracker.register(moved.model_copy(update=unknown))
    assert tracker.flush(30)
    (version,) = client.search_model_versions("name = 'chat'")
    assert client.get_model_version_by_alias("chat", "production").version == version.version
    assert sorted(client.get_model_version("chat", version.version).aliases) == ["candidate", "production"]
    assert version.tags == {"mo.manifest_sha256": "aa", "mo.source": "file:///b/chat-v1", "deployed.by": "me"}
    assert version.source == "file:///b/chat-v1"


def test_a_damaged_letter_is_put_aside_and_blocks_nothing(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "1-half.json").write_text('{"experiment": "x", "ki')
    (tmp_path / "spool" / "2-empty.json").write_text("")
    tracker.record(RunRecord(record_id="a", parent_id=None, name="a"))
    assert tracker.flush(30)
    assert [run.info.run_name for run in runs_of(client, request)] == ["a"]
    assert sorted(path.name for path in (tmp_path / "spool" / "aside").iterdir()) == ["1-half.json", "2-empty.json"]
    assert [record.message.count("put aside") for record in caplog.records if "put aside" in record.message] == [1, 1]


def test_a_disk_that_takes_no_letter_is_said_once_and_the_letters_are_sent(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spool").write_text("a file where the folder must be")
    for name in "abc":
        tracker.record(RunRecord(record_id=name, parent_id=None, name=name))
    assert tracker.flush(30)
    (tmp_path / "spool").unlink()
    assert sorted(run.info.run_name for run in runs_of(client, request)) == ["a", "b", "c"]
    assert sum("cannot be kept on disk" in record.message for record in caplog.records) == 1


def test_letters_are_sent_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for number in range(60):
        outbox.keep(Letter(experiment="", kind="run", run=RunRecord(record_id=str(number), parent_id=None, name="x")))
    outbox.mark(outbox.waiting()[5])
    letters = [outbox.read(path) for path in outbox.waiting()]
    assert [letter.run.record_id for letter in letters if letter and letter.run] == [str(number) for number in range(60)]


def test_two_trackers_of_one_folder_send_every_letter_once(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Tracker(tmp_path, f"{EXPERIMENT}/{request.node.name}", first_try=True)
    both = [threading.Thread(target=_record_some, args=(it, name)) for it, name in ((tracker, "a"), (other, "b"))]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert tracker.flush(30) and other.flush(30)
    assert sorted(run.info.run_name for run in runs_of(client, request)) == sorted(f"{x}{n}" for x in "ab" for n in range(8))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def _record_some(tracker: Tracker, name: str) -> None:
    for number in range(8):
        tracker.record(RunRecord(record_id=f"{name}{number}", parent_id=None, name=f"{name}{number}"))


def test_compare_takes_the_id_of_a_run_in_mlflow(
    tracker: Tracker, client: MlflowClient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    report = make_report()
    datasets = (DatasetRecord(name="everyday-facts", digest="ab" * 16, source="everyday-facts", num_items=24),)
    for number, padding in enumerate((0, 1_000_000)):  # the larger one is packed
        texts = {"report.json": report.model_dump_json() + " " * padding}
        tracker.record(RunRecord(record_id=str(number), parent_id=None, name=f"chat {number}", texts=texts, datasets=datasets))
    assert tracker.flush(30)
    subjects = [find_subject(run.info.run_id) for run in runs_of(client, request)]
    assert [subject.name for subject in subjects] == ["chat 0", "chat 1"]
    assert all(subject.report == report and subject.golden == {"everyday-facts": "ab" * 16} for subject in subjects)


def signed(decision: Literal["waiting", "signed-off"], waivers: tuple[Waiver, ...] = ()) -> SignOff:
    return SignOff(
        bundle="mail-v3",
        bundle_manifest_sha256="cc",
        signature_sha256="dd",
        report_sha256="ee",
        optimizer_hash="ff",
        gates=(),
        verdict=Verdict.ACCEPT,
        decision=decision,
        level="none" if decision == "waiting" else "provisional",
        reviewer="" if decision == "waiting" else "bob",
        identity="" if decision == "waiting" else "key 12ab",
        waivers=waivers,
        signed_at="2026-11-30T12:00:00+00:00",
    )


def test_mirror_signoff_tags_the_version_and_moves_the_alias_only_when_signed(tracker: Tracker, client: MlflowClient) -> None:
    source = "file:///b/mail-v3"
    packaged = VersionRecord(name="mail", source=source, run_record_id="", tags={MANIFEST: "cc"}, aliases=("candidate",))
    tracker.register(packaged)
    tracker.mirror_signoff("mail", source, signed("waiting"))
    assert tracker.flush(30)
    (version,) = client.search_model_versions("name = 'mail'")
    found = client.get_model_version("mail", version.version)
    assert (found.aliases, found.tags["signoff.decision"], found.tags["signoff.waivers"]) == (["candidate"], "waiting", "none")

    tracker.mirror_signoff("mail", source, signed("signed-off", (Waiver(gate="p95_latency", reason="night traffic"),)))
    assert tracker.flush(30)
    found = client.get_model_version("mail", version.version)
    assert sorted(found.aliases) == ["candidate", "signed-off"]
    tags = {name.removeprefix("signoff."): text for name, text in found.tags.items() if name.startswith("signoff.")}
    assert (tags["decision"], tags["level"], tags["reviewer"], tags["identity"]) == (
        "signed-off",
        "provisional",
        "bob",
        "key 12ab",
    )
    assert (tags["report_sha256"], tags["waivers"]) == ("ee", "p95_latency: night traffic")


def test_mirror_deployment_moves_production_and_back(tracker: Tracker, client: MlflowClient, tmp_path: Path) -> None:
    for number in (1, 2):
        tags = {MANIFEST: f"digest-{number}"}
        tracker.register(VersionRecord(name="shop", source=f"file:///b/shop-v{number}", run_record_id="", tags=tags))
    assert tracker.flush(30)
    for number in (2, 1):
        began = time.monotonic()
        mirror_deployment(tmp_path, f"shop-v{number}", f"digest-{number}", "me@here")
        assert time.monotonic() - began < DEPLOY_WAIT_S + 2
    assert tracker.flush(30)
    assert client.get_model_version_by_alias("shop", "production").source == "file:///b/shop-v1"
    assert [version.tags["deployed.by"] for version in client.search_model_versions("name = 'shop'")] == ["me@here"] * 2


def test_mirror_deployment_writes_nothing_without_a_server_and_keeps_its_letter_where_the_server_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mirror_deployment(tmp_path / "none", "shop-v1", "digest-1", "me@here")
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    mirror_deployment(tmp_path, "shop-v1", "digest-1", "me@here")
    assert time.monotonic() - began < DEPLOY_WAIT_S + 2
    assert len(Outbox(tmp_path).waiting()) == 1
