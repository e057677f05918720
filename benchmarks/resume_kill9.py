"""kill -9 in every stage, and at random moments inside the journaled parts: what was finished stays, what comes out is the same.

1. `fresh-<stage>`: a new folder, `model-optimizer run` killed inside the stage, run again to its end. Finished entries are
   not made again, the bundle differs from that of an undisturbed run only in files that hold measured values or times, and
   one more run makes nothing and gives the same manifest. Package is also killed between staging and publication, and right
   after publication.
2. `again-<stage>`: a finished folder without the entry of one stage, killed inside that stage, run again. The manifest is
   that of the undisturbed run. For all stages but package this holds by construction, because a release is named by what
   went into it; there the evidence is that the files which the stage made are the same byte by byte. Package is held
   against an undisturbed run that also found the six stages before it in the store, because the report says where they
   came from.
3. `soak`, `golden`, `scan`, `quantize`: the engine's own functions in a child that is killed at random moments.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.evidence import Figure, append
from benchmarks.killing import (
    NAME,
    Condition,
    Runs,
    copy_folder,
    differing_files,
    entries,
    finished,
    forget,
    inside,
    published,
    staged,
    write_pinned_project,
)
from benchmarks.killing_parts import PARTS, Tally, kill_often
from flows.bootstrap import HOME
from flows.server import LocalServer
from model_optimizer.artifacts.base import Stage, file_sha256
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.store import ARTIFACT

LIBRARIES = ("torch", "onnxruntime", "prefect", "mlflow")
KILLS = 50
TRIES = 4
"""A moment that lasts milliseconds can be missed."""
LONGEST_DELAY_S = 0.5
MEASURED = frozenset(
    {
        "manifest.json",
        "model.sig",
        "provenance.json",
        "metrics/report.json",
        "metrics/report.html",
        "metrics/report.md",
        "metrics/samples.parquet",
        "metrics/summary.md",
        "rollback/previous.json",
        "rollback/README.md",
    }
)
"""Files of a bundle that hold measured values, times or digests of such files; all others must not differ."""
MOMENTS: dict[str, tuple[Stage, Condition]] = {
    **{stage.value: (stage, inside(stage)) for stage in Stage},
    "package-staged": (Stage.PACKAGE, staged),
    "package-published": (Stage.PACKAGE, published),
}


def fresh(case: str, runs: Runs, root: Path, undisturbed: Path, rng: random.Random) -> Iterator[Figure]:
    """Kill the first run of a new folder inside a stage, then run to the end."""
    folder = _killed(case, runs, root / f"fresh-{case}", None, rng)
    name = f"fresh-{case}"
    if folder is None:
        yield Figure(name, "completed_count", None, "count", reason=f"the moment was missed in {TRIES} runs")
        return
    before, start = finished(folder), time.perf_counter()
    outcome = runs.complete(folder)
    yield Figure(name, "rerun_wall_s", time.perf_counter() - start, "s", n=1)
    after = finished(folder)
    redone = [key for key, made_at in before.items() if after.get(key) != made_at]
    shown = [stage for stage in outcome["stages"] if _alone(before, stage) and not outcome["stages"][stage]]
    differing = set().union(*(differing_files(_bundle(folder, v), _bundle(undisturbed, v)) for v in (0, 1)))
    print(name, "finished before:", sorted({stage for stage, _ in before}), "differing:", sorted(differing), file=sys.stderr)
    once_more = runs.complete(folder)
    made = [stage for stage, cached in once_more["stages"].items() if not cached]
    yield Figure(name, "completed_count", 1.0, "count", n=1)
    yield Figure(name, "kept_count", float(len(before)), "count", n=1)
    yield Figure(name, "redone_count", float(len(redone) + len(shown)), "count", n=len(before))
    yield Figure(name, "differing_count", float(len(differing - MEASURED)), "count", n=len(_files(_bundle(folder, 1))))
    yield Figure(name, "versions_count", float(len(list((folder / HOME / "bundles").glob(f"{NAME}-v*/")))), "count", n=1)
    same = once_more["manifest_sha256"] == outcome["manifest_sha256"] and not made
    yield Figure(name, "same_manifest_next_run", float(same), "count", n=1)


def again(case: str, runs: Runs, root: Path, undisturbed: Path, rng: random.Random) -> Iterator[Figure]:
    """Take one stage's results out of a finished folder, kill the run that makes them again, and run to the end."""
    name, stage = f"again-{case}", MOMENTS[case][0]
    folder = _killed(case, runs, root / name, undisturbed, rng)
    if folder is None:
        yield Figure(name, "same_manifest_count", None, "count", reason=f"the moment was missed in {TRIES} runs")
        return
    outcome = runs.complete(folder)
    reference = _packaged_again(runs, root, undisturbed) if stage is Stage.PACKAGE else undisturbed
    same = outcome["manifest_sha256"] == file_sha256(_bundle(reference, 1) / MANIFEST)
    made = {path for entry in entries(folder, stage) for path in differing_files(entry, _entry(undisturbed, stage, entry.name))}
    print(name, "differing in the entries:", sorted(made), "stages:", outcome["stages"], file=sys.stderr)
    yield Figure(name, "same_manifest_count", float(same), "count", n=1)
    yield Figure(name, "by_construction", float(stage is not Stage.PACKAGE), "count", n=1)
    yield Figure(name, "differing_files_of_the_stage_count", float(len(made - {ARTIFACT})), "count", n=1)


def _packaged_again(runs: Runs, root: Path, undisturbed: Path) -> Path:
    """Return a folder in which an undisturbed run made nothing but the package."""
    folder = root / "packaged-again"
    if not folder.exists():
        forget(copy_folder(undisturbed, folder), Stage.PACKAGE)
        runs.complete(folder)
    return folder


def _killed(case: str, runs: Runs, folder: Path, source: Path | None, rng: random.Random) -> Path | None:
    """Return a folder with a run killed at the case's moment; None where the moment could not be met."""
    stage, moment = MOMENTS[case]
    for attempt in range(TRIES):
        place = folder.with_name(f"{folder.name}-{attempt}")
        if source is not None:
            copy_folder(source, place)
            forget(place, stage)
        longest_s = LONGEST_DELAY_S if case in (Stage.PROFILE, Stage.VERIFY) else 0.02 if case in set(Stage) else 0.0
        if runs.killed(place, moment, rng.uniform(0, longest_s) if attempt == 0 else 0.0):
            return place
    return None


def _alone(before: dict[tuple[str, str], str], stage: str) -> bool:
    """Return whether the stage was finished; quantize and compile have entries of other candidates, which say nothing."""
    return stage not in (Stage.QUANTIZE, Stage.COMPILE) and any(stage == kind for kind, _ in before)


def _bundle(folder: Path, version: int) -> Path:
    return folder / HOME / "bundles" / f"{NAME}-v{version}"


def _entry(folder: Path, stage: Stage, key: str) -> Path:
    return folder / HOME / "store" / stage / key


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def stage_figures(root: Path, cases: tuple[str, ...]) -> Iterator[Figure]:
    """Kill runs in all stages; they share one Prefect server, which saves its start 40 times."""
    rng = random.Random(0)
    server = LocalServer(root / "prefect")
    environment = {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(root / "prefect")}
    server.wait()
    with Runs(write_pinned_project(root), environment) as runs:
        undisturbed = root / "undisturbed"
        start = time.perf_counter()
        runs.complete(undisturbed)
        yield Figure("undisturbed", "wall_s", time.perf_counter() - start, "s", n=1)
        for case in cases:
            yield from again(case, runs, root, undisturbed, rng)
        for case in cases:
            yield from fresh(case, runs, root, undisturbed, rng)


def part_figures(root: Path, parts: tuple[str, ...], num_kills: int) -> Iterator[Figure]:
    """Kill the journaled parts at random moments."""
    for name in parts:
        tally: Tally = kill_often(name, root / name, num_kills)
        yield Figure(name, "resumed_count", float(tally.num_resumed), "count", n=tally.num_kills)
        yield Figure(name, "lost_records_count", float(tally.num_lost), "count", n=tally.num_records)
        yield Figure(name, "repeated_records_count", float(tally.num_repeated), "count", n=tally.num_records)
        yield Figure(name, "different_results_count", float(tally.num_different), "count", n=tally.num_finished)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of every part")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--cases", nargs="*", default=list(MOMENTS), choices=list(MOMENTS))
    parser.add_argument("--folder", type=Path, help="an empty folder to keep (default: a temporary one)")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        figures: list[Figure] = []
        try:
            figures.extend(part_figures(root / "parts", tuple(arguments.parts), arguments.kills))
            if arguments.cases:
                figures.extend(stage_figures(root, tuple(arguments.cases)))
        finally:  # an interrupted hour leaves what it has measured
            append(__file__, figures, LIBRARIES)


if __name__ == "__main__":
    main()
