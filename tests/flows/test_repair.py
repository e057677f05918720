"""The repair loop on a tiny model that is pinned to 2 bits: rejected, repaired, judged, and never profiled or scanned again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_optimize import Ran, run
from tiny import write_golden_set

from flows.bootstrap import home
from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.report import Report

PINNED = "quantization: {default_precision: int2-g32, kl_breaker_nats: 1000000}\n"

NUM_ITEMS = 400


@pytest.fixture(scope="module")
def pinned(project: Path, tiny_llama: Path) -> Ran:
    write_golden_set(project.with_name("many"), tiny_llama, num_items=NUM_ITEMS, rng=random.Random(1))
    text = project.read_text(encoding="utf-8")
    for old, new in (("accuracy_loss_ratio: 0.2", "accuracy_loss_ratio: 0.02"), ("[words]", "[many]")):
        assert old in text
        text = text.replace(old, new)
    profile = project.with_name("pinned.yaml")
    profile.write_text(text.replace("name: tiny", "name: pinned") + PINNED, encoding="utf-8")
    return run(profile)


@pytest.fixture(scope="module")
def report(pinned: Ran) -> Report:
    return Report.model_validate_json((Path(pinned.outcome["bundle"]) / "metrics" / "report.json").read_bytes())


def entries(kind: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in (home() / "store" / kind).glob("*/artifact.json")]


def test_optimize_rejects_two_bits_and_repairs(report: Report) -> None:
    first, *repairs = report.rounds
    assert (first.round, first.strategy.split("/")[0], first.verdict) == (0, "int2-g32-rtn", Verdict.REJECT)
    assert first.raised == () and repairs
    assert [row.round for row in report.rounds] == list(range(len(report.rounds)))


def test_optimize_names_the_raised_layers_of_every_repair(report: Report) -> None:
    for row in report.rounds[1:]:
        assert row.raised, row.cause
        assert all(it.kl_after_nats < it.kl_before_nats for it in row.raised)
        assert all(".layers." in it.layer for it in row.raised)


def test_optimize_predicts_less_damage_and_more_bits_from_round_to_round(report: Report) -> None:
    predicted = [row.predicted_kl_nats for row in report.rounds]
    bits = [row.true_bits_per_weight for row in report.rounds]
    assert predicted == sorted(predicted, reverse=True) and bits == sorted(bits)
    assert report.rounds[-1].measured_kl_nats < 0.5 * report.rounds[0].measured_kl_nats


def test_optimize_does_not_profile_or_scan_again_for_a_repair(pinned: Ran, report: Report) -> None:
    assert (len(entries("profile")), len(entries("scan"))) == (1, 1)
    assert len(entries("verify")) == len(report.rounds)
    assert set(pinned.outcome["stages"]) == {stage.value for stage in Stage}


def test_optimize_releases_the_last_round_with_its_verdict(pinned: Ran, report: Report) -> None:
    last = report.rounds[-1]
    assert report.compiled.strategy.label == last.strategy
    assert len(report.rounds) == 4 or last.verdict is not Verdict.REJECT
    assert [row["verdict"] for row in pinned.outcome["rounds"]] == [row.verdict for row in report.rounds]
    page = (Path(pinned.outcome["bundle"]) / "metrics" / "report.html").read_text(encoding="utf-8")
    assert last.raised[0].layer in page


def test_optimize_takes_every_round_from_the_store_the_second_time(pinned: Ran, project: Path, report: Report) -> None:
    again = run(project.with_name("pinned.yaml"))
    assert all(again.outcome["stages"].values())
    assert again.outcome["manifest_sha256"] == pinned.outcome["manifest_sha256"]
    assert len(entries("verify")) == len(report.rounds)
