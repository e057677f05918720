"""Rows of evidence: every quoted figure is a line of `benchmarks/results/<script>.csv`.

Old rows stay; the newest counts. A run that could not be made is a row with an empty value and the
reason in `command`.
"""

import csv
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

COLUMNS = ("date", "commit", "device", "versions", "case", "metric", "value", "lower", "upper", "unit", "n", "command")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """One measured value with its 95 % interval, where that has a meaning."""

    case: str
    metric: str
    value: float | None
    unit: str
    lower: float | None = None
    upper: float | None = None
    n: int | None = None
    reason: str = ""


def append(script: str, figures: list[Figure], libraries: tuple[str, ...]) -> Path:
    """Append the figures of one run to the script's CSV; all rows of a run carry the same date."""
    path = RESULTS / f"{Path(script).stem}.csv"
    path.parent.mkdir(exist_ok=True)
    fresh = not path.exists()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    versions = ";".join(f"{name}={version(name)}" for name in libraries)
    command = f"make bench NAME={Path(script).stem}"
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        if fresh:
            writer.writerow(COLUMNS)
        for f in figures:
            numbers = ["" if x is None else f"{x:.6g}" for x in (f.value, f.lower, f.upper)]
            n = "" if f.n is None else f.n
            writer.writerow([date, _commit(), _device(), versions, f.case, f.metric, *numbers, f.unit, n, f.reason or command])
    for f in figures:
        interval = "" if f.lower is None else f" [{f.lower:.4g}, {f.upper:.4g}]"
        print(f"{f.case:20} {f.metric:28} {f.value if f.value is None else f'{f.value:.6g}'}{interval} {f.unit}", file=sys.stderr)
    return path


def _commit() -> str:
    """Return the checkout's commit; where only files were copied to, the one named in EVIDENCE_COMMIT."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    )
    return done.stdout.strip() or os.environ.get("EVIDENCE_COMMIT", "unknown")


def _device() -> str:
    """Return e.g. `h200`, or `cpu-avx512-2`: widest vector unit and number of cores."""
    import psutil

    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        if names:
            return names[0].removeprefix("NVIDIA ").lower().replace(" ", "-")

    flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    widest = next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())
    return f"cpu-{widest.removesuffix('f')}-{psutil.cpu_count(logical=False) or psutil.cpu_count()}"
