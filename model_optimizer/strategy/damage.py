"""The accuracy axis: KL and top-1 flips of every engine against the float32 torch reference on held-out text.

Engines are opened one at a time. The reference's logits lie in a file, so that memory holds one window of them.
Held-out text is what calibration never saw; golden sets are never used here.

Shape letters: W windows, T positions of a window, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.base import Frozen
from model_optimizer.journal import Journal
from model_optimizer.measurement.process import quiesced_rss_bytes
from model_optimizer.metrics.kl_divergence import kl_divergence_nats
from model_optimizer.metrics.top1_flips import top1_flips
from model_optimizer.protocols import LogitsRuntime, Progress

WINDOW_TOKENS = 256
MIN_WINDOW_TOKENS = 8
"""Shorter remainders say little and are left out."""
REFERENCE_FILE = "reference_logits.f32"

Window = tuple[int, ...]
Open = Callable[[], LogitsRuntime]


class Damage(Frozen):
    """What opening and scoring one engine showed; one journal record."""

    label: str
    kl_nats: tuple[float, ...]
    """Mean over the positions of each window [W]."""
    window_tokens: tuple[int, ...]
    """Positions of each window [W]."""
    num_flips: int
    weight_bytes: int
    """As the runtime reports them."""
    growth_bytes: int
    """Growth of the process by opening the engine, after collection; 0 where freed memory was used again."""
    open_s: float

    @property
    def num_tokens(self) -> int:
        return sum(self.window_tokens)

    @property
    def weighted_kl_nats(self) -> tuple[float, ...]:
        """Return each window's KL times its share of tokens x W, so that their plain mean is the mean over tokens."""
        scale = len(self.window_tokens) / self.num_tokens
        return tuple(kl * tokens * scale for kl, tokens in zip(self.kl_nats, self.window_tokens, strict=True))


def windows(documents: Sequence[Window], num_tokens: int, longest: int = WINDOW_TOKENS) -> tuple[Window, ...]:
    """Cut documents into windows of at most min(256, `longest`) tokens, `num_tokens` in all; none crosses a border."""
    length = min(WINDOW_TOKENS, longest)
    found: list[Window] = []
    left = num_tokens
    for document in documents:
        for start in range(0, len(document), length):
            window = document[start : start + min(length, left)]
            if len(window) >= MIN_WINDOW_TOKENS:
                found.append(window)
                left -= len(window)
    return tuple(found)


def measure_damage(
    engines: Mapping[str, Open], reference: Open, texts: Sequence[Window], journal: Journal[Damage], progress: Progress
) -> dict[str, Damage]:
    """Return what each engine's predictions lost, continuing after a kill where the journal ends.

    The reference's logits lie beside the journal until all engines are done.
    """
    missing = [label for label in engines if label not in {row.label for row in journal.records}]
    path = journal.path.with_name(REFERENCE_FILE)
    if missing and not path.exists():
        _write_reference(reference, texts, path, progress)
    for label in progress.track(missing, "KL of every engine"):
        journal.append(_damage(label, engines[label], texts, path))
    path.unlink(missing_ok=True)
    return {row.label: row for row in journal.records}


def _write_reference(open_reference: Open, texts: Sequence[Window], path: Path, progress: Progress) -> None:
    """Write the reference's logits window after window; the file's presence means that it is whole."""
    part = path.with_suffix(".part")
    runtime = open_reference()
    try:
        with part.open("wb") as stream:
            for text in progress.track(texts, "reference logits"):
                np.ascontiguousarray(runtime.logits(text), dtype=np.float32).tofile(stream)
    finally:
        runtime.close()
    part.replace(path)


def _reference_windows(path: Path, texts: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
    """Yield the reference's logits [T, V], one window in memory at a time."""
    vocab_size = path.stat().st_size // 4 // sum(len(text) for text in texts)
    with path.open("rb") as stream:
        for text in texts:
            yield np.fromfile(stream, dtype=np.float32, count=len(text) * vocab_size).reshape(len(text), vocab_size)


def _damage(label: str, open_engine: Open, texts: Sequence[Window], reference: Path) -> Damage:
    before, start = quiesced_rss_bytes(), time.monotonic()
    runtime = open_engine()
    open_s, growth = time.monotonic() - start, quiesced_rss_bytes() - before
    kl_W: list[float] = []
    num_flips = 0
    try:
        for text, reference_TV in zip(texts, _reference_windows(reference, texts), strict=True):
            candidate_TV = runtime.logits(text)
            kl_W.append(float(kl_divergence_nats(reference_TV, candidate_TV).mean()))
            num_flips += int(top1_flips(reference_TV, candidate_TV).sum())
        weight_bytes = runtime.memory().weight_bytes
    finally:
        runtime.close()
    return Damage(
        label=label,
        kl_nats=tuple(kl_W),
        window_tokens=tuple(len(text) for text in texts),
        num_flips=num_flips,
        weight_bytes=weight_bytes,
        growth_bytes=max(0, growth),
        open_s=open_s,
    )
