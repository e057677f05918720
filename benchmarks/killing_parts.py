"""Soak, golden sets, scan and quantization, each in a forked child that is killed at random moments until it is done.

The child does real work on a tiny model with the engine's own functions. A record is a line of a journal, or a finished
layer of the quantization; none may be lost or made twice, and where the result is deterministic it equals that of an
undisturbed child.
"""

import hashlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.artifacts.base import Stage, Tree, tree_digest
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.journal import Journal
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import LogitsRuntime, Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, quantize
from model_optimizer.quantization.stage import PARTS as LAYERS
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.spec import Lengths, Traffic
from model_optimizer.store import Store, stage_key
from model_optimizer.strategy.damage import Damage, measure_damage, windows
from model_optimizer.strategy.race import Heat, Round, race
from model_optimizer.traffic.lengths import build_requests, sample_requests
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.golden import load_golden_set
from model_optimizer.verification.golden_answers import Shard
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.soak import Segment, Stress, run_soak
from tests.tiny import write_golden_set

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=4, max_model_len=128)
TRAFFIC = Traffic(prompt_tokens=Lengths(p50=8, p95=20, max=40), output_tokens=Lengths(p50=3, p95=6, max=8))
TEXT = tuple(range(4, 204)) * 4
SOAK = SoakConfig(duration=1.0, segment=0.1)
NUM_GOLDEN_ITEMS, NUM_ROUNDS, NUM_LAYERS = 240, 8, 8
PATIENCE = 1.2
"""Every kill in a folder makes the next child's longest time so much longer, lest a busy machine never lets one end."""
RESULT = "result.json"
SEEDS = (0, 1, 2)
"""Three models stand for three engines of a scan."""


def soak(material: Path, folder: Path) -> object:
    """Return the tokens of the canaries, and whether all of the stated time was tested."""
    stress = Stress(TRAFFIC, TEXT, concurrency=2, max_model_len=PLAN.max_model_len, seed=0)
    journal = Journal(folder / "soak.jsonl", "k", Segment)
    with _opened(material / "model-0") as runtime:
        found = run_soak(runtime, stress, SOAK, journal, Quiet())
    return [found.num_wrong_canaries, found.num_failed, found.ran_s >= SOAK.duration, journal.records[0].canaries[0]]


def golden(material: Path, folder: Path) -> object:
    """Return every item's scores."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model-0")
    sets = (load_golden_set(material / "words"),)
    with _opened(material / "model-0") as runtime:
        scores = score_items(runtime, sets, tokenizer, Journal(folder / "golden.jsonl", "k", Shard), Quiet())
    return sorted([*key, *score.log_probs] for key, score in scores.items())


def scan(material: Path, folder: Path) -> object:
    """Return what every engine lost, and which rounds were run."""
    engines = {f"model-{seed}": _opener(material / f"model-{seed}") for seed in SEEDS}
    damage_journal = Journal(folder / "damage.jsonl", "k", Damage)
    damage = measure_damage(engines, engines["model-0"], windows((TEXT,), 256, PLAN.max_model_len), damage_journal, Quiet())
    requests = build_requests(sample_requests(TRAFFIC, PLAN.max_model_len, 4, 0), TEXT, 0)
    rounds = race(engines, Heat(requests, 2, NUM_ROUNDS), Journal(folder / "rounds.jsonl", "k", Round), Quiet())
    lost = [[label, *row.kl_nats, row.num_flips] for label, row in sorted(damage.items())]
    return [lost, [[row.index, *sorted(row.decode_tok_per_s)] for row in rounds]]


def quantization(material: Path, folder: Path) -> object:
    """Return the digest of the checkpoint and of everything that is said about it."""
    store = Store(folder / "store")
    inputs = QuantizeInputs(
        fingerprint="test",
        model=Tree.of(material / "deep"),
        recipe=WeightRecipe(method="rtn", formats=("int4-g64", "int8-channel"), bits_budget=6),
        calibration=CalibrationSource.of(CalibrationConfig(path=material / "calibration.jsonl", num_samples=16), material),
        config=QuantizationConfig(kl_breaker_nats=1e9, sensitivity_sequences=4, sensitivity_tokens=64),
    )

    def make(workspace: Path) -> QuantizedModel:
        return quantize(inputs, workspace, store=store, progress=Quiet())

    made = store.produce(Stage.QUANTIZE, stage_key(inputs), QuantizedModel, make)
    said = hashlib.sha256(made.artifact.model_dump_json().encode()).hexdigest()
    return [tree_digest(made.directory / str(made.artifact.checkpoint)), said]


PARTS: dict[str, Callable[[Path, Path], object]] = {"soak": soak, "golden": golden, "scan": scan, "quantize": quantization}


@dataclass
class Tally:
    """What many kills did to one part."""

    num_kills: int = 0
    num_resumed: int = 0
    num_finished: int = 0
    num_records: int = 0
    """Records that lay on disk at a kill."""
    num_lost: int = 0
    num_repeated: int = 0
    num_different: int = 0


def kill_often(name: str, root: Path, num_kills: int, *, seed: int = 0) -> Tally:
    """Kill children of one part `num_kills` times at random moments; every folder is worked on until it is done."""
    material = _write_material(root / "material")
    start = time.monotonic()
    _child(name, material, root / "undisturbed").join()
    usual_s, expected = time.monotonic() - start, _result(root / "undisturbed")
    tally, rng, number = Tally(), random.Random(seed), 0
    while tally.num_kills < num_kills:
        folder, number = root / str(number), number + 1
        _work_through(name, material, folder, tally, lambda kills: rng.uniform(0, usual_s * PATIENCE**kills))
        tally.num_different += _result(folder) != expected
        tally.num_finished += 1
    return tally


def _work_through(name: str, material: Path, folder: Path, tally: Tally, patience: Callable[[int], float]) -> None:
    """Start children until one comes to its end; `patience` says how many seconds the next one gets, by kills so far."""
    held: tuple[str, ...] = ()
    kills, lost = 0, 0
    while True:
        child = _child(name, material, folder)
        child.join(patience(kills))
        killed = child.exitcode is None
        if killed:
            child.kill()
            child.join()
        elif child.exitcode != 0:
            raise RuntimeError(f"{name} in {folder} failed with exit {child.exitcode}")
        now = _records(folder)
        if not _assembled(folder):
            lost += len(set(held) - set(now))
        held = now
        if not killed:
            break
        kills += 1
        tally.num_records += len(now)
    tally.num_kills += kills
    tally.num_lost += lost
    made = list(_identities(held))
    tally.num_repeated += len(made) - len(set(made))
    tally.num_resumed += kills if lost == 0 else 0


def _child(name: str, material: Path, folder: Path) -> multiprocessing.process.BaseProcess:
    folder.mkdir(parents=True, exist_ok=True)
    child = multiprocessing.get_context("fork").Process(target=_work, args=(name, material, folder))
    child.start()
    return child


def _work(name: str, material: Path, folder: Path) -> None:
    result = PARTS[name](material, folder)
    (folder / RESULT).write_text(json.dumps(result))


def _result(folder: Path) -> str:
    return (folder / RESULT).read_text()


def _records(folder: Path) -> tuple[str, ...]:
    """Return what is finished: whole lines of journals behind their heads, and layers with the moment of their making."""
    found = []
    for journal in sorted(folder.glob("*.jsonl")):
        lines = journal.read_bytes().splitlines(keepends=True)[1:]
        found += [line.decode() for line in lines if line.endswith(b"\n")]
    layers = folder.glob(f"store/quantize/*/{LAYERS}/*.safetensors")
    return (*found, *(f"{path.name} {path.stat().st_mtime_ns}" for path in sorted(layers) if not path.name.startswith(".")))


def _assembled(folder: Path) -> bool:
    """Return whether the finished layers are in the checkpoint, after which they are removed."""
    return any(folder.glob(f"store/quantize/*/{CHECKPOINT}/model.safetensors"))


def _identities(records: tuple[str, ...]) -> Iterator[str]:
    """Yield what each record is about: items of a shard, label of an engine, number of a round, or the record itself."""
    for record in records:
        fields = json.loads(record) if record.startswith("{") else {}
        if "scores" in fields:
            yield from (score["item"] for score in fields["scores"])
        else:
            yield str(fields.get("label", fields.get("index", record)))


def _opener(model: Path) -> Callable[[], LogitsRuntime]:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    return lambda: RUNTIMES.get("torch").open(engine, model, PLAN)


@contextmanager
def _opened(model: Path) -> Iterator[LogitsRuntime]:
    with closing(_opener(model)()) as runtime:
        yield runtime


def _write_material(folder: Path) -> Path:
    """Write models, golden set and calibration text; one thread only, because threads do not survive a fork."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for seed in SEEDS:
        write_tiny_llama(folder / f"model-{seed}", seed=seed)
    write_tiny_llama(folder / "deep", num_layers=NUM_LAYERS)
    write_golden_set(folder / "words", folder / "model-0", num_items=NUM_GOLDEN_ITEMS, rng=random.Random(0))
    lines = [json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(24)]
    (folder / "calibration.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
