"""`model-optimizer soak` refuses what cannot be soaked before anything is started or written."""

from pathlib import Path

import pytest
from entry import Command


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("absent",), 2, "holds nothing to serve"),
        (("MODEL", "--duration", "soon"), 2, "--duration 'soon' is no time; write e.g. 90s, 30min or 24h"),
        (("MODEL", "--profile", "25h"), 2, "known: 24h, 24h-accelerated, 72h"),
        (("MODEL", "--concurrency", "0"), 2, "--concurrency is 0; 1 to 1024 is allowed"),
        (("MODEL", "--requests-per-minute", "0"), 2, "requests"),
    ],
)
def test_soak_says_what_is_wrong(
    command: Command, tiny_llama: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    given = [str(tiny_llama) if argument == "MODEL" else argument for argument in arguments]
    ended = command("soak", *given, cwd=tmp_path)
    assert ended.code == code and says in ended.err and len(ended.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
