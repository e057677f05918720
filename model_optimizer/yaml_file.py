"""A YAML file whose faults are told as `file:line: field: what is wrong; seen: value`. Profiles and serve.yaml are read by it."""

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from model_optimizer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class YamlFile:
    """What a file holds, and where in it."""

    path: Path
    data: dict[str, object]
    node: yaml.Node | None

    def line(self, location: tuple[int | str, ...]) -> int:
        """Return the line of the deepest part of `location` that the file holds."""
        return _line(self.node, location)

    def fault(self, error: ValidationError, model: type[BaseModel], whole: str) -> ConfigError:
        """Return the first fault in one line; `whole` names the document where no field of it is at fault."""
        first, more = error.errors()[0], error.error_count() - 1
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "this field is required"
        elif first["type"] == "extra_forbidden":
            allowed = _allowed(model, first["loc"][:-1])
            close = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
            message = f"unknown field; {f'did you mean {close[0]!r}? ' if close else ''}allowed: {', '.join(allowed)}"
        told = first["type"] in ("missing", "extra_forbidden") or (
            first["type"] == "value_error" and isinstance(first["input"], dict)  # then the message names what it is about
        )
        seen = "" if told else f"; seen: {first['input']!r}"
        rest = f" (and {more} more)" if more else ""
        field = ".".join(str(part) for part in first["loc"]) or whole
        return ConfigError(f"{self.path}:{_line(self.node, first['loc'])}: {field}: {message}{seen}{rest}")


def read_yaml(path: Path, expected: str) -> YamlFile:
    """Return a file that maps names to values; an empty one maps none. `expected` says what it must be, where it is neither.

    Raises:
        ConfigError: it is not there, is no YAML, states something twice, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    _refuse_twice(path, node)
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}:1: {expected}; seen: {data!r}")
    return YamlFile(path, {str(key): value for key, value in (data or {}).items()}, node)


def _refuse_twice(path: Path, node: yaml.Node | None) -> None:
    """Refuse a key that occurs twice in one section; YAML readers keep the last one silently."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if str(key.value) in seen:
            raise ConfigError(f"{path}:{line}: {key.value}: stated twice (first in line {seen[str(key.value)]}); keep one")
        seen[str(key.value)] = line
        _refuse_twice(path, value)


def _allowed(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section at `location`."""
    for part in location:
        field = model.model_fields.get(str(part))
        model = model if field is None else next(_sections(field.annotation), model)
    return list(model.model_fields)


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield what a field may be that has fields of its own: itself, or a member of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _sections(member)


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Return the line of the deepest part of `location` that the document holds."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
