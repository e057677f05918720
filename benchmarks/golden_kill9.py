"""kill -9 at random moments of whole golden runs: choices and written answers, engine against baseline, judged at the end.

    make bench NAME=golden_kill9

Each run is `flows.golden_run.evaluate`, what the command `eval` calls, in a forked child. A folder is worked on by one child
after another, each killed at a random moment, until one comes to its end; what it then says must equal, byte by byte but for
times, what an undisturbed run says. No answer that was on disk may be lost or made twice.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import yaml

from benchmarks.evidence import Figure, append
from flows.golden_run import ANSWERS, ARMS, EngineOptions, EvalRequest, evaluate
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import Quiet
from model_optimizer.verification.golden_run import RESULT, GoldenRun
from model_optimizer.verification.golden_statistics import Rule
from tests.tiny import WORDS, write_golden_set

KILLS = 50
NUM_CHOICES, NUM_TEXTS, NEW_TOKENS = 240, 96, 12
PATIENCE = 1.2
"""Every kill in a folder makes the next child's longest time so much longer, lest a busy machine never lets one end."""


@dataclass
class Tally:
    """What the kills did."""

    num_kills: int = 0
    num_finished: int = 0
    num_identical: int = 0
    num_resumed: int = 0
    """Kills after which everything that had been on disk was still there."""
    num_records: int = 0
    num_lost: int = 0
    num_repeated: int = 0
    held: list[int] = field(default_factory=list)
    """Answers on disk at each kill: shows that kills hit all parts of a run."""


def write_material(folder: Path) -> Path:
    """Write two models, a set of choices and a set of texts; one thread only, because threads do not survive a fork."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for seed in (0, 1):
        write_tiny_llama(folder / f"model-{seed}", seed=seed)
    rng = random.Random(0)
    write_golden_set(folder / "words", folder / "model-0", num_items=NUM_CHOICES, rng=rng)
    texts = folder / "texts"
    texts.mkdir()
    items = [
        {"id": f"t-{at:03}", "prompt": f"{rng.choice(WORDS)} {at} {rng.choice(WORDS)}", "references": [rng.choice(WORDS)]}
        for at in range(NUM_TEXTS)
    ]
    (texts / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    card = {
        "name": "texts",
        "version": "1",
        "description": "words that mean nothing",
        "provenance": "written by the benchmark",
        "licence": "Apache-2.0",
        "languages": ["en"],
        "metric": "token_f1",
        "guards": {"repetition": 0.5, "verbosity": 0.5},
        "generation": {"max_new_tokens": NEW_TOKENS},
    }
    (texts / "card.yaml").write_text(yaml.safe_dump(card))
    return folder


def start(material: Path, folder: Path) -> BaseProcess:
    """Start a child that works on `folder`."""
    request = EvalRequest(
        model=str(material / "model-1"),
        against=str(material / "model-0"),
        golden=(str(material / "words"), str(material / "texts")),
        rule=Rule(0.2, 0.05, 0.8),
        output=folder,
        engine=EngineOptions(max_batch=4, max_model_len=128),
    )
    child = multiprocessing.get_context("fork").Process(target=evaluate, args=(request, Quiet()))
    child.start()
    return child


def records(folder: Path) -> list[str]:
    """Return `arm set item` of every answer that is wholly on disk."""
    found = []
    for arm in ARMS:
        path = folder / f"{arm}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []
        for line in lines:
            if line.endswith(b"\n"):
                found += [f"{arm} {score['golden_set']} {score['item']}" for score in json.loads(line)["scores"]]
    return found


def outcome(folder: Path) -> tuple[bytes, bytes]:
    """Return everything that a finished run says but its times, and both engines' answers."""
    return GoldenRun.model_validate_json((folder / RESULT).read_bytes()).statistics, (folder / ANSWERS).read_bytes()


def work_through(material: Path, folder: Path, tally: Tally, usual_s: float, rng: random.Random) -> float:
    """Start children on a folder until one ends by itself; return how long a whole run takes, as far as it is known now."""
    held: list[str] = []
    kills = 0
    while True:
        begun = time.monotonic()
        child = start(material, folder)
        child.join(rng.uniform(0, usual_s * PATIENCE**kills))
        killed = child.exitcode is None
        if killed:
            child.kill()
            child.join()
        elif child.exitcode != 0:
            raise RuntimeError(f"the run in {folder} failed with exit {child.exitcode}")
        now = records(folder)
        lost = len(set(held) - set(now))
        held = now
        tally.num_lost += lost
        if not killed:
            tally.num_resumed += lost == 0 and kills > 0
            usual_s = usual_s if kills else time.monotonic() - begun  # the machine may have become faster or slower
            break
        tally.num_resumed += lost == 0 and kills > 0
        kills += 1
        tally.num_kills += 1
        tally.num_records += len(now)
        tally.held.append(len(now))
    tally.num_repeated += len(held) - len(set(held))
    tally.num_finished += 1
    return usual_s


def kill_often(root: Path, num_kills: int, seed: int = 0) -> Tally:
    """Kill until there were `num_kills` kills or more; every folder is worked on to its end."""
    material = write_material(root / "material")
    begun = time.monotonic()
    start(material, root / "undisturbed").join()
    usual_s, expected = time.monotonic() - begun, outcome(root / "undisturbed")
    tally, rng = Tally(), random.Random(seed)
    while tally.num_kills < num_kills:
        folder = root / f"run-{tally.num_finished}"
        usual_s = work_through(material, folder, tally, usual_s, rng)
        tally.num_identical += outcome(folder) == expected
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_often(Path(folder), asked.kills, asked.seed)
    figures = [
        Figure("golden", "resumed_count", float(tally.num_resumed), "count", n=tally.num_kills),
        Figure("golden", "identical_statistics_count", float(tally.num_identical), "count", n=tally.num_finished),
        Figure("golden", "lost_answers_count", float(tally.num_lost), "count", n=tally.num_records),
        Figure("golden", "repeated_answers_count", float(tally.num_repeated), "count", n=tally.num_records),
        Figure("golden", "kills_before_any_answer_count", float(tally.held.count(0)), "count", n=tally.num_kills),
    ]
    append(__file__, figures, ("torch", "transformers"))


if __name__ == "__main__":
    main()
