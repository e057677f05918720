"""How a run shows its progress: bars in a terminal, plain lines elsewhere, a progress artifact in Prefect."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast
from uuid import UUID

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

LINE_EVERY_S = 5.0
"""Plain progress prints a line at most this often."""
ARTIFACT_EVERY_S = 5.0
PLAIN_WIDTH = 140


def terminal() -> Console:
    """Return the console for people: stderr, wide enough for a table where there is no real terminal."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=PLAIN_WIDTH)


class TerminalProgress:
    """Bars on a terminal; where there is none, one line per `LINE_EVERY_S` seconds."""

    def __init__(self, console: Console):
        self._console = console
        self._started = time.monotonic()

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        length = total if total is not None else _length(items)
        yield from self._bars(items, label, length) if self._console.is_terminal else self._lines(items, label, length)

    def note(self, message: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started:6.0f} s[/dim]  {message}", highlight=False, soft_wrap=True)

    def _bars(self, items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
        columns = (
            TextColumn("         {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            for item in items:
                yield item
                bars.advance(task)

    def _lines(self, items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
        last = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            if time.monotonic() - last > LINE_EVERY_S:
                last = time.monotonic()
                self.note(f"{label}: {done}{f'/{total}' if total else ''}")


class PrefectProgress:
    """Passes everything on to `inner` and mirrors it as a progress artifact of the current task run."""

    def __init__(self, inner: TerminalProgress):
        self._inner = inner

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        length = total if total is not None else _length(items)
        artifact, last = None, time.monotonic()
        for done, item in enumerate(self._inner.track(items, label, length), start=1):
            yield item
            if length and time.monotonic() - last > ARTIFACT_EVERY_S:
                last, share = time.monotonic(), 100 * done / length
                if artifact is None:
                    artifact = cast(UUID, create_progress_artifact(share, description=label))
                else:
                    update_progress_artifact(artifact, share)
        if artifact is not None:
            update_progress_artifact(artifact, 100.0)

    def note(self, message: str) -> None:
        self._inner.note(message)


def _length(items: Iterable[T]) -> int | None:
    return len(items) if isinstance(items, (list, tuple, range, dict)) else None
