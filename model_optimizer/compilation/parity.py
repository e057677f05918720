"""Compare an opened engine with its checkpoint: the same tokens, logits against logits.

Shape letters: T tokens of a sequence, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.compiled import Parity
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.protocols import GenerationRequest, LogitsRuntime

NUM_TOKENS = 256
LENGTHS = (1, 7, 64, 184)
"""Sequences of held-out text that parity looks at: one token, odd, and long enough for positions to matter."""
NUM_GREEDY = 16
GREEDY_PROMPT = 32
PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=0, max_batch=4, max_model_len=512)
"""Room for one sequence; what the engine may really use is the memory stage's to say."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the checkpoint itself computes, by transformers in float32."""

    sequences: tuple[tuple[int, ...], ...]
    logits_TV: tuple[NDArray[np.float32], ...]
    prompt: tuple[int, ...]
    greedy: tuple[int, ...]


def parity_sequences(texts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Cut sequences of `LENGTHS` from texts, each from the next text that still has tokens; shorter texts give shorter ones."""
    cuts, offset = [], 0
    for index, length in enumerate(LENGTHS):
        text = texts[index % len(texts)]
        offset = sum(LENGTHS[:index]) if len(texts) == 1 else 0
        cuts.append(text[offset : offset + length] or text[:length])
    return tuple(cuts)


def reference_of(checkpoint: Path, sequences: tuple[tuple[int, ...], ...]) -> Reference:
    """Run the checkpoint, plain or packed, on the sequences and greedily from the longest one."""
    import torch

    from model_optimizer.formats.loading import load_dequantized

    model = load_dequantized(checkpoint)
    prompt = max(sequences, key=len)[:GREEDY_PROMPT]
    with torch.inference_mode():
        logits_TV = tuple(model(torch.tensor([tokens])).logits[0].float().numpy() for tokens in sequences)
        tokens_T = torch.tensor([prompt])
        cache = None
        greedy: list[int] = []
        for _ in range(NUM_GREEDY):
            output = model(tokens_T, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens_T = output.past_key_values, output.logits[:, -1:].argmax(-1)
            greedy.append(int(tokens_T))
    return Reference(sequences, logits_TV, prompt, tuple(greedy))


def compare(runtime: LogitsRuntime, reference: Reference, tolerance_kl_nats: float) -> Parity:
    """Return how far the engine is from the reference; `passed` when the mean KL stays within the tolerance."""
    pairs = [(runtime.logits(tokens), logits) for tokens, logits in zip(reference.sequences, reference.logits_TV, strict=True)]
    kl_T = np.concatenate([kl_divergence(expected, seen) for seen, expected in pairs])
    same_T = np.concatenate([seen.argmax(-1) == expected.argmax(-1) for seen, expected in pairs])
    worst = max(float(np.abs(seen - expected).max()) for seen, expected in pairs)
    mean_kl = float(kl_T.mean())
    return Parity(
        max_abs_logit_difference=worst,
        mean_kl_nats=mean_kl,
        top1_agreement_ratio=float(same_T.mean()),
        greedy_tokens_equal=_greedy_tokens(runtime, reference.prompt) == reference.greedy,
        num_tokens=len(kl_T),
        tolerance_kl_nats=tolerance_kl_nats,
        passed=bool(np.isfinite(worst)) and mean_kl <= tolerance_kl_nats,
    )


def kl_divergence(expected_TV: NDArray[np.float32], seen_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return KL(softmax(expected) || softmax(seen)) per token, in nats, computed in float64."""
    log_p_TV, log_q_TV = _log_softmax(expected_TV), _log_softmax(seen_TV)
    kl_T: NDArray[np.float64] = (np.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(axis=-1)
    return np.maximum(kl_T, 0.0)  # rounding may leave -1e-17


def _log_softmax(logits_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted_TV = logits_TV.astype(np.float64) - logits_TV.max(axis=-1, keepdims=True)
    log_p_TV: NDArray[np.float64] = shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True))
    return log_p_TV


def _greedy_tokens(runtime: LogitsRuntime, prompt: tuple[int, ...]) -> tuple[int, ...]:
    runtime.submit(GenerationRequest(prompt, NUM_GREEDY))
    tokens: list[int] = []
    while events := runtime.step():
        tokens += [event.token for event in events]
    return tuple(tokens)
