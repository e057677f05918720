"""How long `--help` and `--version` take: median of 15 starts each, interleaved."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.evidence import Figure, append

ROUNDS = 15


def main() -> None:
    command = str(Path(sys.executable).with_name("model-optimizer"))
    walls: dict[str, list[float]] = {"--help": [], "--version": []}
    for _ in range(ROUNDS):
        for option, times in walls.items():
            start = time.perf_counter()
            subprocess.run([command, option], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    figures = [
        Figure("ours", f"{option.removeprefix('--')}_wall_s", statistics.median(times), "s", min(times), max(times), ROUNDS)
        for option, times in walls.items()
    ]
    append(__file__, figures, ("typer",))


if __name__ == "__main__":
    main()
