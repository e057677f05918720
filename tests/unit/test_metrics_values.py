"""Metrics against independent references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.choice_accuracy import best_choice, choice_accuracy, is_right
from model_optimizer.metrics.kl_divergence import CHUNK_VALUES, kl_divergence_nats, mean_kl_nats
from model_optimizer.metrics.perplexity import perplexity, windows
from model_optimizer.metrics.registry import ChoiceScores
from model_optimizer.metrics.top1_flips import top1_flips


def random_logits(seed: int, shape: tuple[int, int] = (9, 37), scale: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def test_kl_divergence_equals_torch_in_float64() -> None:
    reference_TV, candidate_TV = random_logits(0), random_logits(1)
    log_p, log_q = (torch.log_softmax(torch.from_numpy(x).double(), dim=1) for x in (reference_TV, candidate_TV))
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1).numpy()
    np.testing.assert_allclose(kl_divergence_nats(reference_TV, candidate_TV), expected, rtol=1e-12)


def test_kl_divergence_of_two_coins_is_the_textbook_value() -> None:
    p, q = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    assert mean_kl_nats(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-6)


def test_kl_divergence_stays_finite_when_logits_are_huge_and_shifted() -> None:
    reference_TV = np.array([[1e4, -1e4, 0.0]], np.float32)
    assert mean_kl_nats(reference_TV, reference_TV + 5000) == 0.0
    assert mean_kl_nats(reference_TV, np.array([[-1e4, 1e4, 0.0]], np.float32)) == pytest.approx(2e4)


def test_kl_divergence_is_the_same_in_chunks() -> None:
    vocab = CHUNK_VALUES // 2  # two rows a chunk
    reference_TV, candidate_TV = random_logits(2, (3, vocab)), random_logits(3, (3, vocab))
    alone = [mean_kl_nats(reference_TV[row : row + 1], candidate_TV[row : row + 1]) for row in range(3)]
    np.testing.assert_allclose(kl_divergence_nats(reference_TV, candidate_TV), alone, rtol=0)


def test_kl_divergence_refuses_other_shapes() -> None:
    with pytest.raises(ConfigError, match=r"seen: \(9, 37\) and \(9, 36\)"):
        kl_divergence_nats(random_logits(0), random_logits(0, (9, 36)))


def test_top1_flips_marks_changed_argmax_and_ties_go_low() -> None:
    reference_TV = np.array([[1, 2, 0], [3, 3, 0], [0, 0, 1]], np.float32)
    candidate_TV = np.array([[2, 1, 0], [3, 3, 0], [0, 0, 9]], np.float32)
    assert top1_flips(reference_TV, candidate_TV).tolist() == [True, False, False]


def test_perplexity_of_a_uniform_guess_is_the_vocabulary_size() -> None:
    assert perplexity(np.full(7, -math.log(50), np.float32)) == pytest.approx(50, rel=1e-6)


@given(st.integers(2, 400), st.integers(2, 64), st.data())
def test_windows_score_every_token_once(num_tokens: int, length: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, length - 1))
    found = windows(num_tokens, length, overlap)
    scored = [position for start, end, score_from in found for position in range(start + score_from, end)]
    assert scored == list(range(1, num_tokens))
    assert max(end - start for start, end, _ in found) <= length
    assert all(score_from >= min(overlap, 1) for _, _, score_from in found)


def test_windows_refuse_an_overlap_as_long_as_the_window() -> None:
    with pytest.raises(ConfigError, match="1 <= overlap < length"):
        windows(10, 4, 4)


def test_choice_accuracy_counts_the_likeliest_choice_and_ties_go_low() -> None:
    rows = ((-1.0, -2.0), (-3.0, -1.0), (-2.0, -2.0), (-2.0, -2.0))
    assert choice_accuracy(ChoiceScores(rows, (0, 0, 0, 1))) == 0.5
    assert best_choice((-2.0, -1.0, -1.0)) == 1


def test_is_right_is_false_when_the_answer_has_no_finite_score() -> None:
    assert not is_right((math.nan, math.nan), 0)
    assert not is_right((-math.inf, -math.inf), 0)
    assert is_right((math.nan, -5.0), 1)
