"""The soak flow: hour after hour, each a cached task; the journal in the soak's folder is the only truth.

One process runs through all hours, so that its memory can be compared; the tasks wait for it. A Retry, or a new run of the
same soak, takes finished hours from Prefect's cache and goes on where the journal ends.
"""

import itertools
import math
import time
from dataclasses import replace

from prefect import flow, task
from prefect.context import TaskRunContext

from flows.claim import claimed
from flows.progress import PrefectProgress, TerminalProgress, terminal
from flows.slots import slot_for
from flows.soak_request import DEADLINE_FACTOR, DEADLINE_SLACK_S, SoakOptions, SoakRequest, read_soak_request
from model_optimizer.journal import Journal
from model_optimizer.protocols import Progress
from model_optimizer.verification.soak import stood_for_s
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_report import Asked, SoakReport, build_report, claim_folder, write_report
from model_optimizer.verification.soak_worker import SoakWorker, Stops

HOUR_S = 3600.0


@flow(name="soak", flow_run_name="{options.target}", persist_result=False)
def soak(options: SoakOptions) -> SoakReport:
    """Soak a bundle or a model directory, and judge it.

    Raises:
        ConfigError, IntegrityError, UnsupportedError: the target, the folder or the machine does not do.
    """
    request = read_soak_request(options)
    progress = PrefectProgress(TerminalProgress(terminal()))
    with claimed(request.folder):
        claim_folder(request.folder, request.inputs)
        progress.note(f"soaking {request.name} in {request.folder}")
        stopped = run_hours(request, progress)
    report = build_report(request.folder, request.name, request.inputs, Asked(request.config, request.required_s, stopped))
    write_report(request.folder, report)
    return report


def run_hours(request: SoakRequest, progress: Progress) -> str:
    """Run the hours that are missing; return why it ended early, or nothing."""
    missing_s = request.config.duration - tested_s(request)
    if missing_s <= 0:
        return ""
    real_s = missing_s if request.config.requests_per_segment is None else max(missing_s, HOUR_S)
    deadline = time.time() + DEADLINE_FACTOR * real_s + DEADLINE_SLACK_S
    job = replace(request.job, stops=Stops(request.folder, deadline))
    with slot_for("auto", progress)(), SoakWorker(job) as worker:
        for hour in range(math.ceil(request.config.duration / HOUR_S)):
            until_s = min(request.config.duration, (hour + 1) * HOUR_S)
            held = tested_s(request) >= until_s
            soak_hour.with_options(task_run_name=f"hour-{hour + 1}", refresh_cache=not held)(
                request.job.key, hour, until_s, worker, progress
            )
            if worker.stopped_because:
                break
    return worker.stopped_because


def tested_s(request: SoakRequest) -> float:
    """Return what the journal holds, in seconds of traffic."""
    return stood_for_s(Journal(request.job.journal, request.job.key, Segment).records)


def _key_of_hour(_context: TaskRunContext, parameters: dict[str, object]) -> str:
    return f"soak-{parameters['key']}-{parameters['until_s']}"


@task(cache_key_fn=_key_of_hour, persist_result=True, result_serializer="json")
def soak_hour(key: str, hour: int, until_s: float, worker: SoakWorker, progress: Progress) -> dict[str, float]:
    """Wait until the soak has tested so much; a receipt, the journal is the truth."""
    start_s = worker.stood_for_s
    reports = iter(progress.track(itertools.count(), f"hour {hour + 1}: seconds tested", max(1, round(until_s - start_s))))
    shown = 0

    def told(stood_for_s: float) -> None:
        nonlocal shown
        while shown < min(stood_for_s, until_s) - start_s:
            next(reports)
            shown += 1

    reached = worker.run_until(until_s, told)
    return {"hour": hour, "tested_s": reached}
