"""What a segment keeps of its load: sums and a few requests, so that memory does not follow how many requests there were."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from model_optimizer.measurement.load import LoadRecord
from model_optimizer.protocols import GenerationRequest

T = TypeVar("T")

NUM_RESCORED = 4
"""Requests of each segment whose tokens are scored anew."""
Generated = tuple[GenerationRequest, tuple[int, ...], tuple[float, ...]]
"""A finished request with its tokens and their log-probabilities in nats."""


class SegmentLoad:
    """Takes the phases of one segment; each may be dropped afterwards."""

    def __init__(self) -> None:
        self.num_requests = self.num_failed = self.num_tokens = 0
        self._end_to_end_ms: list[NDArray[np.float64]] = []
        self._digest = hashlib.sha256()
        self._kept: list[Generated] = []

    def count(self, record: LoadRecord) -> None:
        """Count requests that are neither timed nor scored, e.g. of the reference workload."""
        self.num_requests += record.num_requests
        self.num_failed += record.num_failed
        self.num_tokens += record.token_times_ns.size

    def add(self, requests: Sequence[GenerationRequest], record: LoadRecord) -> None:
        """Take one phase: count it, and keep latencies and a few of its requests."""
        self.count(record)
        self._digest.update(record.tokens.tobytes())
        self._end_to_end_ms.append(record.end_to_end_ms())
        done = [at for at in range(record.num_requests) if not record.failed[at]]
        for at in _spread(done):
            log_probs = record.log_probs[record.offsets[at] : record.offsets[at + 1]].tolist()
            self._kept.append((requests[at], record.tokens_of(at), tuple(log_probs)))

    @property
    def output_digest(self) -> str:
        """Return the hash of all tokens that the phases produced."""
        return self._digest.hexdigest()

    def some(self) -> list[Generated]:
        """Return a few of the finished requests, spread over all phases."""
        return _spread(self._kept)

    def end_to_end_ms(self) -> tuple[float, ...]:
        """Return the latency of every request that finished."""
        return tuple(round(float(value), 3) for phase in self._end_to_end_ms for value in phase)


def _spread(values: list[T]) -> list[T]:
    return values[:: max(1, len(values) // NUM_RESCORED)][:NUM_RESCORED]
