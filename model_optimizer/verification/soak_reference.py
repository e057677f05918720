"""The fixed reference workload: the same prompts in the same batch, again and again, hashed to the bit.

Its batch never changes its shape, so on one machine an engine that computes the same gives the same bits. Its time, on the
wall and of the CPU, next to that of a twin process at the same moment, tells an engine that became slow from a machine that did.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_optimizer.measurement.load import LoadRecord, run_closed_loop
from model_optimizer.protocols import GenerationRequest, Runtime


@dataclass(frozen=True, slots=True)
class Reference:
    """One run of the workload."""

    tokens: tuple[tuple[int, ...], ...]
    digest: str
    wall_s: float
    cpu_s: float
    """Of all threads of this process; a busy machine stretches the wall time and hardly this."""
    record: LoadRecord


def run_reference(runtime: Runtime, requests: Sequence[GenerationRequest]) -> Reference:
    """Run all requests at once."""
    start_s = time.process_time()
    record = run_closed_loop(runtime, requests, len(requests))
    cpu_s = time.process_time() - start_s
    return Reference(
        tokens=tuple(record.tokens_of(index) for index in range(len(requests))),
        digest=digest_of(record),
        wall_s=record.wall_s(),
        cpu_s=cpu_s,
        record=record,
    )


def digest_of(record: LoadRecord) -> str:
    """Return the sha256 of every request's tokens and of the bits of their log-probabilities."""
    digest = hashlib.sha256(np.ascontiguousarray(record.offsets).tobytes())
    digest.update(np.ascontiguousarray(record.tokens).tobytes())
    digest.update(np.ascontiguousarray(record.log_probs).tobytes())
    return digest.hexdigest()
