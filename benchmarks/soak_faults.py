"""Does the soak find what is wrong, and nothing where nothing is? Twelve faults in the native runtime, and twenty clean runs.

Every run is a process of its own: a day of traffic in accelerated time (24 segments that stand for an hour each) on a tiny
random model (with packed int8 weights where scales are the fault), next to its control process. A fault counts as found when
the measure that is there for it rejects; a clean run that rejects anything is a false alarm.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.evidence import Figure, append
from benchmarks.soak_fault_parts import FAULTS
from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.journal import Journal
from model_optimizer.models.headers import read_headers
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native
from model_optimizer.spec import Lengths, Traffic
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.robustness import robustness_measures
from model_optimizer.verification.soak import Setting, Stress, TrafficClock, run_soak
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_summary import summarise_soak
from model_optimizer.verification.soak_twin import Twin
from model_optimizer.verification.soak_worker import ended_how

NUM_CLEAN = 20
PLAIN, PACKED = "plain", "packed"
CONFIG = SoakConfig(duration=86400.0, segment=3600.0, drift_every=8 * 3600.0, requests_per_segment=12)
PLAN = KvPlan(page_tokens=16, num_pages=128, bytes_per_token=512, max_batch=4, max_model_len=128)
TRAFFIC = Traffic(prompt_tokens=Lengths(p50=8, p95=20, max=40), output_tokens=Lengths(p50=4, p95=6, max=8))
STRESS = Stress(TRAFFIC, tuple(range(4, 204)) * 4, concurrency=4, max_model_len=PLAN.max_model_len, seed=0)
LIBRARIES = ("torch", "transformers")


def soak_once(root: Path, name: str, fault: str, seed: int) -> tuple[Measure, ...]:
    """Soak one of the models below `root` in a child, spoiled by `fault` or not at all (""), and judge what its journal holds."""
    model, folder = root / (PACKED if fault == "scale-mutation" else PLAIN), root / name
    folder.mkdir(parents=True)
    child = multiprocessing.get_context("fork").Process(target=_soak, args=(model, folder, fault, seed))
    child.start()
    child.join()
    journal = Journal(folder / "soak.jsonl", "k", Segment)
    if child.exitcode != 0:
        journal.append(Segment.crashed(len(journal.records), ended_how(child.exitcode), time.time()))
    soak = summarise_soak(journal.records, CONFIG.duration)
    return robustness_measures(soak, 0, 0, soak.peak_bytes)


def _soak(model: Path, folder: Path, fault: str, seed: int) -> None:
    stress, clock = replace(STRESS, seed=seed), TrafficClock()
    with (
        Twin(lambda: open_model(model), stress.canaries(), start_method="fork") as twin,
        closing(open_model(model)) as runtime,
    ):
        if fault:
            spoil, _ = FAULTS[fault]
            spoil(runtime, clock)
        journal = Journal(folder / "soak.jsonl", "k", Segment)
        run_soak(runtime, stress, CONFIG, journal, Quiet(), setting=Setting(control=twin, clock=clock))


def open_model(folder: Path) -> NativeRuntime:
    return open_native(folder, PLAN, NativeOptions(keep_packed=True, device="cpu"))


def write_packed(source: Path, target: Path) -> Path:
    """Write a plain model again with its linears in int8."""
    headers = read_headers(source)
    layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
    plan = dict.fromkeys(layers, "int8-channel")
    write_checkpoint(
        source, target, plan, lambda layer: FORMATS.get(plan[layer]).quantize(read_tensor(headers[f"{layer}.weight"]))
    )
    return target


def rejected(measures: tuple[Measure, ...]) -> list[str]:
    return [measure.name for measure in measures if measure.verdict is Verdict.REJECT]


def main() -> None:
    """Run the catalogue and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="faults to run")
    parser.add_argument("--clean", type=int, default=NUM_CLEAN)
    parser.add_argument("--keep", type=Path, help="a folder for the journals")
    parser.add_argument("--dry", action="store_true", help="write no rows")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        write_packed(write_tiny_llama(root / PLAIN), root / PACKED)
        figures = run_catalogue(root, arguments.only, arguments.clean)
    if not arguments.dry:
        append(__file__, figures, LIBRARIES)


def run_catalogue(root: Path, faults: list[str], num_clean: int) -> list[Figure]:
    """Return a row for every fault, and the totals."""
    start, figures, detected, alarms, accepted = time.monotonic(), [], 0, 0, 0
    for fault in faults:
        found = rejected(soak_once(root, fault, fault, seed=0))
        is_found = bool(FAULTS[fault][1] & set(found))
        detected += is_found
        print(
            f"{time.monotonic() - start:6.1f} s  {fault:18} {'found' if is_found else 'MISSED'} by {', '.join(found)}",
            file=sys.stderr,
        )
        figures.append(Figure(fault, "detected_count", int(is_found), "count", n=1))
    for seed in range(num_clean):
        measures = soak_once(root, f"clean-{seed}", "", seed=seed)
        found = rejected(measures)
        alarms += bool(found)
        undecided = [measure.name for measure in measures if measure.verdict is Verdict.INCONCLUSIVE]
        accepted += not found and not undecided
        print(
            f"{time.monotonic() - start:6.1f} s  clean-{seed:<12} {'FALSE ALARM: ' * bool(found)}{', '.join(found)} "
            f"undecided: {', '.join(undecided)}",
            file=sys.stderr,
        )
    figures += [
        Figure("all", "detected_count", detected, "count", n=len(faults)),
        Figure("clean", "false_alarm_count", alarms, "count", n=num_clean),
        Figure("clean", "accepted_count", accepted, "count", n=num_clean),
        Figure("all", "wall_s", time.monotonic() - start, "s", n=len(faults) + num_clean),
    ]
    return figures


if __name__ == "__main__":
    main()
