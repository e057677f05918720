"""The flow: seven stages from a profile to a signed release. It calls; it does not compute."""

import os
import subprocess
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.bootstrap import home, run_file
from flows.compose import Composer, SixStages
from flows.outcome import Outcome
from flows.prepare import read_request
from flows.progress import PrefectProgress, TerminalProgress, terminal
from model_optimizer.artifacts.base import Stage
from model_optimizer.store import Store
from tasks._task import Workplace
from tasks.compile_model import compile_model
from tasks.package_release import package_release, version_record
from tasks.plan_memory import plan_memory
from tasks.profile_target import profile_target, resolve_source
from tasks.quantize_layers import quantize_layers
from tasks.record import RunIdentity, close_run, open_run, record_stage, register_release
from tasks.scan_pareto import scan_pareto
from tasks.tracking import Tracker
from tasks.verify_quality import verify_quality


@flow(name="model-optimizer", flow_run_name="{profile}", persist_result=False)
def optimize(profile: str, overrides: list[str] | None = None) -> dict[str, object]:
    """Optimize the model of a profile.

    Args:
        profile: path of a profile in this checkout, e.g. `profiles/quickstart.yaml`.
        overrides: `section.key=value` pairs that win over the profile.

    Raises:
        GateFailed: the report was built, and a gate did not accept.
    """
    request = read_request(Path(profile), tuple(overrides or ()))
    place = Workplace(home(), Store(home() / "store"), PrefectProgress(TerminalProgress(terminal())))
    tracker = Tracker(place.root, f"model-optimizer/{request.profile.name}")
    commit = source_commit(request.base)
    run = RunIdentity(str(flow_run.get_id()), request.profile.name, _tags(request.profile.name, commit))
    open_run(tracker, run)

    model = resolve_source(request.profile.model, request.base, place)
    compose = Composer(request, model, commit)

    target = profile_target(compose.profile(), place)
    record_stage(Stage.PROFILE, {"target": target}, tracker, run)

    front = scan_pareto(compose.scan(target), place)
    record_stage(Stage.SCAN, {"front": front}, tracker, run)
    choice, reference = front.artifact.choice, front.artifact.baseline

    quantized = quantize_layers(compose.quantize(choice), place)
    unquantized = quantize_layers(compose.quantize(reference), place)
    record_stage(Stage.QUANTIZE, {"chosen": quantized}, tracker, run)

    engine = compile_model(compose.compile(choice, quantized), place)
    baseline = compile_model(compose.compile(reference, unquantized), place)
    record_stage(Stage.COMPILE, {"chosen": engine, "baseline": baseline}, tracker, run)

    memory = plan_memory(compose.memory(engine, target), place)
    record_stage(Stage.MEMORY, {"plan": memory}, tracker, run)

    verification = verify_quality(compose.verify(engine, baseline, memory), place)
    record_stage(Stage.VERIFY, {"verification": verification}, tracker, run)

    stages = SixStages(target, front, quantized, engine, baseline, memory, verification)
    package = compose.package(stages)
    release = package_release(package, place)
    record_stage(Stage.PACKAGE, {"release": release}, tracker, run)

    outcome = Outcome.read(place.bundles, release, stages.cached() | {"package": release.cached})
    register_release(version_record(run.flow_run_id, package, release, place), tracker, str(outcome.report_page))
    close_run(tracker, run, outcome.report, outcome.report_page)
    outcome.keep(run_file(run.flow_run_id))
    outcome.draw(terminal())
    outcome.conclude()
    return outcome.document()


def source_commit(folder: Path) -> str:
    """Return the commit of the checkout that the profile's folder belongs to, or `unknown` outside git."""
    if commit := os.environ.get("GITHUB_SHA"):
        return commit
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _tags(name: str, commit: str) -> dict[str, str]:
    """Return the tags that every MLflow run of this flow run carries."""
    return {"git.sha": commit, "mo.profile": name, "prefect.flow_run_id": str(flow_run.get_id())}
