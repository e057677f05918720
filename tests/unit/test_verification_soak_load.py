"""What a soak keeps of its load does not grow with how many requests there were."""

import weakref

import numpy as np

from model_optimizer.measurement.load import LoadRecord
from model_optimizer.protocols import GenerationRequest
from model_optimizer.verification.soak_load import NUM_RESCORED, SegmentLoad


def phase(num: int, first: int = 0) -> tuple[list[GenerationRequest], LoadRecord]:
    """Return `num` requests of two tokens each; request i took i + 1 ms, the last failed."""
    ends = np.arange(1, num + 1, dtype=np.int64) * 1_000_000
    failed = np.zeros(num, dtype=bool)
    failed[-1], ends[-1] = True, -1
    record = LoadRecord(
        concurrency=1,
        submitted_ns=np.zeros(num, dtype=np.int64),
        first_token_ns=ends,
        finished_ns=ends,
        num_tokens=np.full(num, 2),
        offsets=np.arange(num + 1, dtype=np.int64) * 2,
        token_times_ns=np.zeros(2 * num, dtype=np.int64),
        tokens=np.arange(2 * num, dtype=np.int64) + first,
        log_probs=-np.arange(2 * num, dtype=np.float32),
        failed=failed,
    )
    return [GenerationRequest((first + at,), 2) for at in range(num)], record


def test_segment_load_sums_phases_and_keeps_few_of_their_requests() -> None:
    load = SegmentLoad()
    for first in (0, 1000):
        load.add(*phase(101, first))
    load.count(phase(3)[1])
    assert (load.num_requests, load.num_failed, load.num_tokens) == (205, 3, 410)
    assert load.end_to_end_ms() == 2 * tuple(float(at) for at in range(1, 101))
    some = load.some()
    assert len(some) == NUM_RESCORED
    assert [request.prompt[0] for request, _, _ in some] == [0, 50, 1000, 1050]
    assert some[1][1:] == ((100, 101), (-100.0, -101.0))


def test_segment_load_lets_go_of_the_requests_of_a_phase() -> None:
    load = SegmentLoad()
    requests, record = phase(400)
    held = [weakref.ref(record.tokens), weakref.ref(record.log_probs)]
    load.add(requests, record)
    del requests, record
    assert [reference() for reference in held] == [None, None]


def test_output_digest_tells_other_tokens() -> None:
    digests = set[str]()
    for first in (0, 0, 1):
        load = SegmentLoad()
        load.add(*phase(5, first))
        digests.add(load.output_digest)
    assert len(digests) == 2
