"""Turn a calibration file into token sequences, and account for every record of it.

One part calibrates; a held-out part, picked by content hash, never does and serves KL and perplexity.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from model_optimizer.artifacts.base import Frozen, Tree
from model_optimizer.artifacts.quantized import CalibrationReport
from model_optimizer.errors import ConfigError
from model_optimizer.models.tokenizer_files import TOKENIZER, has_chat_template
from model_optimizer.quantization.config import CalibrationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL_SAMPLES = (128, 512)
"""Outside this range a warning is given. Source: 128 of GPTQ (Frantar et al. 2022, section 4), 512 of llm-compressor."""

MIN_SAMPLES = 2
TEMPLATE_TOKENS = 256
"""More than a chat template puts around one message, a default system prompt included."""


class CalibrationSource(Frozen):
    """A calibration file and how it is to be read: the part of a stage's identity that calibration makes up."""

    tree: Tree
    num_samples: int
    max_length: int
    min_length: int
    held_out_ratio: float

    @classmethod
    def of(cls, config: CalibrationConfig, base: Path) -> Self:
        """Digest the file that `config` names, relative to `base`.

        Raises:
            ConfigError: there is no such file.
        """
        path = base / config.path.expanduser()
        if path.is_dir():
            raise ConfigError(f"calibration file {path} is a folder; name the JSONL file in it")
        if not path.is_file():
            raise ConfigError(f"calibration file {path} does not exist; give a JSONL file with `text` or `messages` per line")
        settings = config.model_dump(exclude={"path"})
        return cls(tree=Tree.of(path), **settings)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token sequences, `min_length` to `max_length` tokens each."""

    samples: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    report: CalibrationReport
    warnings: tuple[str, ...]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    role: str
    content: str


class _Record(BaseModel):
    """One line: `text`, or `messages` for the chat template; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    text: str | None = None
    messages: list[_Message] | None = None

    def content(self) -> str:
        """Return the words alone, without template."""
        if self.messages is not None:
            return "\n".join(message.content for message in self.messages)
        return self.text or ""


@dataclass(slots=True)
class _Tally:
    """What became of the records so far."""

    num_read: int = 0
    num_empty: int = 0
    num_short: int = 0
    num_duplicate: int = 0
    bad_lines: list[str] = field(default_factory=list)
    twice_bos_lines: list[int] = field(default_factory=list)


def prepare(source: CalibrationSource, tokenizer_directory: Path) -> Prepared:
    """Read, clean, tokenize and split a calibration file; the same inputs give the same sequences.

    Raises:
        ConfigError: no record is usable, or the file is not UTF-8; the message says how many were lost to what.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tally = _Tally()
    usable = _usable_sequences(source, tokenizer, tally)
    if not usable:
        raise ConfigError(
            f"no usable sample in {source.tree.path}: read {tally.num_read}, empty {tally.num_empty}, "
            f"shorter than {source.min_length} tokens {tally.num_short}, duplicates {tally.num_duplicate}, "
            f"bad {len(tally.bad_lines)}{f' ({tally.bad_lines[0]})' if tally.bad_lines else ''}; "
            "give JSONL with `text` or `messages` per line"
        )
    held = _held_out(usable, source.held_out_ratio)
    rest = [tokens for digest, tokens in usable.items() if digest not in held]
    samples = tuple(rest[: source.num_samples])
    report = CalibrationReport(
        num_requested=source.num_samples,
        num_read=tally.num_read,
        num_empty=tally.num_empty,
        num_short=tally.num_short,
        num_duplicate=tally.num_duplicate,
        num_bad=len(tally.bad_lines),
        num_held_out=len(held),
        num_unused=len(rest) - len(samples),
        num_used=len(samples),
        num_tokens=sum(map(len, samples)),
        length_percentiles=_length_percentiles([len(tokens) for tokens in samples]),
    )
    return Prepared(samples, tuple(usable[digest] for digest in sorted(held)), report, _warnings(report, tally))


def texts(source: CalibrationSource) -> tuple[str, ...]:
    """Return the words of every readable record, for comparing with golden sets."""
    records = (_parse(line) for _, line in _lines(source.tree.path))
    return tuple(record.content() for record in records if isinstance(record, _Record))


def check_calibration(source: CalibrationSource, tokenizer_directory: Path | None) -> tuple[str, ...]:
    """Return `texts(source)` where at least two different samples can be long enough: one calibrates, one is held out.

    Without a directory (a model that is still to be imported) a token is taken to have a byte at least. `prepare` decides later
    with the model's own tokenizer; this finds in a fraction of a second what could never pass, without transformers.

    Raises:
        ConfigError: says how many records were lost to what, and what is wrong with the first bad one.
    """
    records = [(number, _parse(line)) for number, line in _lines(source.tree.path)]
    bad = [f"line {number}: {record}" for number, record in records if isinstance(record, str)]
    good = [record for _, record in records if isinstance(record, _Record)]
    if tokenizer_directory and any(record.messages for record in good) and not has_chat_template(tokenizer_directory):
        raise ConfigError(
            f"calibration file {source.tree.path} has `messages`, but the model in {tokenizer_directory} has no chat template; "
            "give `text` instead"
        )
    different = {" ".join(record.content().split()): record for record in good}
    num_empty = sum(not record.content().strip() for record in good)
    different.pop("", None)
    num_tokens = _counter(tokenizer_directory)
    long_enough = islice((1 for record in different.values() if num_tokens(record) >= source.min_length), MIN_SAMPLES)
    if (num_usable := sum(long_enough)) < MIN_SAMPLES:
        raise ConfigError(
            f"calibration file {source.tree.path} has {num_usable} usable samples, at least {MIN_SAMPLES} different ones are "
            f"needed: read {len(records)}, empty {num_empty}, duplicates {len(good) - num_empty - len(different)}, shorter than "
            f"{source.min_length} tokens {len(different) - num_usable}, bad {len(bad)}{f' ({bad[0]})' if bad else ''}; "
            "give JSONL with `text` or `messages` per line"
        )
    return tuple(record.content() for record in good)


def _counter(tokenizer_directory: Path | None) -> Callable[[_Record], int]:
    """Return how many tokens a record has: counted with tokenizer.json where there is one, else the most that it can have.

    A chat template adds tokens of its own, so that of `messages` only the upper bound is asked.
    """

    def bound(record: _Record) -> int:
        return len(record.content().encode()) + TEMPLATE_TOKENS * len(record.messages or ()) + 2

    if tokenizer_directory is None or not (tokenizer_directory / TOKENIZER).is_file():
        return bound
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_directory / TOKENIZER))
    return lambda record: bound(record) if record.messages else len(tokenizer.encode(record.text or "").ids)


def _usable_sequences(
    source: CalibrationSource, tokenizer: "PreTrainedTokenizerBase", tally: _Tally
) -> dict[str, tuple[int, ...]]:
    """Return content hash -> tokens in file order, and count what is left out."""
    usable: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    for number, line in _lines(source.tree.path):
        tally.num_read += 1
        record = _parse(line)
        if isinstance(record, str):
            tally.bad_lines.append(f"line {number}: {record}")
            continue
        normal = " ".join(record.content().split())
        digest = hashlib.sha256(normal.encode()).hexdigest()
        if not normal:
            tally.num_empty += 1
        elif digest in seen:
            tally.num_duplicate += 1
        else:
            tokens = _tokenize(record, tokenizer)
            if len(tokens) > 1 and tokens[0] == tokens[1] == tokenizer.bos_token_id:
                tally.twice_bos_lines.append(number)
            if len(tokens) < source.min_length:
                tally.num_short += 1
            else:
                usable[digest] = tuple(tokens[: source.max_length])
        seen.add(digest)
    return usable


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return (line number, content) of every line that is not blank; a byte-order mark and CR are dropped."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error
    return [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]


def _parse(line: str) -> _Record | str:
    """Return the record, or what is wrong with it."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg})"
    if not isinstance(data, dict):
        return "not a JSON object"
    try:
        record = _Record.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if (record.text is None) == (record.messages is None):
        return "needs exactly one of `text` and `messages`"
    return record


def _tokenize(record: _Record, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return token ids; the chat template brings its own special tokens, so that none is added twice.

    Raises:
        ConfigError: `messages` without a chat template.
    """
    if record.messages is None:
        return list(tokenizer(record.text or "")["input_ids"])
    if tokenizer.chat_template is None:
        raise ConfigError("the calibration file has `messages` but the model has no chat template; give `text` instead")
    rendered = tokenizer.apply_chat_template([message.model_dump() for message in record.messages], tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _held_out(usable: dict[str, tuple[int, ...]], ratio: float) -> set[str]:
    """Return the hashes of the held-out share: the lowest ones; at least one, and never all."""
    count = min(len(usable) - 1, max(1, round(ratio * len(usable))))
    return set(sorted(usable)[:count])


def _length_percentiles(lengths: list[int]) -> dict[str, int]:
    """Return nearest-rank percentiles."""
    ordered = sorted(lengths)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in ranks.items()}


def _warnings(report: CalibrationReport, tally: _Tally) -> tuple[str, ...]:
    found = []
    low, high = USUAL_SAMPLES
    if report.num_used < report.num_requested:
        found.append(
            f"calibration uses {report.num_used} samples, {report.num_requested} were asked for: read {report.num_read}, "
            f"empty {report.num_empty}, short {report.num_short}, duplicate {report.num_duplicate}, bad {report.num_bad}, "
            f"held out {report.num_held_out}"
        )
    if not low <= report.num_used <= high:
        found.append(f"calibration uses {report.num_used} samples; {low} to {high} are usual")
    if tally.bad_lines:
        more = f" and {len(tally.bad_lines) - 5} more" if len(tally.bad_lines) > 5 else ""
        found.append(f"calibration records left out: {'; '.join(tally.bad_lines[:5])}{more}")
    if tally.twice_bos_lines:
        found.append(f"calibration samples start with two BOS tokens: lines {', '.join(map(str, tally.twice_bos_lines[:5]))}")
    if not report.num_held_out:
        found.append("one usable calibration sample only: nothing is held out, so KL cannot be measured")
    return tuple(found)
