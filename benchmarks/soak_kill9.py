"""kill -9 at random moments of a soak: it goes on where it was, and ends with the statistics of one that nobody disturbed.

An accelerated soak in a forked child on a tiny random model, 24 segments that stand for an hour each. What does not depend on
the clock (requests, tokens, every generated token's hash, drift samples, failures, verdicts of the exact checks) must be equal
to the bit; latencies and memory are measured anew and are not compared. A kill may cost the segment that was running, no more.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence import Figure, append
from benchmarks.soak_faults import LIBRARIES, PLAN, STRESS
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.journal import Journal
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import Quiet
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.soak import run_soak
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_summary import summarise_soak

KILLS = 50
CONFIG = SoakConfig(duration=86400.0, segment=3600.0, drift_every=6 * 3600.0, requests_per_segment=12)
PATIENCE = 1.2
"""Every kill makes the next child's longest time so much longer, lest a busy machine never lets one end."""
COMPARED = (
    "num_segments", "num_requests", "num_tokens", "num_failed", "num_non_finite", "num_canaries", "num_wrong_canaries",
    "num_changed_digests", "num_drifted_samples", "drift_nats", "num_drift_flips", "equivalent_s", "output_digest",
)  # fmt: skip


@dataclass
class Tally:
    """What came of the kills."""

    num_kills: int = 0
    num_resumed: int = 0
    num_different: int = 0
    num_lost: int = 0
    num_finished: int = 0
    gap_s: float = 0.0


def soak(model: Path, folder: Path) -> None:
    """Soak to the end, or go on with it."""
    with closing(open_native(model, PLAN, NativeOptions())) as runtime:
        run_soak(runtime, STRESS, CONFIG, _journal(folder), Quiet())


def statistics(folder: Path) -> tuple[object, ...]:
    """Return what must not depend on kills, and what the exact checks found."""
    found: SoakResult = summarise_soak(_journal(folder).records, CONFIG.duration)
    fields = found.model_dump()
    return (*(fields[name] for name in COMPARED), *((tally.check, tally.num_found) for tally in found.tallies))


def kill_often(root: Path, num_kills: int, *, seed: int = 0) -> Tally:
    """Kill children at random moments; every folder is worked on until its soak is done."""
    model = write_tiny_llama(root / "model")
    start = time.monotonic()
    _child(model, root / "undisturbed").join()
    usual_s, expected = time.monotonic() - start, statistics(root / "undisturbed")
    tally, rng, number = Tally(), random.Random(seed), 0
    while tally.num_kills < num_kills:
        folder, number = root / str(number), number + 1
        kills, lost = _work_through(model, folder, usual_s, rng)
        same = statistics(folder) == expected
        tally.num_kills += kills
        tally.num_lost += lost
        tally.num_resumed += kills if same and not lost else 0
        tally.num_different += not same
        tally.num_finished += 1
        tally.gap_s += summarise_soak(_journal(folder).records, CONFIG.duration).gap_s
    return tally


def _work_through(model: Path, folder: Path, usual_s: float, rng: random.Random) -> tuple[int, int]:
    """Start children until one comes to its end; return how often one was killed, and how many records that cost."""
    kills, lost, held = 0, 0, set[bytes]()
    while True:
        child = _child(model, folder)
        child.join(rng.uniform(0, usual_s * PATIENCE**kills))
        killed = child.exitcode is None
        if killed:
            child.kill()
            child.join()
        elif child.exitcode != 0:
            raise RuntimeError(f"the soak in {folder} failed with exit {child.exitcode}")
        path = folder / "soak.jsonl"
        now = set(path.read_bytes().splitlines(keepends=True)) if path.exists() else set()
        lost += len(held - now)
        held = {line for line in now if line.endswith(b"\n")}
        if not killed:
            return kills, lost
        kills += 1


def _child(model: Path, folder: Path) -> multiprocessing.process.BaseProcess:
    folder.mkdir(parents=True, exist_ok=True)
    child = multiprocessing.get_context("fork").Process(target=soak, args=(model, folder))
    child.start()
    return child


def _journal(folder: Path) -> Journal[Segment]:
    return Journal(folder / "soak.jsonl", "k", Segment)


def main() -> None:
    """Kill, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--dry", action="store_true", help="write no rows")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as root:
        tally = kill_often(Path(root), arguments.kills)
    print(tally, file=sys.stderr)
    figures = [
        Figure("soak", "resumed_count", tally.num_resumed, "count", n=tally.num_kills),
        Figure("soak", "different_count", tally.num_different, "count", n=tally.num_finished),
        Figure("soak", "lost_records_count", tally.num_lost, "count", n=tally.num_kills),
        Figure("soak", "not_tested_s", tally.gap_s, "s", n=tally.num_kills),
    ]
    if not arguments.dry:
        append(__file__, figures, LIBRARIES)


if __name__ == "__main__":
    main()
