"""An hour in real time: `model-optimizer soak` on a tiny random model next to its control process, on the CPU.

Nothing is accelerated. The report that comes out is kept beside the figures (`recorded/soak_real.md`). With `--folder` no soak
is run: the report that lies there is taken.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.evidence import RESULTS, Figure, append
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.verification.soak_report import REPORT, SoakReport

DURATION = "60min"
PAGE = "soak.md"
KEPT = RESULTS.parent / "recorded" / "soak_real.md"
LIBRARIES = ("torch", "transformers")


def run(root: Path) -> Path:
    """Soak for an hour; return the folder, whatever the verdict."""
    model = write_tiny_llama(root / "tiny")
    command = [sys.executable, "-m", "flows.cli", "soak", str(model), "--duration", DURATION, "--output", str(root / "soak")]
    subprocess.run(command, cwd=root, check=False)
    return root / "soak"


def figures(report: SoakReport) -> list[Figure]:
    """Return the rows of one soak."""
    soak, rejected = report.soak, [it.name for it in report.measures if it.verdict is Verdict.REJECT]
    undecided = [it.name for it in report.measures if it.verdict is Verdict.INCONCLUSIVE]
    case = f"{report.subject}-cpu"
    growth = [
        Figure(case, f"{it.counter}_growth_per_hour", it.per_hour, it.unit, it.interval.lower, it.interval.upper, n=it.num_points)
        for it in soak.growth
    ]
    return [
        Figure(case, "wall_s", soak.ran_s, "s", n=soak.num_requests),
        Figure(case, "rejected_count", len(rejected), "count", n=soak.num_segments, reason=", ".join(rejected)),
        Figure(case, "undecided_count", len(undecided), "count", n=soak.num_segments, reason=", ".join(undecided)),
        *growth,
    ]


def main() -> None:
    """Run or read a soak, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a soak that is done")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or run(Path(temporary))
        report = SoakReport.model_validate_json((folder / REPORT).read_bytes())
        KEPT.write_bytes((folder / PAGE).read_bytes())
    append(__file__, figures(report), LIBRARIES)


if __name__ == "__main__":
    main()
