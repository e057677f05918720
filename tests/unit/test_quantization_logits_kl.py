"""KL between logits: exact where they hardly differ, finite where they differ wholly."""

import pytest
import torch

from model_optimizer.quantization.logits_kl import kl_nats


def reference_kl(reference_TV: torch.Tensor, changed_TV: torch.Tensor) -> torch.Tensor:
    log_p_TV, log_q_TV = (torch.log_softmax(it.double(), -1) for it in (reference_TV, changed_TV))
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.3, 3.0, 30.0, 300.0])
def test_kl_nats_equals_the_plain_formula_in_float64(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    reference_TV = 5 * torch.randn(6, 500, generator=generator)
    changed_TV = reference_TV + size * torch.randn(6, 500, generator=generator)
    assert kl_nats(reference_TV, changed_TV).tolist() == pytest.approx(reference_kl(reference_TV, changed_TV).tolist(), rel=2e-3)


def test_kl_nats_is_zero_when_all_logits_move_alike() -> None:
    reference_TV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert kl_nats(reference_TV, reference_TV + 7).abs().max().item() < 1e-6
