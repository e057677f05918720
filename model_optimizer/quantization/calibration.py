"""Turn calibration text into token sequences, and account for every record of it.

One part calibrates; a held-out part, picked by content hash, never does and serves KL and perplexity.
"""

import hashlib
import math
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from model_optimizer.artifacts.quantized import CalibrationReport
from model_optimizer.errors import ConfigError
from model_optimizer.models.tokenizer_files import TOKENIZER, has_chat_template
from model_optimizer.quantization.calibration_source import CalibrationSource as CalibrationSource
from model_optimizer.quantization.encoding import MARKUP, Encode, found_markup, template_markup, token_encoder
from model_optimizer.quantization.records import KNOWN, Record

USUAL_SAMPLES = (128, 512)
"""Outside this range a warning is given. Source: 128 of GPTQ (Frantar et al. 2022, section 4), 512 of llm-compressor."""

MIN_SAMPLES = 2
TEMPLATE_TOKENS = 256
"""More than a chat template puts around one message, a default system prompt included."""
SHOWN = 5
"""Places that a warning lists."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token sequences, `min_length` to `max_length` tokens each."""

    samples: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    report: CalibrationReport
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Tally:
    """What became of the records so far."""

    num_read: int = 0
    num_empty: int = 0
    num_short: int = 0
    num_duplicate: int = 0
    bad: list[str] = field(default_factory=list)
    twice_bos: list[str] = field(default_factory=list)
    rendered: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    """Content hashes of the samples that were longer than allowed."""


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How records become tokens here, and what is to be looked for in them."""

    encode: Encode
    markup: Sequence[str] = MARKUP
    bos: int | None = None
    plain_messages: bool = False
    """Messages are taken without template, for want of one."""


def prepare(source: CalibrationSource, tokenizer_directory: Path) -> Prepared:
    """Read, clean, tokenize and split calibration text; the same inputs give the same sequences.

    Raises:
        ConfigError: no record is usable, or the file is not UTF-8; the message says how many were lost to what.
    """
    encode, tokenizer = token_encoder(tokenizer_directory, plain_without_template=source.origin != "own")
    plain = tokenizer.chat_template is None
    return _prepare(source, _Encoding(encode, template_markup(tokenizer), tokenizer.bos_token_id, plain))


def prepare_without_model(source: CalibrationSource, encode: Encode) -> Prepared:
    """Do what `prepare` does with another encoder in the place of a model's tokenizer; nothing is cut to `max_length` tokens.

    Raises:
        ConfigError: as `prepare`.
    """
    return _prepare(source.model_copy(update={"max_length": sys.maxsize}), _Encoding(encode))


def texts(source: CalibrationSource) -> tuple[str, ...]:
    """Return the words of every readable record, for comparing with golden sets."""
    return tuple(record.content() for _, record in source.records() if isinstance(record, Record))


def check_calibration(source: CalibrationSource, tokenizer_directory: Path | None) -> tuple[str, ...]:
    """Return `texts(source)` where at least two different samples can be long enough: one calibrates, one is held out.

    Without a directory (a model that is still to be imported) a token is taken to have a byte at least. `prepare` decides later
    with the model's own tokenizer; this finds in a fraction of a second what could never pass, without transformers.

    Raises:
        ConfigError: says how many records were lost to what, and what is wrong with the first bad one.
    """
    records = list(source.records())
    bad = [f"{place}: {record}" for place, record in records if isinstance(record, str)]
    good = [record for _, record in records if isinstance(record, Record)]
    own_messages = source.origin == "own" and any(record.messages for record in good)
    if tokenizer_directory and own_messages and not has_chat_template(tokenizer_directory):
        raise ConfigError(
            f"calibration file {source.tree.path} has `messages`, but the model in {tokenizer_directory} has no chat template; "
            "give `text` instead"
        )
    different = {_normal(record): record for record in good}
    num_empty = sum(not record.content().strip() for record in good)
    different.pop("", None)
    num_tokens = _counter(tokenizer_directory)
    long_enough = islice((1 for record in different.values() if num_tokens(record) >= source.min_length), MIN_SAMPLES)
    if (num_usable := sum(long_enough)) < MIN_SAMPLES:
        raise ConfigError(
            f"calibration file {source.tree.path} has {num_usable} usable samples, at least {MIN_SAMPLES} different ones are "
            f"needed: read {len(records)}, empty {num_empty}, duplicates {len(good) - num_empty - len(different)}, shorter than "
            f"{source.min_length} tokens {len(different) - num_usable}, bad {len(bad)}{f' ({bad[0]})' if bad else ''}; "
            f"give records with {KNOWN}"
        )
    return tuple(record.content() for record in good)


def _counter(tokenizer_directory: Path | None) -> Callable[[Record], int]:
    """Return how many tokens a record has: counted with tokenizer.json where there is one, else the most that it can have.

    A chat template adds tokens of its own, so that of `messages` only the upper bound is asked.
    """

    def bound(record: Record) -> int:
        return len(record.content().encode()) + TEMPLATE_TOKENS * len(record.messages or ()) + 2

    if tokenizer_directory is None or not (tokenizer_directory / TOKENIZER).is_file():
        return bound
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_directory / TOKENIZER))
    return lambda record: bound(record) if record.messages else len(tokenizer.encode(record.text or "").ids)


def _prepare(source: CalibrationSource, encoding: _Encoding) -> Prepared:
    tally = _Tally()
    usable = _usable_sequences(source, encoding, tally)
    if not usable:
        raise ConfigError(
            f"no usable sample in {source.tree.path}: read {tally.num_read}, empty {tally.num_empty}, "
            f"shorter than {source.min_length} tokens {tally.num_short}, duplicates {tally.num_duplicate}, "
            f"bad {len(tally.bad)}{f' ({tally.bad[0]})' if tally.bad else ''}; give records with {KNOWN}"
        )
    held = _held_out(usable, source.held_out_ratio)
    rest = [digest for digest in usable if digest not in held]
    used = rest[: source.num_samples]
    samples = tuple(usable[digest] for digest in used)
    lengths = [len(tokens) for tokens in samples]
    report = CalibrationReport(
        num_requested=source.num_samples,
        num_read=tally.num_read,
        num_empty=tally.num_empty,
        num_short=tally.num_short,
        num_duplicate=tally.num_duplicate,
        num_bad=len(tally.bad),
        num_held_out=len(held),
        num_unused=len(rest) - len(samples),
        num_used=len(samples),
        num_tokens=sum(lengths),
        length_percentiles=_length_percentiles(lengths),
        length_histogram=length_histogram(lengths),
        num_cut=sum(digest in tally.cut for digest in used),
    )
    plain = encoding.plain_messages and source.origin != "own"
    return Prepared(
        samples, tuple(usable[digest] for digest in sorted(held)), report, _warnings(source, report, tally, plain=plain)
    )


def _usable_sequences(source: CalibrationSource, encoding: _Encoding, tally: _Tally) -> dict[str, tuple[int, ...]]:
    """Return content hash -> tokens in file order, and count what is left out."""
    usable: dict[str, tuple[int, ...]] = {}
    seen: set[bytes] = set()
    for place, record in source.records():
        tally.num_read += 1
        if isinstance(record, str):
            tally.bad.append(f"{place}: {record}")
            continue
        normal = _normal(record)
        copies = hashlib.sha256(normal.encode()).digest()
        if not normal:
            tally.num_empty += 1
        elif copies in seen:
            tally.num_duplicate += 1
        else:
            seen.add(copies)
            tokens = encoding.encode(record)
            if isinstance(tokens, str):
                tally.bad.append(f"{place}: {tokens}")
                continue
            if len(tokens) > 1 and tokens[0] == tokens[1] == encoding.bos:
                tally.twice_bos.append(place)
            if record.messages is None and found_markup(record, encoding.markup):
                tally.rendered.append(place)
            if len(tokens) < source.min_length:
                tally.num_short += 1
                continue
            digest = hashlib.sha256(" ".join(record.content().split()).encode()).hexdigest()
            usable[digest] = tokens[: source.max_length]
            if len(tokens) > source.max_length:
                tally.cut.add(digest)
    return usable


def _normal(record: Record) -> str:
    """Return what two copies of a text share whatever their white space, width and case."""
    return unicodedata.normalize("NFKC", " ".join(record.content().split())).casefold()


def _held_out(usable: dict[str, tuple[int, ...]], ratio: float) -> set[str]:
    """Return the hashes of the held-out share: the lowest ones; at least one, and never all."""
    count = min(len(usable) - 1, max(1, round(ratio * len(usable))))
    return set(sorted(usable)[:count])


def _length_percentiles(lengths: list[int]) -> dict[str, int]:
    """Return nearest-rank percentiles."""
    ordered = sorted(lengths)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in ranks.items()}


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Return how many lengths lie in each octave, from the shortest's to the longest's: `17-32` -> 5."""
    octaves = [(length - 1).bit_length() for length in lengths]
    return {
        f"{2 ** (octave - 1) + 1 if octave else 1}-{2**octave}": octaves.count(octave)
        for octave in range(min(octaves), max(octaves) + 1)
    }


def _warnings(source: CalibrationSource, report: CalibrationReport, tally: _Tally, *, plain: bool) -> tuple[str, ...]:
    found = []
    low, high = USUAL_SAMPLES
    if source.origin != "own":
        origin = "text that the model wrote itself" if source.origin == "self" else repr(source.name)
        found.append(
            f"calibration uses {origin}, no data of your own: damage is weighed on text that may be unlike your traffic; "
            "name a file of real requests in calibration.path"
        )
    if plain and source.origin == "builtin":
        found.append("the model has no chat template: built-in dialogues calibrate as plain text")
    if report.num_used < report.num_requested:
        found.append(
            f"calibration uses {report.num_used} samples, {report.num_requested} were asked for: read {report.num_read}, "
            f"empty {report.num_empty}, short {report.num_short}, duplicate {report.num_duplicate}, bad {report.num_bad}, "
            f"held out {report.num_held_out}"
        )
    if not low <= report.num_used <= high:
        found.append(f"calibration uses {report.num_used} samples; {low} to {high} are usual")
    if tally.bad:
        found.append(f"calibration records left out: {_some(tally.bad, '; ')}")
    if tally.twice_bos:
        found.append(f"calibration samples start with two BOS tokens: {_some(tally.twice_bos)}")
    if tally.rendered:
        found.append(f"calibration texts hold a chat template's marks and are taken as rendered: {_some(tally.rendered)}")
    if not report.num_held_out:
        found.append("one usable calibration sample only: nothing is held out, so KL cannot be measured")
    return tuple(found)


def _some(places: list[str], separator: str = ", ") -> str:
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return separator.join(places[:SHOWN]) + more
