"""One JSON array of objects; JSON lines under this suffix are read as such."""

import json
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.readers.jsonl import read_json_lines
from model_optimizer.quantization.reading import READERS, Rows, text_lines


@READERS.register("json")
def read_json_array(path: Path) -> Rows:
    """Yield the array's entries.

    Raises:
        ConfigError: neither an array nor lines of objects.
    """
    content = "\n".join(line for _, line in text_lines(path))
    if content.lstrip().startswith("{") and _is_object(content.lstrip().split("\n", 1)[0]):
        yield from read_json_lines(path)
        return
    try:
        data = json.loads(content or "[]")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON (line {error.lineno}: {error.msg}); give an array of objects") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; give an array of objects") from error
    if not isinstance(data, list):
        raise ConfigError(f"{path} holds {type(data).__name__}, not an array; give an array of objects, or JSONL")
    for number, entry in enumerate(data, start=1):
        yield f"entry {number}", entry if isinstance(entry, dict) else "not a JSON object"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (json.JSONDecodeError, RecursionError):
        return False
