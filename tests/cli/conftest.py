"""The command in this process: the same entry as a user's, without seconds of imports for each call."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from entry import Command, Ended

from flows.cli.main import main

LOGGERS = ("model_optimizer", "tasks", "flows")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Return `call(*arguments, cwd=folder)`; what `main` changes would end with its process and is taken back."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    handlers, environment = [list(logger.handlers) for logger in loggers], dict(os.environ)

    def call(*arguments: str, cwd: Path) -> Ended:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["model-optimizer", *arguments])
        capsys.readouterr()  # what fixtures printed
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ended(ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err)

    yield call
    for logger, before in zip(loggers, handlers, strict=True):
        logger.handlers = before
    os.environ.clear()
    os.environ.update(environment)
