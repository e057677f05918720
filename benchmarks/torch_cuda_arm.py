"""Torch on a GPU in float16 as an arm of an interleaved run, and how fast the GPU reads its memory."""

import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines_cpu import NEW_TOKENS, PROMPT, VOCABULARY
from benchmarks.evidence import Figure
from model_optimizer.compilation.parity import Reference, kl_divergence
from model_optimizer.formats.loading import load_dequantized

READ_BYTES = 2**32


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TorchArm:
    """Greedy decoding by the library's own model over a static cache in float16; `mode` is torch.compile's, None: as it is."""

    def __init__(self, model: Path, mode: str | None):
        self._model = load_dequantized(model)
        torch.nn.Module.to(self._model, device(), torch.float16)
        forward = self._model.forward
        self._forward = forward if mode is None else torch.compile(forward, mode=mode, dynamic=False, fullgraph=True)
        self._caches: dict[int, object] = {}

    @torch.inference_mode()
    def __call__(self, batch: int) -> float:
        """Return tokens per second; each step's tokens are read before the next begins."""
        from transformers import StaticCache

        ids = torch.from_numpy(np.random.default_rng(batch).integers(0, VOCABULARY, (batch, PROMPT))).to(device())
        cache = self._caches.get(batch)
        if not isinstance(cache, StaticCache):
            cache = StaticCache(config=self._model.config, max_cache_len=PROMPT + NEW_TOKENS)
            self._caches[batch] = cache
        cache.reset()
        first = torch.arange(PROMPT, device=device())
        logits = self._model(ids, past_key_values=cache, cache_position=first, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        token.tolist()
        start = time.perf_counter()
        for position in range(PROMPT, PROMPT + NEW_TOKENS - 1):
            torch.compiler.cudagraph_mark_step_begin()
            at = torch.tensor([position], device=device())
            token = self._forward(token, past_key_values=cache, cache_position=at).logits[:, -1:].argmax(-1)
            token.tolist()
        return batch * (NEW_TOKENS - 1) / (time.perf_counter() - start)


def parity_of_torch(model: Path, reference: Reference, name: str) -> list[Figure]:
    """Return how far torch itself in float16 on the GPU is from float32 on the CPU."""
    half = load_dequantized(model)
    torch.nn.Module.to(half, device(), torch.float16)
    with torch.inference_mode():
        found = [half(torch.tensor([tokens], device=device())).logits[0].float().cpu().numpy() for tokens in reference.sequences]
    pairs = list(zip(found, reference.logits_TV, strict=True))
    n = sum(map(len, found))
    same = np.concatenate([seen.argmax(-1) == expected.argmax(-1) for seen, expected in pairs])
    kl = np.concatenate([kl_divergence(expected, seen) for seen, expected in pairs])
    mean = np.concatenate([np.abs(seen - expected).mean(-1) for seen, expected in pairs])
    return [
        Figure(name, "parity_max_logit_difference", max(float(np.abs(a - b).max()) for a, b in pairs), "logits", n=n),
        Figure(name, "parity_mean_logit_difference", float(mean.mean()), "logits", n=n),
        Figure(name, "parity_kl_nats", float(kl.mean()), "nats", n=n),
        Figure(name, "parity_top1_ratio", float(same.mean()), "ratio", n=n),
    ]


def read_bytes_per_s() -> float:
    """Return the best rate of summing a tensor far larger than the GPU's cache; 1 GiB/s where there is no GPU to measure."""
    if device().type == "cpu":
        return float(2**30)
    numbers = torch.ones(READ_BYTES // 2, dtype=torch.float16, device=device()).view(torch.int32)
    rates = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        numbers.amax()
        end.record()
        torch.cuda.synchronize()
        rates.append(READ_BYTES / (begin.elapsed_time(end) / 1000))
    return max(rates)
