"""Sampled requests reproduce the stated percentiles."""

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.spec import Lengths, Traffic
from model_optimizer.traffic.lengths import build_requests, length_at, prompt_of_length, sample_requests

TRAFFIC = Traffic(prompt_tokens=Lengths(p50=64, p95=256, max=512), output_tokens=Lengths(p50=32, p95=128, max=256))


def test_length_at_hits_the_knots_and_mirrors_below_the_median() -> None:
    found = length_at(TRAFFIC.prompt_tokens, np.array([0.0, 0.05, 0.5, 0.725, 0.95, 1.0]))
    assert found.tolist() == [8, 16, 64, 128, 256, 512]  # 64^2/512, 64^2/256, knots; 0.725 is half way in the logarithm


def test_length_at_never_falls_below_one_token() -> None:
    assert length_at(Lengths(p50=2, p95=100, max=1000), np.array([0.0])).tolist() == [1]


def test_sample_requests_reproduces_percentiles_with_forty_requests() -> None:
    shapes = sample_requests(TRAFFIC, 2048, 40, seed=3)
    prompts = sorted(shape.prompt_tokens for shape in shapes)
    assert 60 <= (prompts[19] + prompts[20]) / 2 <= 68
    assert prompts[37] <= 256 <= prompts[38]  # exactly the top 5 % lie above P95


def test_sample_requests_is_deterministic_and_follows_the_seed() -> None:
    assert sample_requests(TRAFFIC, 2048, 20, 0) == sample_requests(TRAFFIC, 2048, 20, 0)
    assert sample_requests(TRAFFIC, 2048, 20, 0) != sample_requests(TRAFFIC, 2048, 20, 1)


@pytest.mark.parametrize("max_model_len", [2, 16, 100, 300])
def test_sample_requests_fits_into_the_model(max_model_len: int) -> None:
    for prompt_tokens, output_tokens in sample_requests(TRAFFIC, max_model_len, 200, 0):
        assert prompt_tokens >= 1 and output_tokens >= 1
        assert prompt_tokens + output_tokens <= max_model_len


def test_sample_requests_refuses_zero() -> None:
    with pytest.raises(ConfigError, match="num >= 1"):
        sample_requests(TRAFFIC, 2048, 0, 0)


def test_prompt_of_length_cycles_through_the_text() -> None:
    assert prompt_of_length((5, 6, 7), 7, start=2) == (7, 5, 6, 7, 5, 6, 7)
    with pytest.raises(ConfigError, match="held-out text"):
        prompt_of_length((), 3)


def test_build_requests_has_the_shapes_and_nothing_stops_it() -> None:
    shapes = sample_requests(TRAFFIC, 2048, 10, 0)
    requests = build_requests(shapes, tuple(range(50)), seed=1)
    assert [(len(request.prompt), request.max_new_tokens) for request in requests] == list(shapes)
    assert all(request.stop_tokens == () for request in requests)
    assert requests == build_requests(shapes, tuple(range(50)), seed=1)
