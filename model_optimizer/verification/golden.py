"""Golden sets: what one is, and how it is read and checked.

A set is a folder with `card.yaml` (what it is, how it is measured, who may gate) and `items.jsonl` (one item per line): a
prompt with choices, a prompt with references for what shall be written, or references alone for a file of predictions.
"""

import codecs
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Metric
from model_optimizer.paths import data_directory

CARD, ITEMS = "card.yaml", "items.jsonl"
FLOOR_ABOVE_CHANCE = 0.05
"""A baseline less than this above guessing has nothing to lose: the set cannot show a loss."""
CEILING_RATIO = 0.99
CHOICES = "choice_accuracy"
"""The metric whose items have choices; every other one reads what was written."""


class Slice(Frozen):
    """A named part of a set."""

    gates: bool = False
    """A guard: its REJECT counts, whatever the whole set says."""
    must_accept: bool = False
    """A gate of its own: whatever it says counts, so that it needs items enough to decide."""
    margin: float | None = Field(default=None, gt=0, lt=1)
    """May only tighten the set's."""
    description: str = ""


class Generation(Frozen):
    """How an answer is written: greedily, up to a stop."""

    max_new_tokens: int = Field(default=64, ge=1, le=8192)
    stop: tuple[str, ...] = ()
    """Strings that end an answer and are no part of it."""
    chat: bool = False
    """Whether the prompt is put into the model's chat template as a user's message."""


class Card(Frozen):
    """What a golden set is and how it counts."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]*$")
    version: str
    description: str
    provenance: str
    licence: str
    languages: tuple[str, ...] = Field(min_length=1)
    metric: str = CHOICES
    guards: dict[str, float] = {}
    """Other metrics of the same answers, e.g. repetition, with the loss that none of them may surely exceed."""
    generation: Generation = Generation()
    references: tuple[str, ...] = ()
    """Of every item that states none, e.g. the ids of a catalogue's long tail."""
    items_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of items.jsonl as it was when the card was signed off."""
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

    @model_validator(mode="after")
    def _measurable(self) -> Self:
        metric = gating_metric(self.metric)
        for name, margin in self.guards.items():
            guard = gating_metric(name)
            if name in (self.metric, CHOICES) or self.metric == CHOICES or guard.from_predictions != metric.from_predictions:
                raise ValueError(f"guards: {name} cannot be read from the answers that {self.metric} reads")
            if not 0 < margin < 1:
                raise ValueError(f"guards: the margin of {name} is {margin:g}; allowed: above 0 and below 1")
        return self


class Item(Frozen):
    """One question. With choices, the model is right when it finds `choices[answer]` the likeliest continuation of `prompt`."""

    id: str = Field(min_length=1)
    prompt: str = ""
    choices: tuple[str, ...] = ()
    answer: int | None = Field(default=None, ge=0)
    references: tuple[str, ...] = ()
    """What a right answer says, in one or several wordings; the facts that it must hold; or spans and boxes as JSON."""
    slices: tuple[str, ...] = ()
    cluster: str | None = None
    """Items from one source; they are not independent."""

    @field_validator("references", mode="before")
    @classmethod
    def _as_texts(cls, value: object) -> object:
        entries = value if isinstance(value, list | tuple) else [value]
        return tuple(entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in entries)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.choices:
            return self
        if self.answer is None:
            raise ValueError("answer: Field required: the index of the right choice")
        if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices) or "" in self.choices:
            raise ValueError("choices must be different and not empty, two or more")
        if self.answer >= len(self.choices):
            raise ValueError(f"answer {self.answer} is no index of {len(self.choices)} choices")
        return self

    @property
    def right_texts(self) -> tuple[str, ...]:
        """Return what gives the item away: the right choice, or the references."""
        return self.references if self.answer is None else (self.choices[self.answer],)


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """A checked set."""

    card: Card
    items: tuple[Item, ...]
    digest: str = ""
    """sha256 of items.jsonl."""

    @property
    def has_choices(self) -> bool:
        return self.card.metric == CHOICES

    @property
    def higher_is_better(self) -> bool:
        return gating_metric(self.card.metric).higher_is_better

    @property
    def from_predictions(self) -> bool:
        """Return whether no language model can answer it."""
        return gating_metric(self.card.metric).from_predictions

    @property
    def chance_ratio(self) -> float:
        """Return the expected accuracy of guessing; nobody guesses what has to be written."""
        return sum(1 / len(item.choices) for item in self.items if item.choices) / len(self.items)

    def references_of(self, item: Item) -> tuple[str, ...]:
        """Return an item's references, or the card's where it has none."""
        return item.references or self.card.references

    @property
    def floor_ratio(self) -> float:
        return self.chance_ratio + FLOOR_ABOVE_CHANCE if self.card.floor_ratio is None else self.card.floor_ratio

    @property
    def ceiling_ratio(self) -> float:
        return CEILING_RATIO if self.card.ceiling_ratio is None else self.card.ceiling_ratio


def gating_metric(name: str) -> Metric[Any]:
    """Return the metric of a golden set.

    Raises:
        ValueError: there is none of that name; the message lists them.
    """
    known = [it for it in METRICS.names() if METRICS.get(it).statistic is not None]
    if name not in known:
        raise ValueError(f"metric {name!r} judges no golden set; known: {', '.join(known)}")
    return METRICS.get(name)


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
        ConfigError: a missing file, a wrong card, items other than the card was written for, a wrong or repeated item
            (with its line), no items, an empty slice.
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
    digest = hashlib.sha256((directory / ITEMS).read_bytes()).hexdigest()
    if card.items_sha256 not in (None, digest):
        raise ConfigError(
            f"{directory / ITEMS} is not what {CARD} was written for: its sha256 is {digest}, the card's items_sha256 "
            f"{card.items_sha256}; bring the items back, or raise the card's version and state the new digest"
        )
    items = _read_items(directory / ITEMS, card)
    if not items:
        raise ConfigError(f"golden set {directory / ITEMS} has no items; give at least one")
    _check_slices(directory, card, items)
    return GoldenSet(card, items, digest)


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


def _read_items(path: Path, card: Card) -> tuple[Item, ...]:
    items: dict[str, Item] = {}
    metric = gating_metric(card.metric)
    checks = [gating_metric(name).check for name in (card.metric, *card.guards)]
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            item = Item.model_validate(json.loads(line.decode()))
            _check_item(item, card, metric)
            for check in checks:
                check(item.references or card.references)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}:{number}: not UTF-8") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}:{number}: {_first_fault(error)}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if item.id in items:
            raise ConfigError(f"{path}:{number}: id {item.id!r} was used before; every item needs its own")
        items[item.id] = item
    return tuple(items.values())


def _check_item(item: Item, card: Card, metric: Metric[Any]) -> None:
    """Refuse an item that lacks what the card's metric reads, or holds what it does not."""
    if not item.prompt and not metric.from_predictions:
        raise ConfigError("prompt: Field required, and not empty")
    if card.metric == CHOICES:
        if not item.choices:
            raise ConfigError(f"choices: Field required: {CHOICES} picks one of them")
        if item.references:
            raise ConfigError(f"references: {CHOICES} reads choices and answer; name another metric in {CARD}, or drop them")
        return
    if item.choices or item.answer is not None:
        raise ConfigError(f"choices and answer: {card.metric} reads references; set `metric: {CHOICES}` in {CARD}, or drop them")
    needs = metric.needs_reference or any(gating_metric(name).needs_reference for name in card.guards)
    if needs and not (item.references or card.references):
        raise ConfigError(f"references: Field required: {', '.join((card.metric, *card.guards))} compare with them")


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
