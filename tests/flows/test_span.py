"""A part of the line: ended early, begun late, made again on demand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_optimize import Ran, run

from flows.bootstrap import run_file
from flows.cli.run import Span, run_profile
from flows.optimize import optimize
from model_optimizer.artifacts.base import Produced, Stage
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import Quiet
from model_optimizer.store import Store
from tasks._task import Workplace


def stages_of(profile: Path, *, refresh: Stage | None = None, until: Stage | None = None) -> dict[str, bool]:
    state = optimize(str(profile), (), [refresh] if refresh else [], until, return_state=True)
    document = json.loads(run_file(str(state.state_details.flow_run_id)).read_text(encoding="utf-8"))
    return dict(document["stages"])


@pytest.fixture(scope="module")
def begun(project: Path) -> dict[str, bool]:
    with pytest.raises(ConfigError, match="--from quantize needs the stages before it in the store, which lacks profile, scan"):
        run_profile(project, (), Span(Stage.QUANTIZE, None), as_json=False)
    return stages_of(project, until=Stage.SCAN)


@pytest.fixture(scope="module")
def whole(begun: dict[str, bool], project: Path) -> Ran:
    return run(project)


def test_optimize_ends_after_the_stage_that_until_names(begun: dict[str, bool]) -> None:
    assert begun == {"profile": False, "scan": False}


def test_optimize_goes_on_where_an_earlier_run_was_ended(whole: Ran) -> None:
    assert {stage: whole.outcome["stages"][stage] for stage in ("profile", "scan")} == {"profile": True, "scan": True}
    assert Path(whole.outcome["bundle"]).name == "tiny-v1"


def test_optimize_makes_the_refreshed_stage_and_all_after_it_again(whole: Ran, project: Path) -> None:
    cached = stages_of(project, refresh=Stage.MEMORY)
    assert [stage for stage, held in cached.items() if not held] == ["memory", "verify", "package"]


def test_optimize_makes_one_stage_again_when_refresh_and_until_name_it(whole: Ran, project: Path) -> None:
    cached = stages_of(project, refresh=Stage.COMPILE, until=Stage.COMPILE)
    assert cached == {"profile": True, "scan": True, "quantize": True, "compile": False}


@pytest.mark.parametrize(
    ("first", "last", "only", "words"),
    [
        (Stage.SCAN, None, Stage.SCAN, "--only scan already says"),
        (None, Stage.SCAN, Stage.COMPILE, "--only compile already says"),
        (Stage.VERIFY, Stage.SCAN, None, "--until scan comes before --from verify"),
    ],
)
def test_span_refuses_what_contradicts_itself(first: Stage | None, last: Stage | None, only: Stage | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Span.of(first, last, only)


def test_is_stale_spares_what_this_run_made_itself(tmp_path: Path) -> None:
    start = datetime(2026, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)
    place = Workplace(tmp_path, Store(tmp_path), Quiet(), Stage.COMPILE, start)

    def made(at: str) -> Produced:
        return Produced(started_at=at, wall_s=1.0, peak_rss_bytes=1)

    assert place.is_stale(Stage.COMPILE, made("2026-01-01T11:59:59+00:00"))
    assert place.is_stale(Stage.PACKAGE, made("2026-01-01T11:59:59+00:00"))
    assert not place.is_stale(Stage.QUANTIZE, made("2026-01-01T11:59:59+00:00"))
    assert not place.is_stale(Stage.COMPILE, made("2026-01-01T12:00:00+00:00"))
