"""What the native runtime really holds of a GPU at the size of an 8B model, or of a CPU, beside what the budget table says.

    make bench NAME=memory_budget ARGS="--folder EMPTY_FOLDER"
    make bench NAME=memory_budget ARGS="--folder EMPTY_FOLDER --device cpu"

Each case runs in a process of its own, with a random checkpoint. `measured` is the driver's count with everything in it:
context, weights, all pages, the allocator's slack, after the planned number of requests ran at their full length. The 8 GiB case
runs int4 weights kept packed, 4 streams of 4096 tokens, under an allocator that gives no more than fits beside the context.
On a CPU it is the peak of the process's resident size while the requests run, interpreter and libraries included; the model is
small there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.evidence import Figure, append
from benchmarks.random_llama import VOCAB_SIZE, write_random

if TYPE_CHECKING:
    from model_optimizer.memory.table import MemoryTable
    from model_optimizer.runtimes.torch.engine import NativeRuntime

LIBRARIES = ("torch", "transformers")
LAYERS, HIDDEN = 32, 4096
CPU_LAYERS, CPU_HIDDEN, CPU_LONGEST = 8, 1024, 512
PAGE_TOKENS, LONGEST, NEW_TOKENS = 16, 4096, 128
"""So many new tokens that all prompts are read before the first request ends: all run at once."""
GIB = 2**30
CAP_BYTES = 8 * GIB


@dataclass(frozen=True)
class Case:
    name: str
    weights: str | None
    """Format of the linears, kept packed; None = bfloat16."""
    kv_precision: str
    streams: int
    cap_bytes: int | None = None
    device: str = "cuda"

    @property
    def longest(self) -> int:
        return LONGEST if self.device == "cuda" else CPU_LONGEST


CASES = (
    Case("int4-packed-kv-fp8-8gib", "int4-g128", "fp8", 4, CAP_BYTES),
    Case("int8-packed-kv-fp8", "int8-channel", "fp8", 8),
    Case("bf16-kv-fp8", None, "fp8", 8),
    Case("bf16", None, "bfloat16", 8),
    Case("cpu-float32", None, "float32", 4, device="cpu"),
    Case("cpu-int8-packed", "int8-channel", "float32", 4, device="cpu"),
)


def used_bytes() -> int:
    """Return what is in use of the first device, by the driver's count: it must be ours alone."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def planned(case: Case, directory: Path) -> "MemoryTable":
    """Return the budget of a case: all its streams at their full length, no breathing room."""
    from model_optimizer.memory.budget import CUDA_CONTEXT_BYTES, PROCESS_BYTES, RUNTIME_CONTEXT_BYTES
    from model_optimizer.memory.config import MemoryConfig
    from model_optimizer.memory.plan import Demand
    from model_optimizer.memory.subject import read_subject
    from model_optimizer.memory.table import Asked, DeviceMemory, memory_table
    from model_optimizer.spec import Lengths, Sla, Traffic

    prompt = case.longest - NEW_TOKENS
    demand = Demand(
        Sla(concurrency=case.streams, max_model_len=case.longest),
        Traffic(
            prompt_tokens=Lengths(p50=prompt, p95=prompt, max=prompt),
            output_tokens=Lengths(p50=NEW_TOKENS, p95=NEW_TOKENS, max=NEW_TOKENS),
        ),
        MemoryConfig(page_tokens=PAGE_TOKENS, kv_precision=case.kv_precision, breathing_room_ratio=0, utilization_ratio=0.95),
    )
    free = int(case.cap_bytes / 0.95) if case.cap_bytes else 140 * GIB
    device = DeviceMemory("h200", free, CUDA_CONTEXT_BYTES, 0, "bfloat16")
    if case.device == "cpu":
        device = DeviceMemory("cpu", 140 * GIB, RUNTIME_CONTEXT_BYTES, PROCESS_BYTES, "float32")
    return memory_table(read_subject(directory), Asked(demand, device, "torch", packed=case.weights is not None))


def saturate(runtime: "NativeRuntime", case: Case) -> tuple[int, int]:
    """Run so many requests of the full length at once; return how many ended, and the most that ran together."""
    from model_optimizer.protocols import GenerationRequest

    generator = torch.Generator().manual_seed(0)
    for _ in range(case.streams):
        prompt = tuple(torch.randint(0, VOCAB_SIZE, (case.longest - NEW_TOKENS,), generator=generator).tolist())
        runtime.submit(GenerationRequest(prompt, NEW_TOKENS))
    finished = most_running = 0
    while events := runtime.step():
        finished += sum(event.finished for event in events)
        most_running = max(most_running, runtime.activity().num_running)
    return finished, most_running


def run_on_cpu(case: Case, directory: Path) -> dict[str, float]:
    """Return predicted and measured bytes of a case on the CPU."""
    from model_optimizer.measurement.process import PeakSampler
    from model_optimizer.runtimes.torch.config import NativeOptions
    from model_optimizer.runtimes.torch.engine import open_native

    table = planned(case, directory)
    found = {f"predicted_{line.part}_bytes": float(line.num_bytes) for line in table.budget}
    runtime = open_native(directory, table.kv, NativeOptions(device="cpu", keep_packed=case.weights is not None))
    with PeakSampler() as peak:
        finished, most_running = saturate(runtime, case)
    return found | {"finished": finished, "most_running": most_running, "used_bytes": peak.peak_bytes}


def run_case(case: Case, directory: Path) -> dict[str, float]:
    """Return predicted and measured bytes of one case; this process must not have touched the device before."""
    from model_optimizer.runtimes.torch.config import NativeOptions
    from model_optimizer.runtimes.torch.engine import open_native

    before = used_bytes()
    table = planned(case, directory)
    found = {f"predicted_{line.part}_bytes": float(line.num_bytes) for line in table.budget}
    tile = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.mm(tile, tile)
    torch.cuda.synchronize()
    found["context_bytes"] = used_bytes() - before - torch.cuda.memory_reserved()
    if case.cap_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((case.cap_bytes - found["context_bytes"]) / total)
    runtime = open_native(
        directory, table.kv, NativeOptions(dtype="bfloat16", device="cuda", keep_packed=case.weights is not None)
    )
    found |= {"loaded_bytes": torch.cuda.memory_allocated(), "load_peak_bytes": torch.cuda.max_memory_allocated()}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    finished, most_running = saturate(runtime, case)
    torch.cuda.synchronize()
    return found | {
        "finished": finished,
        "most_running": most_running,
        "preemptions": runtime.activity().num_preemptions,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": used_bytes() - before,
    }


def figures_of(case: Case, found: dict[str, float]) -> list[Figure]:
    parts = ("weights", "kv_reservation", "activations", "workspace", "runtime_context", "process")
    predicted = sum(found[f"predicted_{part}_bytes"] for part in parts)
    measured = found["used_bytes"]
    said = f"make bench NAME=memory_budget; {case.streams} streams of {case.longest} tokens"
    return [
        Figure(case.name, "predicted_bytes", predicted, "bytes", reason=said),
        Figure(case.name, "measured_bytes", measured, "bytes", reason=said),
        Figure(case.name, "predicted_over_measured_ratio", predicted / measured, "ratio", reason=said),
        Figure(case.name, "finished_count", found["finished"], "count", n=case.streams, reason=said),
        Figure(case.name, "most_running_count", found["most_running"], "count", n=case.streams, reason=said),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty place for 16 GB, e.g. on a memory file system")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="left out: all of the device")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        case = next(case for case in CASES if case.name == asked.inside)
        print(json.dumps((run_case if case.device == "cuda" else run_on_cpu)(case, asked.folder)))
        return
    written: dict[str | None, Path] = {}
    for case in (case for case in CASES if case.device == asked.device and case.name in (asked.cases or [case.name])):
        if case.weights not in written:
            written[case.weights] = asked.folder / (case.weights or "bfloat16")
            size = (LAYERS, HIDDEN) if case.device == "cuda" else (CPU_LAYERS, CPU_HIDDEN)
            write_random(written[case.weights], *size, case.weights)
            torch.cuda.empty_cache()
        command = [
            sys.executable,
            "-m",
            "benchmarks.memory_budget",
            "--folder",
            str(written[case.weights]),
            "--inside",
            case.name,
        ]
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr, flush=True)
            append(
                __file__,
                [Figure(case.name, "measured_bytes", None, "bytes", reason=done.stderr.strip().splitlines()[-1][:200])],
                LIBRARIES,
            )
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            case.name,
            json.dumps({key: round(value / 2**20) if key.endswith("bytes") else value for key, value in found.items()}),
            flush=True,
        )
        append(__file__, figures_of(case, found), LIBRARIES)
    shutil.rmtree(asked.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
