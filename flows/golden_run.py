"""`model-optimizer eval`, without its words: opens engines, has golden sets answered and judged."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flows.bootstrap import home
from model_optimizer.artifacts.base import Tree
from model_optimizer.code_version import code_version
from model_optimizer.errors import ConfigError
from model_optimizer.hardware.fingerprint import fingerprint
from model_optimizer.journal import Journal
from model_optimizer.metrics.embedding_similarity import LocalEmbedder
from model_optimizer.models.resolve import resolve_model
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.options import TUNABLES
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.serving.config import KvConfig, ServeConfig
from model_optimizer.serving.source import Source, read_source
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store, write_atomically
from model_optimizer.verification.golden import GoldenSet, find_golden_set, load_golden_set
from model_optimizer.verification.golden_answers import ItemScore, Shard, Tokenizer
from model_optimizer.verification.golden_generation import read_prompts
from model_optimizer.verification.golden_review import PairedAnswer, paired_answers, read_answers_file, write_answers_file
from model_optimizer.verification.golden_run import (
    RESULT,
    GoldenRun,
    Identity,
    SetFacts,
    claim_folder,
    read_predictions,
    run_verdict,
    score_sets,
    take_items,
)
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.golden_statistics import Rule
from model_optimizer.verification.judging import judge_sets

CPU_BATCH, CUDA_BATCH = 8, 128
"""Answers that are written at once where nothing is stated."""
LONGEST_CHOICE_PROMPT = 2048
"""Tokens of a prompt with a choice that fit where nothing is stated; they are not reserved."""
ARMS = ("candidate", "baseline")
ANSWERS = "answers.json"
"""Both engines' answers as text, for replay and review."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines are opened."""

    dtype: str = "float32"
    max_batch: int | None = None
    max_model_len: int | None = None
    """None: as long as the longest item needs."""
    allow_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What is to be answered by whom, and how it is judged."""

    model: str | None
    against: str | None
    golden: tuple[str, ...]
    predictions: tuple[Path | None, Path | None] = (None, None)
    """Files of answers in place of the engine's and the baseline's."""
    rule: Rule = Rule(margin=0.003, alpha=0.05, power=0.8)
    limit: int | None = None
    seed: int = 0
    embedder: Path | None = None
    output: Path | None = None
    engine: EngineOptions = EngineOptions()


@dataclass(frozen=True, slots=True)
class Arm:
    """A model that answers: where it lies, and what it is."""

    name: str
    place: Path
    digest: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished run."""

    folder: Path
    run: GoldenRun


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Both engines' answers of a finished run."""

    names: tuple[str, str]
    """The baseline's and the candidate's."""
    answers: tuple[PairedAnswer, ...]


def evaluate(request: EvalRequest, progress: Progress) -> Evaluation:
    """Answer golden sets, go on where a killed run stopped, and judge them; a finished run is only read.

    Raises:
        ConfigError: a set, a model or a file of predictions is wrong, or the folder holds another run.
        UnsupportedError: an engine cannot be opened here.
    """
    start = time.monotonic()
    sets = tuple(
        take_items(load_golden_set(find_golden_set(name, Path.cwd())), request.limit, request.seed) for name in request.golden
    )
    _check(request, sets)
    arms = tuple(find_arm(ref, progress) for ref in (request.model, request.against) if ref is not None)
    identity = _identity(request, sets, arms)
    folder = request.output or home() / "eval" / f"{sets[0].card.name}-{identity.key[:12]}"
    finished = claim_folder(folder, identity)
    if finished is None:
        answered = any((folder / f"{arm}.jsonl").exists() for arm in ARMS)
        scores = _answers(request, sets, arms, (folder, identity.key), progress)
        finished = _judge(request, sets, arms, scores, None if answered else start)
        if len(scores) > 1:
            embed = _embedder(request, arms)
            paired = [it for golden in sets for it in paired_answers(golden, scores[1], scores[0], embed)]
            write_answers_file(folder / ANSWERS, paired)
        write_atomically(folder / RESULT, finished.model_dump_json(indent=1).encode())
    return Evaluation(folder, finished)


def _check(request: EvalRequest, sets: Sequence[GoldenSet]) -> None:
    names = [golden.card.name for golden in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--golden: two sets are called {twice[0]!r}; name each once")
    from_file, baseline = request.predictions
    if (request.model is None) == (from_file is None):
        raise ConfigError("give the MODEL that answers, or --predictions FILE with answers, not both")
    if from_file and (len(sets) != 1 or request.limit):
        raise ConfigError("--predictions answers exactly one golden set, whole; leave --limit out and name one --golden")
    if (request.model and baseline) or (from_file and request.against):
        raise ConfigError("compare a model with --against MODEL, and predictions with --baseline-predictions FILE")


def find_arm(ref: str, progress: Progress) -> Arm:
    """Find a model: a bundle, a deployment root or a directory as it is, everything else resolved."""
    place = Path(ref).expanduser()
    if not place.is_dir():
        place = resolve_model(ModelRef(ref=ref), Path.cwd(), Store(home() / "store"), progress).tree.path
    return Arm(ref, place.resolve(), Tree.of(place.resolve()).digest)


def _identity(request: EvalRequest, sets: Sequence[GoldenSet], arms: Sequence[Arm]) -> Identity:
    parts = {
        "version of this program": code_version("verification"),
        "rule": str(request.rule),
        "seed (--seed)": str(request.seed),
    }
    parts |= {"number of items (--limit)": str(request.limit), "engine options": str(request.engine)}
    if arms:
        parts["machine or library versions"] = fingerprint()
    for role, arm in zip(("model", "baseline model"), arms, strict=False):
        parts[role] = arm.digest
    for role, path in zip(("predictions", "baseline predictions"), request.predictions, strict=True):
        if path is not None:
            if not path.is_file():
                raise ConfigError(f"{path}: no such file of {role}")
            parts[role] = Tree.of(path).digest
    if request.embedder is not None:
        parts["embedder"] = Tree.of(request.embedder).digest
    for golden in sets:
        card = Identity(parts={"card": golden.card.model_dump_json(), "items": golden.digest})
        parts[f"golden set {golden.card.name}"] = card.key
    return Identity(parts=parts)


def _answers(
    request: EvalRequest, sets: Sequence[GoldenSet], arms: Sequence[Arm], journal: tuple[Path, str], progress: Progress
) -> tuple[dict[tuple[str, str], ItemScore], ...]:
    if not arms:
        return tuple(read_predictions(path, sets[0]) for path in request.predictions if path is not None)
    folder, key = journal
    found = []
    for name, arm in zip(ARMS, arms, strict=False):
        held = Journal(folder / f"{name}.jsonl", key, Shard)
        if sum(len(shard.scores) for shard in held.records) == sum(len(golden.items) for golden in sets):
            found.append({(score.golden_set, score.item): score for shard in held.records for score in shard.scores})
            continue
        with opened(arm, sets, request.engine) as (runtime, tokenizer):
            found.append(score_items(runtime, sets, tokenizer, held, progress))
    return tuple(found)


@contextmanager
def opened(arm: Arm, sets: Sequence[GoldenSet], options: EngineOptions) -> Iterator[tuple[LogitsRuntime, Tokenizer]]:
    """Open a model with a cache that fits the items."""
    import torch
    from transformers import AutoTokenizer

    wanted = ServeConfig(
        native=_native(options),
        allow_unsigned=options.allow_unsigned,
        kv=KvConfig(
            max_batch=options.max_batch or (CUDA_BATCH if torch.cuda.is_available() else CPU_BATCH),
            max_model_len=options.max_model_len or LONGEST_CHOICE_PROMPT,
        ),
    )
    source = read_source(arm.place, wanted)
    tokenizer = cast("Tokenizer", AutoTokenizer.from_pretrained(source.model, local_files_only=True))
    if options.max_model_len is None and (needed := _needed_tokens(sets, tokenizer)):
        longer = wanted.kv.model_copy(update={"max_model_len": needed})
        source = read_source(arm.place, wanted.model_copy(update={"kv": longer}))
    runtime = open_source(source, wanted)
    try:
        yield runtime, tokenizer
    finally:
        runtime.close()


def _native(options: EngineOptions) -> NativeOptions | None:
    """Return options of the native runtime where some are needed; a runtime that covers every model takes none."""
    return NativeOptions(dtype=options.dtype, max_prefill_tokens=8192, max_prefills=256) if options.dtype != "float32" else None


def _needed_tokens(sets: Sequence[GoldenSet], tokenizer: Tokenizer) -> int:
    """Return how long the longest answer with its prompt may become; choices, which are scored, only bound it below."""
    written = [golden for golden in sets if not golden.has_choices]
    lengths = [len(prompt.tokens) + prompt.generation.max_new_tokens for prompt in read_prompts(written, tokenizer, 1 << 30)]
    return max(lengths, default=0) if len(written) == len(sets) else max(LONGEST_CHOICE_PROMPT, *lengths, 0)


def open_source(source: Source, wanted: ServeConfig) -> LogitsRuntime:
    """Open what `read_source` found, with the options that were stated."""
    factory = RUNTIMES.get(source.engine.runtime)
    if wanted.options.stated:
        factory = TUNABLES.get(source.engine.runtime).tuned(wanted.options)
    return factory.open(source.engine, source.engine_directory, source.kv)


def _judge(
    request: EvalRequest,
    sets: Sequence[GoldenSet],
    arms: Sequence[Arm],
    scores: Sequence[dict[tuple[str, str], ItemScore]],
    start: float | None,
) -> GoldenRun:
    """Return scores and, with a baseline, the verdict; `start` is None where an earlier process answered some items."""
    embed = _embedder(request, arms)
    wall_s = None if start is None else time.monotonic() - start
    num_items = sum(len(found) for found in scores)
    results = judge_sets(sets, scores[1], scores[0], request.rule, embed) if len(scores) > 1 else ()
    names = [*(arm.name for arm in arms), *(path.name for path in request.predictions if path is not None)]
    return GoldenRun(
        engine=names[0],
        baseline=names[1] if len(names) > 1 else None,
        sets=tuple(_facts(golden, request) for golden in sets),
        scores=score_sets(sets, scores[0], embed),
        results=results,
        verdict=run_verdict(results) if results else None,
        num_tokens_written=sum(score.num_tokens for found in scores for score in found.values()),
        wall_s=wall_s,
        items_per_s=num_items / wall_s if wall_s and arms else None,
    )


def _embedder(request: EvalRequest, arms: Sequence[Arm]) -> LocalEmbedder | None:
    """Return what tells meanings: the model that was named, else the baseline, else the engine itself."""
    place = request.embedder or (arms[-1].place if arms else None)
    if place is None:
        return None
    return LocalEmbedder(place / "model" if (place / "model" / "config.json").is_file() else place)


def read_finished(folder: Path) -> FinishedRun:
    """Return what both engines of a finished run answered.

    Raises:
        ConfigError: the folder holds no finished run, or one without a baseline.
    """
    if not (folder / RESULT).is_file():
        raise ConfigError(f"{folder} holds no finished golden run; `model-optimizer eval` says where it keeps one")
    run = GoldenRun.model_validate_json((folder / RESULT).read_bytes())
    if run.baseline is None or not (folder / ANSWERS).is_file():
        raise ConfigError(f"{folder} holds the answers of one engine alone; repeat `eval` with --against BASELINE")
    return FinishedRun((run.baseline, run.engine), read_answers_file(folder / ANSWERS))


def _facts(golden: GoldenSet, request: EvalRequest) -> SetFacts:
    return SetFacts(
        name=golden.card.name,
        version=golden.card.version,
        items_sha256=golden.digest,
        metric=golden.card.metric,
        num_items=len(golden.items),
        is_sample=request.limit is not None,
    )
