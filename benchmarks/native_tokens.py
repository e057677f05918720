"""Greedy tokens of the native runtime against transformers' own generation on a given model, prompt by prompt.

    make bench NAME=native_tokens ARGS="MODEL_DIRECTORY"

Four ways: alone, all at once, again with whole prompts in the prefix cache, and in a pool so small that requests are
preempted. Prompts are seeded random tokens of every length from 1 on, so that they end at every place of a page.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import GenerationRequest, RequestId
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

SEED = 0
PAGE_TOKENS = 16
LONGEST_PROMPT = 80
MAX_BATCH = 16


def draw_prompts(vocab_size: int, num: int) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(SEED)
    return [tuple(generator.integers(0, vocab_size, 1 + at % LONGEST_PROMPT).tolist()) for at in range(num)]


def reference_tokens(directory: Path, prompts: Sequence[tuple[int, ...]], num_new: int) -> list[tuple[int, ...]]:
    """Return what transformers generates for each prompt alone."""
    model = load_dequantized(directory)
    found = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(tuple(output[0, len(prompt) :].tolist()))
    return found


def open_with(directory: Path, num_pages: int) -> NativeRuntime:
    plan = KvPlan(page_tokens=PAGE_TOKENS, num_pages=num_pages, bytes_per_token=1, max_batch=MAX_BATCH, max_model_len=256)
    return open_native(directory, plan)


def native_tokens(runtime: NativeRuntime, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Return the tokens of requests that are submitted at once."""
    tokens: dict[RequestId, list[int]] = {runtime.submit(request): [] for request in requests}
    while events := runtime.step():
        for event in events:
            tokens[event.request].append(event.token)
    return [tuple(found) for found in tokens.values()]


def measure(directory: Path, num_prompts: int, num_new: int) -> list[Figure]:
    """Return the share of prompts whose tokens are all equal, each way, and what shows that the way was gone."""
    wide = open_with(directory, num_pages=2048)
    vocab_size = wide.logits((0,)).shape[1]
    prompts = draw_prompts(vocab_size, num_prompts)
    expected = reference_tokens(directory, prompts, num_new)
    private = [GenerationRequest(prompt, num_new) for prompt in prompts]
    sharing = [GenerationRequest(prompt, num_new, shares_prefix=True) for prompt in prompts]
    found = {
        "alone": [native_tokens(wide, [request])[0] for request in private],
        "batched": native_tokens(wide, private),
    }
    native_tokens(wide, sharing)
    before = wide.activity().pool.hit_tokens
    found["prefix-hits"] = native_tokens(wide, sharing)
    hits = wide.activity().pool.hit_tokens - before
    wide.close()
    narrow = open_with(directory, num_pages=3 * -(-(LONGEST_PROMPT + num_new) // PAGE_TOKENS))
    found["preempted"] = native_tokens(narrow, private)
    preemptions = narrow.activity().num_preemptions
    name = directory.name
    figures = [
        Figure(f"{way}-{name}", "equal_outputs_ratio", float(np.mean([a == b for a, b in zip(tokens, expected, strict=True)])),
               "ratio", n=num_prompts)
        for way, tokens in found.items()
    ]  # fmt: skip
    return [
        *figures,
        Figure(f"prefix-hits-{name}", "hit_tokens", hits, "tokens", n=num_prompts),
        Figure(f"preempted-{name}", "preemptions_count", preemptions, "count", n=num_prompts),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory of a covered architecture")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=20)
    given = parser.parse_args()
    append(__file__, measure(given.model, given.prompts, given.new_tokens), ("torch", "transformers"))


if __name__ == "__main__":
    main()
