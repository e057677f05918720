"""A golden set from somebody's file: columns are mapped by name, and what could mean two things is refused."""

import codecs
import csv
import hashlib
import io
import json
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import Metric
from model_optimizer.store import write_atomically
from model_optimizer.verification.golden import (
    CARD,
    CHOICES,
    ITEMS,
    Card,
    Generation,
    Item,
    Slice,
    gating_metric,
    load_golden_set,
)

ROLES: Mapping[str, tuple[str, ...]] = {
    "id": ("id",),
    "prompt": ("prompt", "question", "query", "instruction", "input"),
    "choices": ("choices", "options"),
    "answer": ("answer", "answer_index", "gold", "label"),
    "references": ("references", "reference", "answers", "answer", "target", "output", "summary", "label"),
    "slices": ("slices", "slice"),
    "cluster": ("cluster",),
}
"""Role of a column -> the names by which it is known."""
GATING_SLICES = ("hard", "long-tail", "long_tail")
"""Slices that guard on their own unless the card is changed."""
Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CardDraft:
    """What the importer cannot know: stated by whoever imports."""

    name: str
    licence: str
    provenance: str
    description: str = ""
    version: str = "1"
    languages: tuple[str, ...] = ("en",)
    metric: str | None = None
    """None: choice accuracy where there are choices."""
    guards: Mapping[str, float] = field(default_factory=dict)
    generation: Generation = Generation()
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How records become items."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Role -> column, where the names do not say it."""
    template: str | None = None
    """The prompt, with columns in braces; None: the prompt's column as it is."""
    first_answer: int | None = None
    """What the first choice is called where answers are numbers: 0 or 1."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A set that was written."""

    directory: Path
    num_items: int
    metric: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> column, as it was understood."""
    unused: tuple[str, ...] = ()
    """Columns that nothing reads."""


def import_file(path: Path, directory: Path, draft: CardDraft, reading: Reading) -> Imported:
    """Write a golden set from JSON lines, a JSON list or CSV into a new directory.

    Raises:
        ConfigError: the directory exists, a column is missing or could mean two things, or a record is no item (with its number).
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists; --to must name a new directory")
    records = read_records(path)
    names = tuple(dict.fromkeys(name for record in records for name in record))
    columns = _columns(names, reading, draft)
    first = _first_answer(records, columns, reading.first_answer) if "answer" in columns else 0
    items = []
    for number, record in enumerate(records, start=1):
        try:
            items.append(_item(f"{draft.name}-{number:05}", record, columns, (reading.template, first)))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path}, record {number}: {_fault(error)}") from error
    metric = write_golden_set(directory, draft, items, path.name)
    used = {*columns.values(), *_template_names(reading.template)}
    return Imported(directory, len(items), metric, columns, tuple(name for name in names if name not in used))


def write_golden_set(directory: Path, draft: CardDraft, items: Sequence[Item], source: str) -> str:
    """Write card and items into a new directory, read them back, and return the metric.

    Raises:
        ConfigError: no metric is stated and none follows, or the set cannot be read back; nothing is left then.
    """
    metric = draft.metric or (CHOICES if any(item.choices for item in items) else "")
    if not metric:
        raise ConfigError(
            "items without choices can be measured in many ways; say which with --metric, e.g. exact_match, token_f1"
        )
    lines = "".join(json.dumps(_fields(item), ensure_ascii=False) + "\n" for item in items).encode()
    try:
        card = Card(
            name=draft.name,
            version=draft.version,
            description=draft.description or f"Imported from {source}.",
            provenance=draft.provenance,
            licence=draft.licence,
            languages=draft.languages,
            metric=metric,
            guards=dict(draft.guards),
            generation=draft.generation,
            references=draft.references,
            items_sha256=hashlib.sha256(lines).hexdigest(),
            slices={name: Slice(gates=name in GATING_SLICES) for name in sorted({it for item in items for it in item.slices})},
        )
    except ValidationError as error:
        raise ConfigError(_fault(error)) from error
    place = directory.with_name(f".{directory.name}.partial")
    try:
        write_atomically(place / ITEMS, lines)
        stated = card.model_dump(mode="json", exclude_defaults=True) | {"metric": metric}
        write_atomically(place / CARD, yaml.safe_dump(stated, allow_unicode=True, sort_keys=False).encode())
        load_golden_set(place)
        place.rename(directory)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return metric


def read_records(path: Path) -> list[Record]:
    """Return the records of a JSONL, JSON or CSV file.

    Raises:
        ConfigError: it is missing, empty, of another kind, not UTF-8, or a line is no record (with its number).
    """
    if path.suffix not in (".jsonl", ".json", ".csv"):
        raise ConfigError(f"{path}: golden items are read from .jsonl, .json or .csv, or from lm-eval:TASK")
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8: {error}") from error
    records: Any
    if path.suffix == ".csv":
        records = [dict(row) for row in csv.DictReader(io.StringIO(text, newline=""))]
        if any(None in row or None in row.values() for row in records):
            raise ConfigError(f"{path}: a row has more or fewer values than the first line has names")
    elif path.suffix == ".json":
        records = _json(path, 0, text)
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        records = [_json(path, number, line) for number, line in lines]
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise ConfigError(f"{path} holds no records; allowed: JSON objects, one a line or in one list, or CSV with names on top")
    found: list[Record] = records
    return found


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number or error.lineno}: not JSON: {error.msg}") from error


def _columns(names: Sequence[str], reading: Reading, draft: CardDraft) -> dict[str, str]:
    """Return role -> column, from what is stated, else from the only column that is known by a name of the role."""
    for role, column in reading.fields.items():
        if role not in ROLES:
            raise ConfigError(f"--field {role}: no such role; allowed: {', '.join(ROLES)}")
        if column not in names:
            raise ConfigError(f"--field {role}={column}: no such column; there are: {', '.join(names)}")
    for column in _template_names(reading.template):
        if column not in names:
            raise ConfigError(f"--template names {{{column}}}; there are the columns: {', '.join(names)}")
    has_choices = "choices" in reading.fields or any(name in names for name in ROLES["choices"])
    unneeded = {"references"} if has_choices else {"choices", "answer"}
    if reading.template is not None:
        unneeded.add("prompt")
    found = {role: column for role, column in reading.fields.items() if role not in unneeded}
    for role, known in ROLES.items():
        here = [name for name in known if name in names and name not in found.values()]
        if role in found or role in unneeded or not here:
            continue
        if len(here) > 1:
            raise ConfigError(f"{' and '.join(here)} could each be the {role}; say which with --field {role}={here[0]}")
        found[role] = here[0]
    metric = gating_metric_named(draft.metric) if draft.metric else None
    needed = ["choices", "answer"] if has_choices else ["references"] if not draft.references and _needs(metric) else []
    if reading.template is None and not (metric and metric.from_predictions):
        needed.append("prompt")
    for role in needed:
        if role not in found:
            raise ConfigError(f"no column for {role} ({', '.join(ROLES[role])}) among {', '.join(names)}; --field {role}=COLUMN")
    return found


def _needs(metric: Metric[Any] | None) -> bool:
    return metric is None or metric.needs_reference


def gating_metric_named(name: str) -> Metric[Any]:
    """Return a metric that the user named.

    Raises:
        ConfigError: no golden set can be judged by it.
    """
    try:
        return gating_metric(name)
    except ValueError as error:
        raise ConfigError(f"--metric: {error}") from error


def _template_names(template: str | None) -> tuple[str, ...]:
    try:
        return tuple(name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None)
    except ValueError as error:
        raise ConfigError(f"--template {template!r}: {error}; columns stand in braces, a brace itself is doubled") from error


def _item(name: str, record: Record, columns: Mapping[str, str], how: tuple[str | None, int]) -> Item:
    """Return one record as an item; `how` is the prompt's template and what the first choice is called."""
    template, first = how
    stated = {role: record.get(column) for role, column in columns.items()}
    prompt = stated.get("prompt")
    if template is not None:
        prompt = "".join(
            text + ("" if column is None else _text(record.get(column), column))
            for text, column, _, _ in string.Formatter().parse(template)
        )
    choices = _choices(stated["choices"]) if "choices" in columns else ()
    return Item(
        id=str(stated.get("id") or name),
        prompt="" if prompt is None else _text(prompt, "prompt"),
        choices=tuple(_spaced(choice) for choice in choices),
        answer=_index(stated["answer"], choices, first) if choices else None,
        references=_references(stated.get("references")),
        slices=_list(stated.get("slices")),
        cluster=None if stated.get("cluster") is None else str(stated["cluster"]),
    )


def _references(value: object) -> tuple[str, ...]:
    """Return one or several references as texts; `{"text": [...]}`, as SQuAD has it, means its texts."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        value = value["text"]
    entries = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in entries)


def _text(value: object, column: str) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{column} is {type(value).__name__}, not text")
    return str(value)


def _list(value: object) -> tuple[str, ...]:
    """Return a list, or a text parted by `|`, as texts."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    parts = value if isinstance(value, list) else [] if value is None else str(value).split("|")
    return tuple(str(part).strip() for part in parts if str(part).strip())


def _choices(value: object) -> tuple[str, ...]:
    """Return choices from a list, from `{"text": [...]}`, or from a text parted by `|`."""
    return _list(value["text"] if isinstance(value, dict) and isinstance(value.get("text"), list) else value)


def _spaced(choice: str) -> str:
    """Return a choice as it continues a prompt: after a space in scripts that part words by one."""
    return f" {choice}" if choice[:1].isascii() else choice


def _first_answer(records: Sequence[Record], columns: Mapping[str, str], stated: int | None) -> int:
    """Return whether numbered answers count from 0 or from 1.

    Raises:
        ConfigError: the numbers leave it open.
    """
    if stated is not None:
        return stated
    numbers = [(number, record) for record in records if (number := _number(record.get(columns["answer"]))) is not None]
    if not numbers or any(number == 0 for number, _ in numbers):
        return 0
    if any(number == len(_choices(record.get(columns["choices"]))) for number, record in numbers):
        return 1
    least, most = min(number for number, _ in numbers), max(number for number, _ in numbers)
    raise ConfigError(
        f"{columns['answer']} holds {least} to {most}, which could count from 0 or from 1; say which with --first-answer"
    )


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def _index(value: object, choices: Sequence[str], first: int) -> int:
    """Return the index that a number, a letter or the choice's own text means; a text that is both is refused."""
    number, text = _number(value), str(value).strip()
    as_text = [at for at, choice in enumerate(choices) if choice == text]
    as_letter = ord(text) - ord("A") if len(text) == 1 and "A" <= text <= "Z" else None
    meant = {*as_text, *([number - first] if number is not None else []), *([as_letter] if as_letter is not None else [])}
    meant = {at for at in meant if 0 <= at < len(choices)}
    if len(meant) != 1:
        raise ConfigError(f"answer {value!r} means {'no' if not meant else 'more than one'} choice of {len(choices)}")
    return meant.pop()


def _fields(item: Item) -> dict[str, object]:
    return item.model_dump(mode="json", exclude_defaults=True)


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
