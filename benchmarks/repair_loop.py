"""The quickstart pinned to 2 bits: round 0 must be rejected, then the repair loop has the word.

Runs `model-optimizer run` in a new folder and again; reports every round's figures, which stages were made how often,
and whether the second run took all rounds from the store.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.evidence import Figure, append

REPOSITORY = Path(__file__).resolve().parent.parent
PINS = ("quantization.default_precision=int2-g64", "quantization.kl_breaker_nats=1000", "scan.methods=[rtn]", "name=pinned")
VERDICTS = {"REJECT": -1.0, "INCONCLUSIVE": 0.0, "ACCEPT": 1.0}


def run(folder: Path) -> tuple[float, dict[str, Any]]:
    """Run the pinned profile in `folder`; return wall seconds and the outcome."""
    command = [str(Path(sys.executable).with_name("model-optimizer")), "run", str(REPOSITORY / "profiles" / "quickstart.yaml")]
    for pin in PINS:
        command += ["--set", pin]
    start = time.perf_counter()
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run([*command, "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=log, check=False, text=True)
    if done.returncode not in (0, 3, 5):
        raise SystemExit(f"the run ended with exit {done.returncode}:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return time.perf_counter() - start, json.loads(done.stdout)


def entries(folder: Path) -> set[str]:
    """Return the finished store entries as `stage/key`."""
    store = folder / ".model-optimizer" / "store"
    return {str(path.parent.relative_to(store)) for path in store.glob("*/*/artifact.json")}


def figures_of(folder: Path) -> list[Figure]:
    before = entries(folder)
    wall_s, outcome = run(folder)
    made = entries(folder) - before
    again_s, again = run(folder)
    figures = []
    for row in outcome["rounds"]:
        case, interval = f"round-{row['round']}", row["interval"]
        figures += [
            Figure(case, "bits_per_weight", row["true_bits_per_weight"], "bits"),
            Figure(case, "predicted_kl_nats", row["predicted_kl_nats"], "nats"),
            Figure(case, "measured_kl_nats", row["measured_kl_nats"], "nats"),
            Figure(case, "golden_change", row["difference"], "ratio", interval["lower"], interval["upper"], row["num_items"]),
            Figure(case, "raised_count", float(row["num_raised"]), "count"),
            Figure(case, "verdict", VERDICTS[row["verdict"]], "-1 REJECT, 0 INCONCLUSIVE, 1 ACCEPT", reason=row["strategy"]),
        ]
    counts = {kind: sum(entry.startswith(f"{kind}/") for entry in made) for kind in ("profile", "scan", "verify")}
    figures += [Figure("stages", f"{kind}_made_count", float(count), "count") for kind, count in counts.items()]
    recomputed = [stage for stage, cached in again["stages"].items() if not cached]
    return [
        *figures,
        Figure("run", "verdict", VERDICTS[outcome["verdict"]], "-1 REJECT, 0 INCONCLUSIVE, 1 ACCEPT"),
        Figure("run", "wall_s", wall_s, "s", n=1),
        Figure("again", "wall_s", again_s, "s", n=1),
        Figure("again", "recomputed_count", float(len(recomputed)), "count", n=7),
        Figure("again", "same_manifest", float(again["manifest_sha256"] == outcome["manifest_sha256"]), "count", n=1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="a folder to keep, e.g. one in which the quickstart has run (default: a new one)"
    )
    arguments = parser.parse_args()
    libraries = ("torch", "transformers", "onnxruntime", "prefect", "mlflow")
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        append(__file__, figures_of(arguments.folder), libraries)
        return
    with tempfile.TemporaryDirectory() as folder:
        append(__file__, figures_of(Path(folder)), libraries)


if __name__ == "__main__":
    main()
