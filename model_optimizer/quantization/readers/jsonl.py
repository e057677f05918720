"""JSON lines: one object per line."""

import json
from pathlib import Path

from model_optimizer.quantization.reading import READERS, Row, Rows, text_lines


@READERS.register("jsonl")
@READERS.register("ndjson")
def read_json_lines(path: Path) -> Rows:
    """Yield every line that is not blank."""
    return ((f"line {number}", _parse(line)) for number, line in text_lines(path) if line.strip())


def _parse(line: str) -> Row | str:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg})"
    except RecursionError:
        return "not JSON that can be read (nested too deeply)"
    return data if isinstance(data, dict) else "not a JSON object"
