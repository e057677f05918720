"""The flow: seven stages from a profile to a signed release. It calls; it does not compute."""

from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from flows.book import Book, StoppedEarly
from flows.bootstrap import home, run_file
from flows.compose import Composer, SixStages, Tested
from flows.outcome import Outcome, partial_document, write_document
from flows.prepare import read_request, source_commit
from flows.progress import PrefectProgress, TerminalProgress, terminal
from flows.trial import Line
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import GateFailed
from model_optimizer.store import Store
from model_optimizer.strategy.attempts import next_trial
from tasks._task import Workplace
from tasks.package_release import package_release, version_record
from tasks.profile_target import profile_target, resolve_source
from tasks.record import RunIdentity, close_run, end_run_early, open_run, register_release
from tasks.scan_pareto import scan_pareto
from tasks.tracking import Tracker


@flow(name="model-optimizer", flow_run_name="{profile}", persist_result=False)
def optimize(
    profile: str, overrides: list[str] | None = None, refresh: Stage | None = None, until: Stage | None = None
) -> dict[str, object]:
    """Optimize the model of a profile.

    Args:
        profile: path of a profile in this checkout, e.g. `profiles/quickstart.yaml`.
        overrides: `section.key=value` pairs that win over the profile.
        refresh: make this stage and all after it again, although the store holds them.
        until: the last stage to run; without it all seven run.

    Raises:
        GateFailed: the report was built, and a gate did not accept.
    """
    request = read_request(Path(profile), tuple(overrides or ()))
    progress = PrefectProgress(TerminalProgress(terminal()))
    place = Workplace(home(), Store(home() / "store"), progress, refresh, _first_started_at())
    tracker = Tracker(place.root, f"model-optimizer/{request.profile.name}")
    commit = source_commit(request.base)
    run = RunIdentity(str(flow_run.get_id()), request.profile.name, _tags(request.profile.name, commit))
    open_run(tracker, run)
    book = Book(tracker, run, until)

    model = resolve_source(request.profile.model, request.base, place)
    compose = Composer(request, model, commit)
    try:
        return _run_stages(compose, place, book)
    except StoppedEarly:
        end_run_early(tracker, run)
        document = partial_document(request.profile.name, book.cached)
        write_document(run_file(run.flow_run_id), document)
        return document
    except GateFailed:  # the run is closed, with its report
        raise
    except BaseException as error:
        end_run_early(tracker, run, because=f"{type(error).__name__}: {error}"[:500])
        raise


def _run_stages(compose: Composer, place: Workplace, book: Book) -> dict[str, object]:
    target = profile_target(compose.profile(), place)
    book.enter(Stage.PROFILE, {"target": target})
    book.close(Stage.PROFILE)

    front = scan_pareto(compose.scan(target), place)
    book.enter(Stage.SCAN, {"front": front})
    book.close(Stage.SCAN)

    line = Line(compose, target, front.artifact.baseline, place, book)
    tested: list[Tested] = []
    while trial := next_trial(front.artifact, [it.attempt for it in tested], compose.request.profile.repair.max_rounds):
        place.progress.note(f"{trial.strategy.label}: {trial.cause}")
        tested.append(line.run(trial))
    book.close(Stage.VERIFY)

    package = compose.package(SixStages(target, front, tuple(tested)))
    release = package_release(package, place)
    book.enter(Stage.PACKAGE, {"release": release})

    run = book.run
    outcome = Outcome.read(place.bundles, release, book.cached)
    register_release(version_record(run.flow_run_id, package, release, place), book.tracker, str(outcome.report_page))
    close_run(book.tracker, run, outcome.report, outcome.report_page)
    outcome.keep(run_file(run.flow_run_id))
    outcome.draw(terminal())
    outcome.conclude()
    return outcome.document()


def _first_started_at() -> datetime:
    """Return when this flow run started for the first time; a Retry keeps that, so that it does not refresh twice."""
    context = FlowRunContext.get()
    started = context.flow_run.start_time if context and context.flow_run else None
    return started or datetime.now(UTC)


def _tags(name: str, commit: str) -> dict[str, str]:
    """Return the tags that every MLflow run of this flow run carries."""
    return {"git.sha": commit, "mo.profile": name, "prefect.flow_run_id": str(flow_run.get_id())}
