"""The quickstart from nothing and again from the store: wall time, peak memory, size and speed ratios.

Runs `model-optimizer run` in a new folder, so that neither store nor databases of earlier runs are seen.
Peak memory is the largest sum over the process and its children, sampled every 0.2 s.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.evidence import Figure, append

REPOSITORY = Path(__file__).resolve().parent.parent


def timed_run(folder: Path, profile: Path) -> tuple[float, int, dict[str, object]]:
    """Run the profile in `folder`; return wall seconds, peak bytes of the process tree, and the JSON result."""
    command = [str(Path(sys.executable).with_name("model-optimizer")), "run", str(profile), "--json"]
    start = time.perf_counter()
    with (folder / "stdout.json").open("w") as out, (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(0.2)
    wall_s = time.perf_counter() - start
    if process.returncode not in (0, 3, 5):
        raise SystemExit(f"the run ended with exit {process.returncode}:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return wall_s, peak, json.loads((folder / "stdout.json").read_text())


def _tree_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; pages that they share count more than once."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def figures_of(folder: Path, profile: Path) -> list[Figure]:
    cold_s, peak, cold = timed_run(folder, profile)
    cached_s, _, cached = timed_run(folder, profile)
    same = cold["manifest_sha256"] == cached["manifest_sha256"]
    recomputed = [stage for stage, made in dict(cached["stages"]).items() if not made]  # type: ignore[call-overload]
    print(f"cold exit verdict {cold['verdict']}, cached: same manifest {same}, recomputed {recomputed}", file=sys.stderr)
    ratios = cold["ratios"]
    assert isinstance(ratios, dict)
    return [
        Figure("ours", "cold_wall_s", cold_s, "s", n=1),
        Figure("ours", "cached_wall_s", cached_s, "s", n=1),
        Figure("ours", "recomputed_count", float(len(recomputed)), "count", n=7),
        Figure("ours", "same_manifest", float(same), "count", n=1),
        Figure("ours", "peak_rss_bytes", float(peak), "bytes", n=1),
        Figure("ours", "size_ratio", ratios["size"], "ratio", n=1),
        Figure("ours", "speed_ratio", ratios["speed"], "ratio", ratios["speed_lower"], ratios["speed_upper"], ratios["speed_n"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="an empty folder to keep (default: a temporary one)")
    arguments = parser.parse_args()
    profile = REPOSITORY / "profiles" / "quickstart.yaml"
    libraries = ("torch", "transformers", "onnxruntime", "prefect", "mlflow")
    if arguments.folder:
        arguments.folder.mkdir(parents=True)
        append(__file__, figures_of(arguments.folder, profile), libraries)
    else:
        with tempfile.TemporaryDirectory() as folder:
            append(__file__, figures_of(Path(folder), profile), libraries)


if __name__ == "__main__":
    main()
