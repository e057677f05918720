"""What Prefect and MLflow cost: the seven stages through the flow, beside the same stages called directly.

Both arms run one tiny project in one process and by turns, each round with a store of its own and the same seeds; server,
databases and imports are warm, and what they cost is measured apart, in a process of its own, as `cold_start_s`. A stage
measures until it is sure, so that its own time varies by seconds from run to run; the cost of orchestration is therefore what an
arm spends *outside* the stages' engine calls, the direct arm's (keys, store, reading the profile) taken off. Whether the
engine calls themselves become slower beside Prefect's threads is a row of its own (`stage_time_ratio`).

`--end-to-end` instead runs the test from a commit to a signed-off version and writes down how long its phases took.
"""

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence import Figure, append
from flows.bootstrap import HOME_VARIABLE, home, prepare_environment, quiet_libraries
from model_optimizer.models.tiny import write_tiny_llama
from tests.tiny import write_project

LIBRARIES = ("prefect", "mlflow", "torch")
FIVE_MINUTES_S = 300.0
STAGES = 7
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95 % quantile of Student's t for so many rounds."""
END_TO_END = "tests/flows/test_worker.py"
COLD_START = """
import time
start = time.perf_counter()
from flows.bootstrap import home, prepare_environment, quiet_libraries
quiet_libraries()
server = prepare_environment(quiet=True)
import flows.optimize
from tasks.tracking import Tracker
imported = time.perf_counter()
server.wait()
ready = time.perf_counter()
from tasks.record import RunIdentity, open_run
open_run(Tracker(home(), "model-optimizer/cold"), RunIdentity("cold", "cold", {}))
print("COLD", imported - start, ready - start, time.perf_counter() - start, flush=True)
"""


@dataclass(frozen=True)
class Arm:
    """One run of the seven stages."""

    wall_s: float
    stages_s: float
    """Spent in the stages' engine calls."""
    num_task_runs: int = 0

    @property
    def around_s(self) -> float:
        return self.wall_s - self.stages_s


class StageClock:
    """Adds up the time in the engine calls of the seven stage tasks, whichever arm calls them."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def watch(self) -> None:
        """Put the clock around every stage's engine call."""
        from tasks.compile_model import compile_model
        from tasks.package_release import package_release
        from tasks.plan_memory import plan_memory
        from tasks.profile_target import profile_target
        from tasks.quantize_layers import quantize_layers
        from tasks.scan_pareto import scan_pareto
        from tasks.verify_quality import verify_quality

        for stage in (
            profile_target,
            scan_pareto,
            quantize_layers,
            compile_model,
            plan_memory,
            verify_quality,
            package_release,
        ):
            stage.function = self._timed(stage.function)

    def _timed(self, function: Callable[[Any, Path, Any], Any]) -> Callable[[Any, Path, Any], Any]:
        def timed(inputs: Any, workspace: Path, place: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(inputs, workspace, place)
            finally:
                self.spent_s += time.perf_counter() - start

        return timed


def through_flow(profile: Path, clock: StageClock) -> Arm:
    """Run the flow as the command line does."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from flows.optimize import optimize

    clock.spent_s = 0.0
    start = time.perf_counter()
    state = optimize(str(profile), return_state=True)
    wall_s = time.perf_counter() - start
    run_id = state.state_details.flow_run_id
    assert run_id is not None and (home() / "runs" / f"{run_id}.json").exists(), state.message
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
    return Arm(wall_s, clock.spent_s, len(tasks))


def directly(profile: Path, clock: StageClock) -> Arm:
    """Call the same engine functions in the same order, with the same keys and store, and nothing else."""
    from benchmarks.direct_line import run_directly

    clock.spent_s = 0.0
    start = time.perf_counter()
    run_directly(profile, home())
    return Arm(time.perf_counter() - start, clock.spent_s)


def fresh_store() -> None:
    """Forget every stage result; databases stay."""
    for part in ("store", "bundles"):
        shutil.rmtree(home() / part, ignore_errors=True)


def cold_start(folder: Path) -> tuple[float, float, float]:
    """Return seconds until a new process in a new folder has imported, until its server answers, and until MLflow took a run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment[HOME_VARIABLE] = str(folder / "cold")
    done = subprocess.run([sys.executable, "-c", COLD_START], env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("COLD "))
    imported, ready, tracked = (float(word) for word in line.split()[1:])
    return imported, ready, tracked


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) not in T_95:
        return mean, mean, mean
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def figures_of(pairs: list[tuple[Arm, Arm]], cold: list[tuple[float, float, float]]) -> list[Figure]:
    """Return the rows: `pairs` are (flow, direct) of one round each."""
    n = len(pairs)
    extra = [flow.around_s - direct.around_s for flow, direct in pairs]
    steps = [flow.num_task_runs for flow, _ in pairs]
    ratio = interval([seconds / FIVE_MINUTES_S for seconds in extra])
    per_stage = interval([seconds / STAGES for seconds in extra])
    per_step = interval([seconds / count for seconds, count in zip(extra, steps, strict=True)])
    slower = interval([flow.stages_s / direct.stages_s for flow, direct in pairs])
    total = interval(extra)
    rows = [
        Figure("ours-5min-run", "overhead_ratio", ratio[0], "ratio", ratio[1], ratio[2], n),
        Figure("ours-per-stage", "per_step_s", per_stage[0], "s", per_stage[1], per_stage[2], n),
        Figure("ours-per-task-run", "per_step_s", per_step[0], "s", per_step[1], per_step[2], n),
        Figure("ours", "overhead_s", total[0], "s", total[1], total[2], n),
        Figure("ours", "task_runs_count", statistics.mean(steps), "count", n=n),
        Figure("ours", "stage_time_ratio", slower[0], "ratio", slower[1], slower[2], n),
        Figure("ours-flow", "around_s", statistics.mean(flow.around_s for flow, _ in pairs), "s", n=n),
        Figure("ours-direct", "around_s", statistics.mean(direct.around_s for _, direct in pairs), "s", n=n),
    ]
    for name, index in (("imports", 0), ("server", 1), ("mlflow", 2)):
        rows.append(Figure(f"ours-until-{name}", "cold_start_s", statistics.mean(it[index] for it in cold), "s", n=len(cold)))
    return rows


def measure(rounds: int) -> list[Figure]:
    """Run both arms by turns, after a round of each that is not counted."""
    folder = Path(tempfile.mkdtemp(prefix="orchestration-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # registered first, so that the server leaves before
    cold = [cold_start(folder)]
    os.environ[HOME_VARIABLE] = str(folder / "home")
    quiet_libraries()
    profile = write_project(folder / "project", write_tiny_llama(folder / "model"))
    server = prepare_environment(quiet=True)
    assert server is not None, "unset PREFECT_API_URL: the server's start is part of what is measured"
    clock = StageClock()
    clock.watch()
    server.wait()
    pairs = []
    for number in range(rounds + 1):
        order = (through_flow, directly) if number % 2 else (directly, through_flow)
        arms = {}
        for arm in order:
            fresh_store()
            arms[arm.__name__] = arm(profile, clock)
        print(json.dumps({name: [arm.wall_s, arm.stages_s, arm.num_task_runs] for name, arm in arms.items()}), file=sys.stderr)
        if number:
            pairs.append((arms["through_flow"], arms["directly"]))
    return figures_of(pairs, cold)


def end_to_end() -> list[Figure]:
    """Run the test from a commit to a signed-off version; return the seconds of its phases, which it records."""
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as name:
        page = Path(name) / "junit.xml"
        command = [sys.executable, "-m", "pytest", END_TO_END, "-q", f"--junitxml={page}"]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False)
        reason = "" if done.returncode == 0 else f"{END_TO_END} failed"
        found = {
            str(it.get("name")): float(str(it.get("value")))
            for it in ElementTree.parse(page).iter("property")
            if str(it.get("name")).endswith("_s")
        }
    return [Figure("end-to-end", name, None if reason else value, "s", n=1, reason=reason) for name, value in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="2 to 10")
    parser.add_argument("--end-to-end", action="store_true", help="the phases from a commit to a signed-off version")
    parser.add_argument("--dry", action="store_true", help="print and write no row")
    arguments = parser.parse_args()
    figures = end_to_end() if arguments.end_to_end else measure(arguments.rounds)
    if arguments.dry:
        for figure in figures:
            print(figure)
        return
    append(__file__, figures, LIBRARIES)


if __name__ == "__main__":
    main()
