"""Runs that are killed: start `model-optimizer run`, kill -9 its whole process group inside a stage, and look at what is left."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from flows.bootstrap import HOME
from model_optimizer.artifacts.base import Stage
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.release.stage import JOURNAL
from model_optimizer.store import ARTIFACT
from tests.tiny import write_project

NAME = "tiny"
PINNED = (
    "scan.runtimes=[onnxruntime]",
    "scan.max_kl_nats=20",
    "compile.parity_kl_nats=5",
    "quantization.kl_breaker_nats=100",
    "sla.accuracy_loss_ratio=0.9",
)
"""One quantized candidate whose score (0.6) is far from the unquantized one's (0.2), so that no noise turns the choice."""
FINISHED = (0, 3, 5)
"""Exit codes of a run that came to its end: accepted, rejected, not decided."""
POLL_S = 0.001

Condition = Callable[[Path], bool]
"""Takes the run's folder; true while the moment to kill is there."""


def write_pinned_project(folder: Path) -> Path:
    """Write a random model of 2.6 million parameters and a profile for it; return the profile's path."""
    model = write_tiny_llama(folder / "model", num_layers=4, hidden_size=256, intermediate_size=512)
    return write_project(folder / "project", model)


class Runs:
    """Runs of one profile, one after another, all forked from one process."""

    def __init__(self, profile: Path, environment: Mapping[str, str], overrides: tuple[str, ...] = PINNED):
        self._arguments = ["run", str(profile), "--json", *(word for it in overrides for word in ("--set", it))]
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nursery"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.communicate()

    def complete(self, folder: Path) -> dict[str, Any]:
        """Run to the end in `folder`; return the outcome."""
        self._start(folder)
        status = self._status()
        if status not in FINISHED:
            raise RuntimeError(f"a run in {folder} ended with exit {status}: {(folder / 'log.txt').read_text()[-2000:]}")
        outcome: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return outcome

    def killed(self, folder: Path, moment: Condition, delay_s: float = 0.0) -> bool:
        """Run in `folder` and kill the process group `delay_s` after `moment` came; return whether it was still that moment."""
        pid = self._start(folder)
        while not (ended := _ended(pid)) and not moment(folder):
            time.sleep(POLL_S)
        if not ended:
            time.sleep(delay_s)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return self._status() == -signal.SIGKILL and moment(folder)

    def _start(self, folder: Path) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        assert self._nursery.stdin is not None
        print(json.dumps({"arguments": self._arguments, "folder": str(folder)}), file=self._nursery.stdin, flush=True)
        return self._status()

    def _status(self) -> int:
        assert self._nursery.stdout is not None
        return int(self._nursery.stdout.readline())


def _ended(pid: int) -> bool:
    """Return whether a run ended; the nursery has then collected it, so its number is free again."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def inside(stage: Stage) -> Condition:
    """Return the condition that an entry of `stage` is being made; the scan counts from its own measuring on."""
    return lambda folder: any(stage is not Stage.SCAN or (entry / "damage.jsonl").exists() for entry in unfinished(folder, stage))


def staged(folder: Path) -> bool:
    """Return whether the release is complete in its staging place and not public."""
    return any((entry / JOURNAL).exists() for entry in unfinished(folder, Stage.PACKAGE)) and not _bundle(folder).exists()


def published(folder: Path) -> bool:
    """Return whether the release is public and the store does not know of it."""
    return _bundle(folder).exists() and bool(unfinished(folder, Stage.PACKAGE))


def _bundle(folder: Path) -> Path:
    return folder / HOME / "bundles" / f"{NAME}-v1"


def entries(folder: Path, stage: Stage) -> list[Path]:
    """Return the directories of a stage's store entries."""
    root = folder / HOME / "store" / stage
    return [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()] if root.is_dir() else []


def unfinished(folder: Path, stage: Stage) -> list[Path]:
    """Return the entries that somebody began and nobody finished."""
    return [entry for entry in entries(folder, stage) if not (entry / ARTIFACT).exists()]


def finished(folder: Path) -> dict[tuple[str, str], str]:
    """Return when every finished entry was begun, by stage and key."""
    found = {}
    for stage in Stage:
        for entry in entries(folder, stage):
            if (entry / ARTIFACT).exists():
                found[stage.value, entry.name] = json.loads((entry / ARTIFACT).read_bytes())["produced"]["started_at"]
    return found


def differing_files(left: Path, right: Path) -> set[str]:
    """Return the relative paths of files that two folders do not have in common byte by byte."""
    one, other = _digests(left), _digests(right)
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def _digests(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a run's folder as it is."""
    return Path(shutil.copytree(source, target))


def forget(folder: Path, stage: Stage) -> None:
    """Remove a stage's entries; for package also its bundle, so that there is something to publish."""
    shutil.rmtree(folder / HOME / "store" / stage)
    if stage is Stage.PACKAGE:
        for path in (folder / HOME / "bundles").glob(f"{NAME}-v1*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
