"""Structured answers: JSON lists in a reference, which must be right, or in what a model wrote, which may be anything."""

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from model_optimizer.errors import ConfigError

T = TypeVar("T")


def read_references(references: tuple[str, ...], entry: TypeAdapter[list[T]], what: str) -> list[T]:
    """Return the entries of all references; each is one entry or a list of them.

    Raises:
        ConfigError: one cannot be read; `what` says how an entry looks.
    """
    return [found for reference in references for found in _read_strictly(reference, entry, what)]


def _read_strictly(text: str, entry: TypeAdapter[list[T]], what: str) -> list[T]:
    try:
        data = json.loads(text)
        return entry.validate_python(data if isinstance(data, list) else [data])
    except (json.JSONDecodeError, ValidationError) as error:
        fault = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.msg
        raise ConfigError(f"reference {text[:80]!r} is unreadable ({fault}); allowed: {what}, or a list of such") from error


def read_output(output: str, entry: TypeAdapter[list[T]]) -> list[T]:
    """Return the entries of the first JSON list in an output; none where there is no readable one: a wrong answer, no error."""
    decoder = json.JSONDecoder()
    at = output.find("[")
    while at >= 0:
        try:
            return entry.validate_python(decoder.raw_decode(output, at)[0])
        except (json.JSONDecodeError, ValidationError):
            at = output.find("[", at + 1)
    return []
