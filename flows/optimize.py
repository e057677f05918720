"""The flow: seven stages from a profile to a signed release. It calls; it does not compute."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from flows.approval import authors_of, settle
from flows.book import Book, StoppedEarly
from flows.bootstrap import home, run_file
from flows.changes import tell_changes
from flows.compose import Composer, SixStages, Tested
from flows.notify import telling
from flows.outcome import Outcome, partial_document, write_document
from flows.prepare import Request, read_request, source_commit
from flows.progress import PrefectProgress, TerminalProgress, terminal
from flows.slots import slot_for
from flows.trial import Line
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import AwaitingSignOff, GateFailed
from model_optimizer.spec import Notify
from model_optimizer.store import Store
from model_optimizer.strategy.attempts import next_trial
from tasks._task import Workplace
from tasks.package_release import package_release, version_record
from tasks.profile_target import profile_target, resolve_source
from tasks.record import RunIdentity, close_run, end_run_early, open_run, register_release
from tasks.scan_pareto import scan_pareto
from tasks.tracking import Tracker


def _run_name() -> str:
    return Path(str(flow_run.get_parameters()["profile"])).stem


@flow(name="model-optimizer", flow_run_name=_run_name, persist_result=False)
def optimize(
    profile: str,
    overrides: Sequence[str] = (),
    refresh: Sequence[Stage] = (),
    until: Stage | None = None,
    notify: Notify = Notify(),
) -> dict[str, object]:
    """Optimize the model of a profile.

    Args:
        profile: path of a profile in this checkout, e.g. `profiles/quickstart.yaml`.
        overrides: `section.key=value` pairs that win over the profile.
        refresh: make these stages again and all after the first of them, although the store holds them.
        until: the last stage to run; without it all seven run.
        notify: who is told how this run ends, beside those that the profile names.

    Raises:
        GateFailed: the report was built, and a gate did not accept.
    """
    with telling(Path(profile).stem, notify) as told:
        request = read_request(Path(profile), tuple(overrides))
        told.append(request.profile.notify)
        return _optimize(request, min(refresh, key=list(Stage).index, default=None), until)


def _optimize(request: Request, refresh: Stage | None, until: Stage | None) -> dict[str, object]:
    progress = PrefectProgress(TerminalProgress(terminal()))
    slot = slot_for(request.profile.target.hardware, progress)
    place = Workplace(home(), Store(home() / "store"), progress, refresh, _first_started_at(), slot)
    # a run that is resumed after its sign-off counts as the same try, and has left its outcome before it was suspended
    first_try = flow_run.get_run_count() <= 1 and not run_file(str(flow_run.get_id())).exists()
    tracker = Tracker(place.root, f"model-optimizer/{request.profile.name}", first_try=first_try)
    commit = source_commit(request.base)
    run = RunIdentity(str(flow_run.get_id()), request.profile.name, _tags(request.profile.name, commit))
    open_run(tracker, run)
    book = Book(tracker, run, until)

    model = resolve_source(request.profile.model, request.base, place)
    compose = Composer(request, model, commit)
    tell_changes(compose, place.root, progress)
    try:
        return _run_stages(compose, place, book)
    except StoppedEarly:
        end_run_early(tracker, run)
        document = partial_document(request.profile.name, book.cached)
        write_document(run_file(run.flow_run_id), document)
        return document
    except (GateFailed, AwaitingSignOff, Pause):  # the run is closed, with its report
        raise
    except BaseException as error:
        end_run_early(tracker, run, because=f"{type(error).__name__}: {error}"[:500])
        raise
    finally:
        tracker.flush()


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

    authors = authors_of(compose.request.base, compose.source_commit)
    package = compose.package(SixStages(target, front, tuple(tested))).model_copy(update={"authors": authors})
    release = package_release(package, place)
    book.enter(Stage.PACKAGE, {"release": release})

    run = book.run
    outcome = Outcome.read(place.bundles, release, book.cached)
    register_release(version_record(run.flow_run_id, package, release, place), book.tracker, str(outcome.report_page))
    close_run(book.tracker, run, outcome.report, outcome.report_page, package.golden)
    outcome.keep(run_file(run.flow_run_id))
    outcome = settle(outcome, package, book.tracker)
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
    tries = {"prefect.flow_run_id": str(flow_run.get_id()), "prefect.run_count": str(flow_run.get_run_count())}
    return {"git.sha": commit, "mo.profile": name} | tries
