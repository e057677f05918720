"""A golden run outside a pipeline: scores of one engine, or the verdict over two, in a folder that a killed run goes on in."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import Embedder
from model_optimizer.store import canonical_json, write_atomically
from model_optimizer.verification.accuracy import golden_measures
from model_optimizer.verification.gates import combine
from model_optimizer.verification.golden import GoldenSet, Item, gating_metric
from model_optimizer.verification.golden_answers import ItemScore, Scores
from model_optimizer.verification.golden_import import read_records
from model_optimizer.verification.golden_statistics import score_interval
from model_optimizer.verification.judging import clusters_of, golden_statistic

IDENTITY, RESULT = "run.json", "result.json"
OUTPUT_NAMES = ("output", "prediction", "text")


class SetScore(Frozen):
    """What one engine reached on a set, a slice of it, or by another metric."""

    golden_set: str
    slice: str | None
    metric: str
    value: float
    interval: Interval | None
    """95 %, whole clusters drawn anew; None where the score belongs to these very items."""
    num_items: int


class SetFacts(Frozen):
    """Which items were asked."""

    name: str
    version: str
    items_sha256: str
    metric: str
    num_items: int
    is_sample: bool = False
    """Whether they are only some of the set's."""


class GoldenRun(Frozen):
    """The result of a golden run."""

    engine: str
    baseline: str | None
    sets: tuple[SetFacts, ...]
    scores: tuple[SetScore, ...]
    """Of the engine."""
    results: tuple[GoldenResult, ...] = ()
    """Against the baseline."""
    verdict: Verdict | None = None
    num_tokens_written: int = 0
    wall_s: float | None = None
    items_per_s: float | None = None
    """Answers per second with everything around them; None, as the time, where an earlier process had answered some."""
    notes: tuple[str, ...] = ()

    @property
    def statistics(self) -> bytes:
        """Return everything but times: the same for a run that was killed as for one that was not."""
        return canonical_json(self.model_copy(update={"wall_s": None, "items_per_s": None}))


class Identity(Frozen):
    """What a run's answers depend on, part by part."""

    parts: dict[str, str]

    @property
    def key(self) -> str:
        return hashlib.sha256(canonical_json(self)).hexdigest()


def claim_folder(folder: Path, identity: Identity) -> GoldenRun | None:
    """Make a folder this run's own and return the result where it is finished already.

    Raises:
        ConfigError: it holds another run; the message names what differs.
    """
    path = folder / IDENTITY
    if not path.exists():
        if folder.exists() and any(not held.name.startswith(".") for held in folder.iterdir()):  # else: killed while claiming
            raise ConfigError(f"{folder} holds something else than a golden run; --output must name a new directory")
        write_atomically(path, identity.model_dump_json(indent=1).encode())
        return None
    held = Identity.model_validate_json(path.read_bytes()).parts
    changed = sorted(name for name in held.keys() | identity.parts.keys() if held.get(name) != identity.parts.get(name))
    if changed:
        raise ConfigError(
            f"{folder} holds a golden run with another {', '.join(changed)}; undo the change to go on with it, or name a new "
            "directory with --output"
        )
    result = folder / RESULT
    return GoldenRun.model_validate_json(result.read_bytes()) if result.exists() else None


def take_items(golden: GoldenSet, limit: int | None, seed: int) -> GoldenSet:
    """Return the set with `limit` items drawn at random, in their order; slices that none is left of are dropped."""
    if limit is None or limit >= len(golden.items):
        return golden
    chosen = sorted(random.Random(seed).sample(range(len(golden.items)), limit))
    items = tuple(golden.items[at] for at in chosen)
    left = {name for item in items for name in item.slices}
    slices = {name: piece for name, piece in golden.card.slices.items() if name in left}
    return GoldenSet(golden.card.model_copy(update={"slices": slices}), items, golden.digest)


def score_sets(sets: Sequence[GoldenSet], scores: Scores, embed: Embedder | None = None) -> tuple[SetScore, ...]:
    """Return the score of every set, followed by its slices and its guards' metrics."""
    found = []
    for golden in sets:
        parts: list[tuple[str | None, Sequence[Item], str]] = [(None, golden.items, golden.card.metric)]
        for piece in golden.card.slices:
            parts.append((piece, tuple(item for item in golden.items if piece in item.slices), golden.card.metric))
        parts += [(None, golden.items, metric) for metric in golden.card.guards]
        for name, items, metric in parts:
            statistic = golden_statistic(golden, items, metric, scores, embed)
            interval = score_interval(statistic, clusters_of(golden, items)) if gating_metric(metric).resampled else None
            found.append(
                SetScore(
                    golden_set=golden.card.name,
                    slice=name,
                    metric=metric,
                    value=statistic.value,
                    interval=interval,
                    num_items=len(items),
                )
            )
    return tuple(found)


def run_verdict(results: Sequence[GoldenResult]) -> Verdict:
    """Return what all gates say together; INCONCLUSIVE where there is none."""
    return combine([measure.verdict for measure in golden_measures(results) if measure.verdict is not None])


def read_predictions(path: Path, golden: GoldenSet) -> dict[tuple[str, str], ItemScore]:
    """Return a file's answers to a set: records with the item's `id` and its `output`, text or JSON.

    Raises:
        ConfigError: an item has no answer or two, an answer no item, or the column is missing.
    """
    answers: dict[tuple[str, str], ItemScore] = {}
    known = {item.id for item in golden.items}
    name = golden.card.name
    if golden.has_choices:
        raise ConfigError(
            f"golden set {name!r} needs log-probabilities of its choices, which a file of predictions does not hold"
        )
    for number, record in enumerate(read_records(path), start=1):
        columns = [column for column in OUTPUT_NAMES if column in record]
        if "id" not in record or len(columns) != 1:
            raise ConfigError(f"{path}, record {number}: it must hold `id` and one of {', '.join(OUTPUT_NAMES)}")
        identity, output = str(record["id"]), record[columns[0]]
        if (name, identity) in answers:
            raise ConfigError(f"{path}, record {number}: a second answer to item {identity!r}")
        if identity not in known:
            raise ConfigError(f"{path}, record {number}: golden set {name!r} has no item {identity!r}")
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        answers[name, identity] = ItemScore(golden_set=name, item=identity, text=text)
    if missing := sorted(known - {item for _, item in answers}):
        raise ConfigError(f"{path} lacks an answer to {len(missing)} items of {name!r}, e.g. {missing[0]!r}")
    return answers
