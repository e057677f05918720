"""The flow: seven stages from a profile to a signed release. It calls; it does not compute."""

import os
import subprocess
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from prefect.utilities.annotations import opaque
from rich.console import Console

from flows.bootstrap import home
from flows.compose import Composer
from flows.outcome import Outcome, conclude
from flows.prepare import read_request
from flows.progress import PrefectProgress, TerminalProgress
from model_optimizer.artifacts.base import Stage
from model_optimizer.store import Store
from tasks._task import Workplace
from tasks.compile_model import compile_model
from tasks.package_release import package_release, release_measures, version_record
from tasks.plan_memory import plan_memory
from tasks.profile_target import profile_target, resolve_source
from tasks.quantize_layers import quantize_layers
from tasks.record import RunIdentity, record_run, record_stage, register_release
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
        GateFailed: the report was built and a gate did not accept.
    """
    request = read_request(Path(profile), tuple(overrides or ()))
    place = Workplace(home(), Store(home() / "store"), PrefectProgress(TerminalProgress(Console(stderr=True))))
    tracker = Tracker(place.root, f"model-optimizer/{request.profile.name}")
    tracker.send_spooled()
    run = RunIdentity(str(flow_run.get_id()), request.profile.name, _tags(request.profile.name))
    record_run(tracker, run)

    compose = Composer(request, resolve_source(request.profile.model, request.base, place), source_commit())
    target = profile_target(compose.profile(), place)
    record_stage(Stage.PROFILE, opaque({"target": target}), tracker, run)

    front = scan_pareto(compose.scan(target), place)
    record_stage(Stage.SCAN, opaque({"front": front}), tracker, run)
    choice, reference = front.artifact.choice, front.artifact.baseline

    quantized = quantize_layers(compose.quantize(choice), place)
    unquantized = quantize_layers(compose.quantize(reference), place)
    record_stage(Stage.QUANTIZE, opaque({"chosen": quantized}), tracker, run)

    engine = compile_model(compose.compile(choice, quantized), place)
    baseline = compile_model(compose.compile(reference, unquantized), place)
    record_stage(Stage.COMPILE, opaque({"chosen": engine, "baseline": baseline}), tracker, run)

    memory = plan_memory(compose.memory(engine, target), place)
    record_stage(Stage.MEMORY, opaque({"plan": memory}), tracker, run)

    verification = verify_quality(compose.verify(engine, baseline, memory), place)
    record_stage(Stage.VERIFY, opaque({"verification": verification}), tracker, run)

    results = compose.package(target, front, quantized, engine, baseline, memory, verification)
    release = package_release(results, place)
    record_stage(Stage.PACKAGE, opaque({"release": release}), tracker, run)

    outcome = Outcome.of(place, results, release)
    register_release(version_record(run.flow_run_id, results, release, place), tracker, str(outcome.report))
    record_run(tracker, run, release_measures(results), verdict=outcome.verdict)
    return conclude(outcome)


def source_commit() -> str:
    """Return the commit of the checkout that the profile belongs to, or `unknown` outside git."""
    if commit := os.environ.get("GITHUB_SHA"):
        return commit
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _tags(name: str) -> dict[str, str]:
    return {"git.sha": source_commit(), "mo.profile": name, "prefect.flow_run_id": str(flow_run.get_id())}
