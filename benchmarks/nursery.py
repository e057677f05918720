"""Starts `model-optimizer` many times for the price of one: libraries are imported once, every run is a fork of that process.

A run is a process of its own, in a session and group of its own, and ends as an interpreter ends; only the imports are
shared. Lines on stdin are JSON, `{"arguments": [...], "folder": "..."}`; the answers are the run's process id and, later,
its exit status.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Fork a run for every line of stdin."""
    import flows.optimize
    from flows.cli.main import main as model_optimizer

    assert flows.optimize.optimize
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            _move_into(Path(order["folder"]))
            sys.argv = ["model-optimizer", *order["arguments"]]
            model_optimizer()
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _move_into(folder: Path) -> None:
    """Leave the parent's session and streams for the run's own."""
    os.setsid()
    os.chdir(folder)
    out = os.open("out.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (out, 1), (log, 2)):
        os.dup2(descriptor, place)


if __name__ == "__main__":
    main()
