"""KL divergence between two sets of logits, exact to rounding even where they hardly differ.

    KL(p || q) = log sum_V p exp(d),  d = change of the logits less its mean under p

Neither large logits nor their normalisers are subtracted from each other, so float32 is enough for KL of 1e-8 nats.

Shape letters: V vocabulary; any shape in front of it.
"""

import torch

LARGE_CHANGE = 40.0
"""From here on exp(d) nears the end of float32, and KL is large enough for the plain formula."""


def kl_nats(reference_V: torch.Tensor, changed_V: torch.Tensor) -> torch.Tensor:
    """Return KL(softmax(reference) || softmax(changed)) over the last dimension, float64 nats."""
    return kl_from_probs(reference_V.float().softmax(-1), reference_V, changed_V)


def kl_from_probs(probs_V: torch.Tensor, reference_V: torch.Tensor, changed_V: torch.Tensor) -> torch.Tensor:
    """Return the same where softmax(reference) is at hand."""
    change_V = changed_V.float() - reference_V.float()
    change_V -= torch.linalg.vecdot(probs_V, change_V).unsqueeze(-1)
    if change_V.max() > LARGE_CHANGE:
        return torch.logsumexp(probs_V.log() + change_V, dim=-1).double()
    left: torch.Tensor = torch.linalg.vecdot(probs_V, change_V)  # what rounding left of the mean
    excess: torch.Tensor = torch.linalg.vecdot(probs_V, change_V.expm1_())
    return excess.double().log1p() - left
