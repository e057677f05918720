"""A YAML file whose faults are told as `file:line: field: what is wrong; seen: value`."""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from model_optimizer.errors import ConfigError

_TOLD = ("missing", "extra_forbidden")
"""Kinds of errors whose message says everything; the value seen would be noise."""


@dataclass(frozen=True, slots=True)
class YamlFile:
    """What a file holds, and where in it."""

    path: Path
    data: dict[str, object]
    node: yaml.Node | None

    def fault(self, error: ValidationError, model: type[BaseModel]) -> ConfigError:
        """Return the first fault in one line."""
        first, more = error.errors()[0], error.error_count() - 1
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            allowed = _allowed(model, first["loc"][:-1])
            close = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
            message = f"unknown field; {f'did you mean {close[0]!r}? ' if close else ''}allowed: {', '.join(allowed)}"
        seen = "" if first["type"] in _TOLD else f"; seen: {first['input']!r}"
        rest = f" (and {more} more)" if more else ""
        field = ".".join(str(part) for part in first["loc"])
        return ConfigError(f"{self.path}:{_line(self.node, first['loc'])}: {field}: {message}{seen}{rest}")


def read_yaml(path: Path) -> YamlFile:
    """Return a file that maps names to values; an empty one maps none.

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
        raise ConfigError(f"{path}:1: it must map names to values, e.g. `kv: {{max_batch: 8}}`; seen: {data!r}")
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
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return list(model.model_fields)


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Return the line of the deepest part of `location` that the document holds."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            return line
        pair = next(((key, value) for key, value in node.value if key.value == part), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
