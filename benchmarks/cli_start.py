"""How long `--help` and `--version` take: median of 25 starts each, interleaved, with the 95 % interval of the median."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.evidence import Figure, append
from model_optimizer.measurement.percentiles import quantile

ROUNDS = 25


def main() -> None:
    command = str(Path(sys.executable).with_name("model-optimizer"))
    walls: dict[str, list[float]] = {"--help": [], "--version": []}
    for _ in range(ROUNDS):
        for option, times in walls.items():
            start = time.perf_counter()
            subprocess.run([command, option], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    figures = []
    for option, times in walls.items():
        median = quantile(np.array(times), 0.5)
        name = f"{option.removeprefix('--')}_wall_s"
        figures.append(Figure("ours", name, median.value, "s", median.lower, median.upper, ROUNDS))
    append(__file__, figures, ("typer",))


if __name__ == "__main__":
    main()
