"""Raw samples of a load run: derived latencies, goodput, and the file."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.measurement.samples import LoadSamples, RequestStatus, ServiceLevel, join

MS = 1_000_000


def ns(*times_ms: float) -> np.ndarray:
    return np.array([-1 if time == -1 else round(time * MS) for time in times_ms], dtype=np.int64)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def samples() -> LoadSamples:
    """Return case QA-078 (1, 4 and 4 tokens at 100, 300 and 500 ms), one token, a late start, a rejection, a time-out."""
    return LoadSamples(
        intended_ns=ns(0, 0, 1000, 1000, 1000),
        started_ns=ns(0, 0, 1400, 1001, 1002),
        first_token_ns=ns(100, 60, 1500, -1, 1200),
        finished_ns=ns(500, 60, 1600, 1003, 9000),
        num_tokens=counts(9, 1, 2, 0, 3),
        offsets=counts(0, 3, 4, 6, 6, 8),
        token_times_ns=ns(100, 300, 500, 60, 1500, 1600, 1200, 1900),
        chunk_tokens=counts(1, 4, 4, 1, 1, 1, 1, 2),
        status=np.array([0, 0, 0, RequestStatus.REJECTED, RequestStatus.TIMEOUT], dtype=np.int8),
    )


def test_tokens_of_one_chunk_are_counted_each(samples: LoadSamples) -> None:
    one = samples.select(np.array([True, True, False, False, False]))
    assert one.ttft_ms().tolist() == [100, 60]
    assert one.tpot_ms().tolist() == [50]  # (500 - 100) / 8; the single-token request has none
    assert one.chunk_gap_ms().tolist() == [200, 200]
    assert one.itl_ms().tolist() == [50] * 8


def test_latency_counts_from_the_intended_start(samples: LoadSamples) -> None:
    assert samples.end_to_end_ms().tolist() == [500, 60, 600]
    assert samples.ttft_ms().tolist() == [100, 60, 500]
    assert samples.dispatch_delay_ms().tolist() == [0, 0, 400, 1, 2]


def test_failures_are_no_fast_answers(samples: LoadSamples) -> None:
    assert [samples.count(status) for status in RequestStatus] == [3, 0, 1, 1, 0]
    assert samples.end_to_end_ms(failures_infinite=True).tolist() == [500, 60, 600, np.inf, np.inf]
    assert samples.wall_s() == 9.0
    assert samples.requests_per_s() == pytest.approx(3 / 9) and samples.output_tok_per_s() == pytest.approx(12 / 9)


@pytest.mark.parametrize(
    ("level", "num_good"),
    [
        (ServiceLevel(), 3),
        (ServiceLevel(end_to_end_ms=500), 2),
        (ServiceLevel(ttft_ms=80), 1),
        (ServiceLevel(tpot_ms=49), 1),
        (ServiceLevel(tpot_ms=50, end_to_end_ms=550), 2),
    ],
)
def test_goodput_counts_what_keeps_every_limit(samples: LoadSamples, level: ServiceLevel, num_good: int) -> None:
    found = samples.goodput(level)
    assert (found.num_good, found.ratio) == (num_good, num_good / 5)
    assert found.requests_per_s == pytest.approx(num_good / 9)


def test_goodput_refuses_a_first_token_limit_on_answers_that_were_not_streamed(samples: LoadSamples) -> None:
    whole = LoadSamples(
        intended_ns=ns(0), started_ns=ns(0), first_token_ns=ns(-1), finished_ns=ns(5), num_tokens=counts(4),
        offsets=counts(0, 0), token_times_ns=ns(), chunk_tokens=counts(), status=np.zeros(1, dtype=np.int8),
    )  # fmt: skip
    assert whole.ttft_ms().size == 0 and whole.tpot_ms().size == 0 and whole.goodput(ServiceLevel(end_to_end_ms=6)).num_good == 1
    with pytest.raises(ConfigError, match="streamed"):
        whole.goodput(ServiceLevel(ttft_ms=1))


def same(one: LoadSamples, other: LoadSamples) -> bool:
    pairs = (
        (one.intended_ns, other.intended_ns),
        (one.started_ns, other.started_ns),
        (one.first_token_ns, other.first_token_ns),
        (one.finished_ns, other.finished_ns),
        (one.num_tokens, other.num_tokens),
        (one.offsets, other.offsets),
        (one.token_times_ns, other.token_times_ns),
        (one.chunk_tokens, other.chunk_tokens),
        (one.status, other.status),
    )
    return all(a.dtype == b.dtype and a.tolist() == b.tolist() for a, b in pairs)


def test_save_and_load_return_the_same_samples_and_bytes(samples: LoadSamples, tmp_path: Path) -> None:
    empty = samples.select(np.zeros(5, dtype=bool))
    for name, found in (("a", samples), ("b", samples), ("empty", empty), ("twice", join([samples, samples]))):
        found.save(tmp_path / name)
        assert same(LoadSamples.load(tmp_path / name), found)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    table = parquet.read_table(tmp_path / "a")
    assert table["token_times_ns"].to_pylist()[0] == [100 * MS, 300 * MS, 500 * MS]


def test_join_keeps_the_tokens_with_their_requests(samples: LoadSamples) -> None:
    twice = join([samples, samples])
    assert twice.itl_ms().tolist() == samples.itl_ms().tolist() * 2
    assert same(twice.select(np.arange(10) >= 5), samples)


def test_load_refuses_other_files(samples: LoadSamples, tmp_path: Path) -> None:
    samples.save(tmp_path / "good")
    (tmp_path / "torn").write_bytes((tmp_path / "good").read_bytes()[:-20])
    table = parquet.read_table(tmp_path / "good")
    parquet.write_table(table.replace_schema_metadata({}), tmp_path / "foreign")
    parquet.write_table(table.drop_columns(["status"]), tmp_path / "short")
    for name in ("torn", "foreign", "short", "absent"):
        with pytest.raises(IntegrityError, match=name):
            LoadSamples.load(tmp_path / name)


def test_samples_refuse_arrays_that_do_not_fit(samples: LoadSamples) -> None:
    parts = (samples.intended_ns, samples.started_ns, samples.first_token_ns, samples.finished_ns, samples.num_tokens)
    rest = (samples.token_times_ns, samples.chunk_tokens, samples.status)
    with pytest.raises(ConfigError, match="offsets end at 7"):
        LoadSamples(*parts, counts(0, 3, 4, 6, 6, 7), *rest)
    with pytest.raises(ConfigError, match="5 entries for 4 requests"):
        LoadSamples(samples.intended_ns[:4], *parts[1:], samples.offsets, *rest)
    with pytest.raises(ConfigError, match="float64"):
        LoadSamples(samples.intended_ns.astype(float), *parts[1:], samples.offsets, *rest)
    with pytest.raises(ConfigError, match="OK without an end"):
        LoadSamples(*parts[:3], np.full(5, -1), parts[4], samples.offsets, *rest)
