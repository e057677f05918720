"""Golden sets: read, check, and score one with a runtime.

A set is a folder with `card.yaml` (what it is, who may gate) and `items.jsonl` (one multiple-choice item per line).
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.paths import data_directory
from model_optimizer.protocols import Progress, Runtime, TokenBatch

CARD, ITEMS = "card.yaml", "items.jsonl"
FLOOR_ABOVE_CHANCE = 0.05
"""A baseline less than this above guessing has nothing to lose: the set cannot show a loss."""
CEILING_RATIO = 0.99
SHARD_TOKENS = 1280
"""Tokens scored between two journal records: a few seconds of a 135 M model on two cores, and one block of logits."""


class Slice(Frozen):
    """A named part of a set."""

    gates: bool = False
    description: str = ""


class Card(Frozen):
    """What a golden set is and how it counts."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]*$")
    version: str
    description: str
    provenance: str
    licence: str
    languages: tuple[str, ...] = Field(min_length=1)
    metric: Literal["choice_accuracy"] = "choice_accuracy"
    primary: bool = True
    """Part of the pre-registered gate; otherwise the set is only shown."""
    margin: float | None = Field(default=None, gt=0, lt=1)
    """May only tighten the profile's accuracy_loss_ratio."""
    floor_ratio: float | None = Field(default=None, ge=0, le=1)
    ceiling_ratio: float | None = Field(default=None, ge=0, le=1)
    slices: dict[str, Slice] = {}

    @field_validator("version", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) else value


class Item(Frozen):
    """One question; the model is right when it finds `choices[answer]` the most likely continuation of `prompt`."""

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int = Field(ge=0)
    slices: tuple[str, ...] = ()
    cluster: str | None = None
    """Items from one source; they are not independent."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.answer >= len(self.choices):
            raise ValueError(f"answer {self.answer} is no index of {len(self.choices)} choices")
        if len(set(self.choices)) < len(self.choices) or "" in self.choices:
            raise ValueError("choices must be different and not empty")
        return self


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """A checked set."""

    card: Card
    items: tuple[Item, ...]

    @property
    def chance_ratio(self) -> float:
        """Return the expected accuracy of guessing."""
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)

    @property
    def floor_ratio(self) -> float:
        return self.chance_ratio + FLOOR_ABOVE_CHANCE if self.card.floor_ratio is None else self.card.floor_ratio

    @property
    def ceiling_ratio(self) -> float:
        return CEILING_RATIO if self.card.ceiling_ratio is None else self.card.ceiling_ratio


class ItemScore(Frozen):
    """log p of every choice of one item, in nats."""

    golden_set: str
    item: str
    log_probs: tuple[float, ...]


class Shard(Frozen):
    """One journal record: the items scored together."""

    scores: tuple[ItemScore, ...]


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def find_golden_set(name: str, base: Path) -> Path:
    """Return the folder of a set: a path relative to `base` (the profile's folder), or a name below golden_sets/.

    Raises:
        ConfigError: neither exists.
    """
    for candidate in (base / name, data_directory("golden_sets") / name):
        if (candidate / CARD).is_file():
            return candidate
    known = sorted(path.parent.name for path in data_directory("golden_sets").glob(f"*/{CARD}"))
    raise ConfigError(f"golden set {name!r} has no {CARD} in {base / name}; known sets: {', '.join(known) or 'none'}")


def load_golden_set(directory: Path) -> GoldenSet:
    """Read and check a set.

    Raises:
        ConfigError: a missing file, a wrong card, a wrong or repeated item (with its line), no items, an empty slice.
    """
    for name in (CARD, ITEMS):
        if not (directory / name).is_file():
            raise ConfigError(f"golden set {directory} has no {name}; a set is a folder with {CARD} and {ITEMS}")
    try:
        card = Card.model_validate(yaml.safe_load((directory / CARD).read_text(encoding="utf-8-sig")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory / CARD} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError(f"{directory / CARD}: {_first_fault(error)}") from error
    items = _read_items(directory / ITEMS)
    if not items:
        raise ConfigError(f"golden set {directory / ITEMS} has no items; give at least one")
    _check_slices(directory, card, items)
    return GoldenSet(card, items)


def _check_slices(directory: Path, card: Card, items: tuple[Item, ...]) -> None:
    """Refuse a declared slice without items, and an item in a slice that the card does not declare: most likely misspelt."""
    for name in card.slices:
        if not any(name in item.slices for item in items):
            raise ConfigError(f"{directory / CARD}: slice {name!r} has no items; name it in the items' `slices` or drop it")
    for item in items:
        if card.slices and (unknown := [name for name in item.slices if name not in card.slices]):
            raise ConfigError(
                f"{directory / ITEMS}: item {item.id!r} is in slice {unknown[0]!r}, which {CARD} does not declare; "
                f"declared: {', '.join(card.slices)}"
            )


def _read_items(path: Path) -> tuple[Item, ...]:
    items: dict[str, Item] = {}
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            item = Item.model_validate(json.loads(line.decode()))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}:{number}: not UTF-8") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}:{number}: {_first_fault(error)}") from error
        if item.id in items:
            raise ConfigError(f"{path}:{number}: id {item.id!r} was used before; every item needs its own")
        items[item.id] = item
    return tuple(items.values())


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def score_items(
    runtime: Runtime, sets: Sequence[GoldenSet], tokenizer: Tokenizer, journal: Journal[Shard], progress: Progress
) -> dict[tuple[str, str], ItemScore]:
    """Return every item's scores by (set, item id), continuing where the journal ends.

    A choice is the tokens of its text put behind the tokens of the prompt, so that the border never moves; the prompt
    gets the special tokens that the tokenizer puts in front of plain text.
    """
    scores = {(score.golden_set, score.item): score for shard in journal.records for score in shard.scores}
    waiting = [
        (golden.card.name, item.id, _sequences(item, tokenizer))
        for golden in sets
        for item in golden.items
        if (golden.card.name, item.id) not in scores
    ]
    shards = list(_shards(waiting))
    for shard in progress.track(shards, f"golden sets on {runtime.facts.name}", len(shards)):
        record = Shard(scores=tuple(_score_shard(runtime, shard)))
        journal.append(record)
        scores.update({(score.golden_set, score.item): score for score in record.scores})
    return scores


_Sequence = tuple[tuple[int, ...], int]
"""Tokens and the position where the choice begins."""
_Waiting = tuple[str, str, tuple[_Sequence, ...]]


def _sequences(item: Item, tokenizer: Tokenizer) -> tuple[_Sequence, ...]:
    prompt = tuple(tokenizer.encode(item.prompt))
    if not prompt:
        raise ConfigError(f"golden item {item.id!r}: its prompt has no tokens, and a first token cannot be scored")
    return tuple(((*prompt, *tokenizer.encode(choice, add_special_tokens=False)), len(prompt)) for choice in item.choices)


def _shards(waiting: Sequence[_Waiting]) -> Iterable[tuple[_Waiting, ...]]:
    """Yield items of similar length whose padded tokens stay below SHARD_TOKENS together."""
    shard: list[_Waiting] = []
    num_sequences = 0
    for entry in sorted(waiting, key=_by_length):
        longest = max(len(tokens) for tokens, _ in entry[2])
        if shard and (num_sequences + len(entry[2])) * longest > SHARD_TOKENS:
            yield tuple(shard)
            shard, num_sequences = [], 0
        shard.append(entry)
        num_sequences += len(entry[2])
    if shard:
        yield tuple(shard)


def _by_length(entry: _Waiting) -> tuple[int, int, str, str]:
    """Order by longest sequence, then by prompt, so that neighbours need little padding and score the same positions."""
    return max(len(tokens) for tokens, _ in entry[2]), entry[2][0][1], entry[0], entry[1]


def _score_shard(runtime: Runtime, shard: Sequence[_Waiting]) -> Iterable[ItemScore]:
    sequences = [sequence for _, _, found in shard for sequence in found]
    batch = TokenBatch(tuple(tokens for tokens, _ in sequences), tuple(start for _, start in sequences))
    sums = iter([float(scored.log_probs.sum(dtype="float64")) for scored in runtime.score(batch)])
    for name, item, found in shard:
        yield ItemScore(golden_set=name, item=item, log_probs=tuple(next(sums) for _ in found))
