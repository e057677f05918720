"""What quantizing SmolLM2 costs: ours against the fastest peer, in turns, each in a process of its own.

`ours-gptq` is GPTQ in int4-g64 alone, its sensitivity measured before by another process; it still plans, reads, writes and
checks its checkpoint, whereas the peer's time is `oneshot` alone, without loading and saving. `ours-full` is sensitivity,
allocation at 4.25 bits and GPTQ from nothing. Turns go A B B A, so that a drift of the machine meets both alike.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.equal_bits import (
    LENGTH,
    LIBRARIES,
    NUM_SEQUENCES,
    add_places,
    peer_command,
    resolved,
    run_quantizer,
    write_tokens,
)
from benchmarks.evidence import Figure, append
from benchmarks.peers.job import RESULT

PEER = "llm-compressor"
BITS = 4.25
MOST_RESAMPLES = 4000


@dataclass(frozen=True)
class Setting:
    model: Path
    text: Path
    work: Path
    peers: Path
    threads: int
    pairs: int
    full_runs: int
    num_sequences: int
    length: int

    @classmethod
    def parse(cls) -> "Setting":
        parser = argparse.ArgumentParser(description=__doc__)
        add_places(parser)
        parser.add_argument("--pairs", type=int, default=3)
        parser.add_argument("--full-runs", type=int, default=1)
        parser.add_argument("--num-sequences", type=int, default=NUM_SEQUENCES, help="calibration sequences; fewer to try it out")
        parser.add_argument("--length", type=int, default=LENGTH, help="tokens of each")
        found = vars(parser.parse_args())
        return cls(**found | {"model": resolved(found["model"])})


class Bench:
    """The three things that are timed, on the same calibration tokens."""

    def __init__(self, setting: Setting, folder: Path):
        self._setting, self._folder = setting, folder
        self._calibration, tokens = write_tokens(setting.text, setting.model, folder)
        self._tokens = folder / "tokens.safetensors"
        tokens_BT = load_file(tokens)["tokens_BT"][: setting.num_sequences, : setting.length]
        save_file({"tokens_BT": tokens_BT.contiguous()}, self._tokens)
        self._primed = folder / "primed"
        self._run(self._ours("sensitivity", self._primed), "sensitivity")

    def peer(self) -> Mapping[str, float] | str:
        """Return its report, or why there is none."""
        return self._run([*peer_command(self._setting.peers, PEER), "--tokens", str(self._tokens), "--bits", str(BITS)], "peer")

    def gptq(self) -> Mapping[str, float] | str:
        """Quantize with the sensitivity at hand and nothing else."""
        store = self._folder / "gptq-store"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(self._primed, store)
        return self._run(self._ours("uniform", store), "gptq")

    def full(self) -> Mapping[str, float] | str:
        store = self._folder / "full-store"
        shutil.rmtree(store, ignore_errors=True)
        return self._run(self._ours("full", store), "full")

    def _ours(self, mode: str, store: Path) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.ours_quantize", "--mode", mode, "--store", str(store), "--bits", str(BITS)]
        sizes = ["--num-sequences", str(self._setting.num_sequences), "--length", str(self._setting.length)]
        return [*command, "--calibration", str(self._calibration), *sizes]

    def _run(self, command: Sequence[str], name: str) -> Mapping[str, float] | str:
        output = self._folder / name
        shutil.rmtree(output, ignore_errors=True)
        model = str(self._setting.model.absolute())
        failure = run_quantizer([*command, "--model", model, "--output", str(output)], self._setting.threads)
        if failure or not (output / RESULT).is_file():
            return failure
        found: dict[str, float] = json.loads((output / RESULT).read_text(encoding="utf-8"))
        print(f"{name}: {found['wall_s']:.1f} s, {found['peak_rss_bytes'] / 2**30:.2f} GiB", file=sys.stderr)
        return found


def in_turns(
    left: Callable[[], Mapping[str, float] | str], right: Callable[[], Mapping[str, float] | str], pairs: int
) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]], str]:
    """Return both sides' reports, A B B A ..., and why the right side has none."""
    lefts, rights = [], []
    for number in range(pairs):
        sides = {"left": left, "right": right}
        found = {name: sides[name]() for name in (("left", "right") if number % 2 == 0 else ("right", "left"))}
        if isinstance(found["left"], str):
            sys.exit(f"ours: {found['left']}")
        lefts.append(found["left"])
        if isinstance(found["right"], str):
            return lefts, [], found["right"]
        rights.append(found["right"])
    return lefts, rights, ""


def cost_figures(case: str, reports: Sequence[Mapping[str, float]], said: str) -> list[Figure]:
    """Return median time with its extremes, and the largest peak."""
    times_s = [it["wall_s"] for it in reports]
    peak = max(it["peak_rss_bytes"] for it in reports)
    return [
        Figure(case, "wall_s", float(np.median(times_s)), "s", min(times_s), max(times_s), len(times_s), said),
        Figure(case, "peak_rss_bytes", peak, "bytes", n=len(reports), reason=said),
    ]


def speedup(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], said: str) -> Figure:
    """Return the geometric mean of their time over ours, pair by pair, and its interval from resampling pairs."""
    logs = np.log([right["wall_s"] / left["wall_s"] for left, right in zip(ours, theirs, strict=True)])
    picks = np.random.default_rng(0).integers(0, len(logs), (MOST_RESAMPLES, len(logs)))
    lower, upper = np.quantile(np.exp(logs[picks].mean(1)), [0.025, 0.975])
    mean = float(np.exp(logs.mean()))
    return Figure("ours-gptq", "speedup_vs_fastest_peer", mean, "ratio", float(lower), float(upper), len(logs), said)


def main() -> None:
    setting = Setting.parse()
    torch.set_num_threads(1)
    said = f"make bench NAME=quantize_cost; {setting.num_sequences} x {setting.length} tokens, {setting.threads} threads"
    setting.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=setting.work.absolute()) as folder:
        bench = Bench(setting, Path(folder))
        ours, theirs, failure = in_turns(bench.gptq, bench.peer, setting.pairs)
        figures = cost_figures("ours-gptq", ours, said)
        if theirs:
            figures += [*cost_figures(PEER, theirs, said), speedup(ours, theirs, f"{said}, against {PEER}")]
        else:
            figures.append(Figure(PEER, "wall_s", None, "s", reason=failure))
        fulls = [bench.full() for _ in range(setting.full_runs)]
        if any(isinstance(it, str) for it in fulls):
            sys.exit(f"ours-full: {fulls}")
        figures += cost_figures("ours-full", [it for it in fulls if not isinstance(it, str)], said) if fulls else []
    append(__file__, figures, LIBRARIES)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
