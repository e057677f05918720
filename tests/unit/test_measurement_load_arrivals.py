"""Schedules: fixed by their seed, at the rate that was asked for, and traces as they were written."""

import json
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.arrivals import Burst, bursts, poisson, read_trace, steady


def test_steady_spaces_requests_evenly() -> None:
    assert steady(4, 1.0).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]


def test_poisson_has_the_rate_and_the_spread_of_a_poisson_process() -> None:
    offsets = poisson(1000, 20.0, seed=3)
    gaps_ms = np.diff(offsets) / 1e6
    assert offsets.size == pytest.approx(20_000, rel=0.02)
    assert gaps_ms.mean() == pytest.approx(1.0, rel=0.02) and gaps_ms.std() == pytest.approx(1.0, rel=0.03)
    assert np.mean(gaps_ms > 3) == pytest.approx(np.exp(-3), rel=0.1)
    assert (gaps_ms >= 0).all() and np.array_equal(offsets, poisson(1000, 20.0, seed=3))
    assert not np.array_equal(offsets[:10], poisson(1000, 20.0, seed=4)[:10])


def test_bursts_rise_at_the_end_of_every_period() -> None:
    offsets_s = bursts(100, Burst(rate_per_s=900, period_s=2.0, length_s=0.5), 20.0, seed=1) / 1e9
    within = (offsets_s % 2.0) >= 1.5
    assert within.sum() == pytest.approx(900 * 5, rel=0.05) and (~within).sum() == pytest.approx(100 * 15, rel=0.08)


def test_read_trace_takes_seconds_and_milliseconds(tmp_path: Path) -> None:
    seconds = tmp_path / "seconds.jsonl"
    seconds.write_text('{"arrived_at": 10.5, "num_prefill_tokens": 7, "num_decode_tokens": 3}\n\n{"arrived_at": 12.0,'
                       ' "num_prefill_tokens": 9, "num_decode_tokens": 4}\n')  # fmt: skip
    trace = read_trace(seconds, speed=2)
    assert trace.offsets_ns.tolist() == [0, 750_000_000] and trace.shapes == ((7, 3), (9, 4))
    milliseconds = tmp_path / "milliseconds.jsonl"
    rows = [{"timestamp": at, "input_length": 5, "output_length": 2} for at in (27_000, 27_040)]
    milliseconds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_trace(milliseconds).offsets_ns.tolist() == [0, 40_000_000]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ("[1]\n", "line 1: '[1]' is no object"),
        ("{\n", "line 1: no JSON"),
        ('{"prompt_tokens": 1, "output_tokens": 1}\n', "line 1: no time"),
        ('{"arrival_s": 1, "output_tokens": 1}\n', "prompt_tokens is None, not a count of tokens"),
        ('{"arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}\n', "line 1: no time"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}\n', "prompt_tokens is 0"),
        (
            "".join(f'{{"arrival_s": {at}, "prompt_tokens": 1, "output_tokens": 1}}\n' for at in (2, 1)),
            "line 2: arrival_s 1 is before the line above",
        ),
    ],
)
def test_read_trace_names_the_line_at_fault(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="trace") as caught:
        read_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (1, 0), (float("nan"), 1), (1e9, 60), (0.01, 1)])
def test_arrivals_refuse_what_makes_no_schedule(rate: float, duration: float) -> None:
    with pytest.raises(ConfigError):
        poisson(rate, duration, seed=0)


def test_bursts_refuse_a_burst_that_is_none() -> None:
    with pytest.raises(ConfigError, match="shorter than its period and faster"):
        bursts(100, Burst(rate_per_s=50, period_s=2, length_s=1), 10, seed=0)
