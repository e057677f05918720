"""Bodies of requests that look like the stated traffic, built before a run so that sending costs nothing but sending."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.token_count import TextCounter
from model_optimizer.paths import data_directory
from model_optimizer.traffic.lengths import RequestShape

CHARACTERS_PER_TOKEN = 4
"""Where no tokenizer is given. Source: English text under byte-pair vocabularies of 32k to 150k entries; the server's usage
record tells the true count."""
MAX_BYTES = 1 << 30
TEXT_SET = "general.jsonl"


@dataclass(frozen=True, slots=True)
class RequestForm:
    """How every request of a run is written."""

    model: str
    chat: bool
    stream: bool
    extra: Mapping[str, object]
    """Further fields, e.g. `ignore_eos`; they win over ours."""

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """Return one JSON object."""
        asked: dict[str, object] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": self.stream}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        return json.dumps({**asked, **self.extra}).encode()


def build_bodies(
    form: RequestForm, shapes: Sequence[RequestShape], text: str, seed: int, counter: TextCounter | None
) -> list[bytes]:
    """Return one body per shape; prompts are cut from seeded places of `text`, so that few begin alike.

    Raises:
        ConfigError: no text, or more than `MAX_BYTES` of it.
    """
    total = sum(shape.prompt_tokens for shape in shapes) * CHARACTERS_PER_TOKEN
    if not text.strip() or total > MAX_BYTES:
        raise ConfigError(
            f"prompts are cut from text, {MAX_BYTES >> 20} MiB at most; seen: {len(text)} characters, {total >> 20} MiB"
        )
    edges = _edges(text, counter)
    starts = np.random.default_rng(seed).integers(0, len(edges) - 1, size=len(shapes)).tolist()
    return [
        form.body(_cut(text, edges, start, shape.prompt_tokens), shape.output_tokens)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def default_text() -> str:
    """Return the text that ships with the project."""
    lines = (data_directory("calibration_sets") / TEXT_SET).read_text(encoding="utf-8").splitlines()
    texts = [str(json.loads(line)["text"]) for line in lines if line.strip()]
    return "\n\n".join(text for text in texts if text.isascii())


def tokenizer_counter(directory: Path) -> TextCounter:
    """Return a counter by the tokenizer.json of a model's directory (or that file itself).

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json" if directory.is_dir() else directory
    if not path.is_file():
        raise ConfigError(f"no tokenizer at {path}; give a model's directory with tokenizer.json, or leave --tokenizer out")
    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_truncation()

    def ends(text: str) -> Sequence[int]:
        # a token that holds a part of a character ends where that character ends: the ends must rise
        return list(accumulate((end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets), max))

    return ends


def _edges(text: str, counter: TextCounter | None) -> Sequence[int]:
    """Return where tokens begin and end in the text, 0 first."""
    if counter is None:
        return range(0, len(text) + 1, CHARACTERS_PER_TOKEN) if len(text) >= CHARACTERS_PER_TOKEN else (0, len(text))
    return [0, *counter(text)]


def _cut(text: str, edges: Sequence[int], start: int, num_tokens: int) -> str:
    """Return so many tokens of text from `start` on, beginning again at its end."""
    parts, num_edges = list[str](), len(edges) - 1
    while num_tokens > 0:
        stop = min(start + num_tokens, num_edges)
        parts.append(text[edges[start] : edges[stop]])
        num_tokens -= stop - start
        start = 0
    return "".join(parts)
