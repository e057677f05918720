"""Draws follow the distribution that was asked for, and depend on seed and position alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from native_fixtures import generate, kv_plan
from scipy import stats

from model_optimizer.protocols import GenerationRequest, Sampling
from model_optimizer.runtimes.backends.torch import open_padded
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.runtimes.torch.sampler import Draw, choose, uniform

LOGITS_V = torch.tensor([2.0, 0.5, 1.5, -1.0, 1.0])


def drawn(sampling: Sampling, count: int) -> list[int]:
    """Return `count` draws at different positions."""
    draws = [Draw(sampling, position) for position in range(count)]
    return [choice.token for choice in choose(LOGITS_V.expand(count, -1).clone(), draws)]


def test_choose_takes_the_likeliest_at_temperature_zero() -> None:
    logits_RV = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    choices = choose(logits_RV, [Draw(Sampling(), 3, num_top=2)] * 7)
    assert [choice.token for choice in choices] == logits_RV.argmax(-1).tolist()
    log_probs_RV = logits_RV.log_softmax(-1)
    assert [choice.log_prob for choice in choices] == pytest.approx(log_probs_RV.amax(-1).tolist(), abs=1e-5)
    assert [choice.top[1][0] for choice in choices] == log_probs_RV.topk(2).indices[:, 1].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choose_draws_from_the_softmax_at_a_temperature(temperature: float) -> None:
    counts = np.bincount(drawn(Sampling(temperature=temperature), 4000), minlength=5)
    expected = torch.softmax(LOGITS_V / temperature, -1).double().numpy()
    assert stats.chisquare(counts, 4000 * expected / expected.sum()).pvalue > 0.01


def test_choose_draws_from_the_top_k_only() -> None:
    counts = np.bincount(drawn(Sampling(temperature=1.0, top_k=3), 4000), minlength=5)
    expected = torch.softmax(LOGITS_V[[0, 2, 4]], -1).double().numpy()
    assert counts[[1, 3]].tolist() == [0, 0]
    assert stats.chisquare(counts[[0, 2, 4]], 4000 * expected / expected.sum()).pvalue > 0.01


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [0]), (0.44, [0]), (0.5, [0, 2]), (0.71, [0, 2]), (0.76, [0, 2, 4]), (1.0, [0, 1, 2, 3, 4])]
)
def test_choose_draws_from_the_fewest_that_reach_top_p(top_p: float, kept: list[int]) -> None:
    # softmax of the logits, likeliest first: tokens 0, 2, 4, 1, 3 with 0.4450, 0.2699, 0.1637, 0.0993, 0.0222
    assert sorted(set(drawn(Sampling(temperature=1.0, top_p=top_p), 2000))) == kept


def test_choose_gives_a_row_the_same_token_alone_and_in_any_batch() -> None:
    logits_RV = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    draws = [Draw(Sampling(temperature=0.3 * row, top_k=row, top_p=1 - row / 10, seed=row), 10 + row) for row in range(6)]
    together = choose(logits_RV, draws)
    assert together == [choose(logits_RV[row : row + 1], [draws[row]])[0] for row in range(6)]


def test_choose_draws_the_same_again_from_a_seed_and_otherwise_from_another() -> None:
    first = drawn(Sampling(temperature=1.0, seed=5), 50)
    assert first == drawn(Sampling(temperature=1.0, seed=5), 50)
    assert first != drawn(Sampling(temperature=1.0, seed=6), 50)


def test_every_runtime_draws_the_same_tokens_from_a_seed(tiny_llama: Path) -> None:
    requests = [
        GenerationRequest((5, 6, 7), 12, sampling=Sampling(temperature=0.7, top_k=50, seed=3)),
        GenerationRequest((100,), 12, sampling=Sampling(temperature=1.2, top_p=0.9, seed=4)),
        GenerationRequest((9, 8), 12),
    ]
    padded = open_padded(tiny_llama, kv_plan(), "1", "the padded core is compared with the native one")
    assert generate(padded, requests) == generate(open_native(tiny_llama, kv_plan()), requests)


def test_uniform_covers_the_unit_interval_evenly() -> None:
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
