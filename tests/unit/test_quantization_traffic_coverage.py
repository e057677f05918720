"""Coverage of the traffic's lengths: against hand-counted shares."""

import json
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.traffic_coverage import cover, trace_lengths, traffic_lengths
from model_optimizer.spec import Lengths, Traffic


def test_cover_is_perfect_when_the_lengths_are_the_same() -> None:
    found = cover([20, 40, 80], [20, 40, 80])
    assert (found.score_ratio, found.distance_octaves, found.reached_ratio) == pytest.approx((1, 0, 1))
    assert found.gaps() == ()


def test_cover_counts_doublings_when_every_sample_is_twice_as_long() -> None:
    found = cover([40, 80, 160, 320], [20, 40, 80, 160])
    assert found.distance_octaves == pytest.approx(1)
    assert found.score_ratio == pytest.approx(3 / 4)
    assert found.gaps() == ("17 to 32 tokens: 25% of the traffic, 0% of the samples",)


def test_cover_names_long_requests_that_no_sample_reaches() -> None:
    requests = [30] * 60 + [100] * 30 + [1000] * 10
    found = cover([30] * 95 + [100] * 5, requests)
    assert found.score_ratio == pytest.approx(0.60 + 0.05)
    assert found.reached_ratio == pytest.approx(0.9) and found.longest_request == 1000
    assert found.gaps() == (
        "65 to 128 tokens: 30% of the traffic, 5% of the samples",
        "513 to 1024 tokens: 10% of the traffic, 0% of the samples",
        "10% of the traffic is longer than every sample",
    )


def test_cover_has_no_score_where_nothing_is_shared() -> None:
    found = cover([5], [5000])
    assert found.score_ratio == 0 and found.distance_octaves == pytest.approx(np.log2(1000))
    assert sum(octave.traffic_ratio for octave in found.octaves) == pytest.approx(1)


def test_traffic_lengths_follow_the_percentiles() -> None:
    traffic = Traffic(prompt_tokens=Lengths(p50=100, p95=100, max=100), output_tokens=Lengths(p50=20, p95=80, max=120))
    lengths = np.array(traffic_lengths(traffic, 4096))
    assert np.percentile(lengths, [50, 95]) == pytest.approx([120, 180], rel=0.02)
    assert traffic_lengths(traffic, 4096) == tuple(lengths)


def test_trace_lengths_add_prompt_and_output(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        json.dumps({"prompt_tokens": 3, "output_tokens": 4}) + "\n" + json.dumps({"ContextTokens": 5, "GeneratedTokens": 0})
    )
    assert trace_lengths(path) == (7, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no requests"),
        ('{"prompt_tokens": 3}', "line 1: output_tokens is None"),
        ('{"prompt_tokens": "3"}', "prompt_tokens is '3'"),
    ],
)
def test_trace_lengths_refuse_what_is_no_trace(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=words):
        trace_lengths(tmp_path / "trace.jsonl")
