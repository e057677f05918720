"""What a calibration file holds, row by row: the registry of file kinds, and how text is decoded.

A reader knows a file's syntax and nothing of what its fields mean.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.registry import Registry

Row = Mapping[str, object]
"""Field -> value, as JSON knows them; an absent value is None or no key."""
Rows = Iterator[tuple[str, Row | str]]
"""Where each row stands (`line 7`), and the row or what is wrong with it."""
Reader = Callable[[Path], Rows]

READERS: Registry[Reader] = Registry("kind of calibration file", "model_optimizer.quantization.readers")
"""By file name suffix, without the dot."""


def reader_name(path: Path) -> str:
    """Return the name of the reader for a file.

    Raises:
        ConfigError: no reader has this suffix; the message lists the known ones.
    """
    name = path.suffix.removeprefix(".").lower()
    if name not in READERS.names():
        known = ", ".join(f".{known}" for known in READERS.names())
        raise ConfigError(f"calibration file {path} has the suffix {path.suffix!r}; known: {known}; rename or convert it")
    return name


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) of a UTF-8 file; a byte-order mark and line ends are dropped, U+2028 is no line end.

    Raises:
        ConfigError: a byte is not UTF-8; the message says where.
    """
    position = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            try:
                yield number, line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                at = position + len(raw) - len(line) + error.start
                raise ConfigError(f"{path} is not UTF-8 (byte {at}); convert it") from error
            position += len(raw)
