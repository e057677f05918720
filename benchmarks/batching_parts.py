"""Continuous batching over pages against static batching, within the same bytes of KV cache, on seeded log-normal lengths.

Static batching sets `max_model_len` tokens aside for each row, so the cache holds few rows; a batch starts together and ends
with its longest request, and rows that are done run on as padding. Prompts of a static batch are not padded here, which
favours it. Both arms run the native runtime, so the ratio is that of the scheduling alone; case `transformers` is the library's
own `generate` on batches padded on the left, of the same rows. Requests are in a seeded random order.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.evidence import Figure
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.paired import Ratio, ratio_of_pairs
from model_optimizer.protocols import GenerationRequest, RequestId
from model_optimizer.runtimes.torch.config import read_model_config
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

SEED = 0
MAX_MODEL_LEN = 512
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX = 64, 0.7, 256
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 64, 0.9, 256
"""Log-normal lengths in tokens: medians, standard deviations of the logarithm, and where they are cut."""


@dataclass(frozen=True)
class Setting:
    """One run's sizes."""

    model: Path
    num_requests: int
    rounds: int
    kv_tokens: int
    """Capacity of the cache, the same for both arms."""
    page_tokens: int
    max_batch: int
    compare_transformers: bool

    @property
    def static_rows(self) -> int:
        return max(1, self.kv_tokens // MAX_MODEL_LEN)


@dataclass(frozen=True)
class Outcome:
    """What one arm did in one round."""

    tok_per_s: float
    outputs: list[tuple[int, ...]]
    waste_ratio: float
    """Slots of pages (or rows) in use that hold no token, over all such slots, averaged over steps."""


def lognormal(generator: np.random.Generator, median: float, sigma: float, num: int, most: int) -> list[int]:
    return np.clip(np.rint(np.exp(generator.normal(np.log(median), sigma, num))), 1, most).astype(int).tolist()


def draw_requests(vocab_size: int, num: int, seed: int) -> list[GenerationRequest]:
    """Return greedy requests of random tokens; nothing but their length ends them."""
    generator = np.random.default_rng(seed)
    prompts = lognormal(generator, PROMPT_MEDIAN, PROMPT_SIGMA, num, PROMPT_MAX)
    outputs = lognormal(generator, OUTPUT_MEDIAN, OUTPUT_SIGMA, num, OUTPUT_MAX)
    return [
        GenerationRequest(tuple(generator.integers(0, vocab_size, length).tolist()), new)
        for length, new in zip(prompts, outputs, strict=True)
    ]


def collect(runtime: NativeRuntime, requests: Sequence[GenerationRequest]) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Run all requests, submitted at once; return their tokens and (empty slots, slots) of the pages in use after each step."""
    tokens: dict[RequestId, list[int]] = {runtime.submit(request): [] for request in requests}
    slots = []
    while events := runtime.step():
        for event in events:
            tokens[event.request].append(event.token)
        pool = runtime.activity().pool
        slots.append((pool.waste_tokens, pool.num_used))
    return [tuple(found) for found in tokens.values()], slots


def run_continuous(runtime: NativeRuntime, requests: Sequence[GenerationRequest], page_tokens: int) -> Outcome:
    start = time.perf_counter()
    outputs, slots = collect(runtime, requests)
    wall_s = time.perf_counter() - start
    empty, used = np.array(slots).sum(axis=0)
    return Outcome(sum(map(len, outputs)) / wall_s, outputs, float(empty / (used * page_tokens)))


def run_static(runtime: NativeRuntime, requests: Sequence[GenerationRequest], rows: int) -> Outcome:
    """Run batch after batch, every row as long as the batch's longest; tokens beyond a request's own length are not counted."""
    outputs: list[tuple[int, ...]] = []
    held, start = [], time.perf_counter()
    for first in range(0, len(requests), rows):
        batch = requests[first : first + rows]
        longest = max(request.max_new_tokens for request in batch)
        found, _ = collect(runtime, [GenerationRequest(request.prompt, longest) for request in batch])
        outputs += [tokens[: request.max_new_tokens] for tokens, request in zip(found, batch, strict=True)]
        held += [_filled(request, longest) for request in batch]
    wall_s = time.perf_counter() - start
    steps = sum(longest for _, longest in held)
    waste = 1 - sum(filled for filled, _ in held) / (steps * MAX_MODEL_LEN)
    return Outcome(sum(map(len, outputs)) / wall_s, outputs, waste)


def _filled(request: GenerationRequest, steps: int) -> tuple[int, int]:
    """Return the tokens of its own that a row holds, summed over the steps of its batch, and their number."""
    own = np.minimum(np.arange(1, steps + 1), request.max_new_tokens) + len(request.prompt)
    return int(own.sum()), steps


class TransformersArm:
    """The library's own generation over batches padded on the left."""

    def __init__(self, directory: Path):
        self._model = load_dequantized(directory)

    def run(self, requests: Sequence[GenerationRequest], rows: int) -> Outcome:
        outputs: list[tuple[int, ...]] = []
        start = time.perf_counter()
        for first in range(0, len(requests), rows):
            batch = requests[first : first + rows]
            width = max(len(request.prompt) for request in batch)
            ids = torch.tensor([[0] * (width - len(request.prompt)) + list(request.prompt) for request in batch])
            mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
            longest = max(request.max_new_tokens for request in batch)
            with torch.inference_mode():
                found = self._model.generate(
                    ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            outputs += [
                tuple(row[width : width + request.max_new_tokens].tolist()) for row, request in zip(found, batch, strict=True)
            ]
        return Outcome(sum(map(len, outputs)) / (time.perf_counter() - start), outputs, 0.0)


def measure(setting: Setting) -> list[Figure]:
    """Run both arms in interleaved rounds, each round with requests of its own, and return the figures."""
    config = read_model_config(setting.model)
    pages = setting.kv_tokens // setting.page_tokens
    plan = KvPlan(
        page_tokens=setting.page_tokens,
        num_pages=pages,
        bytes_per_token=2 * 4 * config.shape.num_layers * config.shape.num_kv_heads * config.shape.head_dim,
        max_batch=setting.max_batch,
        max_model_len=MAX_MODEL_LEN,
    )
    runtime = open_native(setting.model, plan)
    rounds = [draw_requests(config.shape.vocab_size, setting.num_requests, SEED + number) for number in range(setting.rounds)]
    collect(runtime, [GenerationRequest(request.prompt, 2) for request in rounds[0][:4]])  # warm-up
    arms = {
        "continuous": lambda number: run_continuous(runtime, rounds[number], setting.page_tokens),
        "static": lambda number: run_static(runtime, rounds[number], setting.static_rows),
    }
    if setting.compare_transformers:
        library = TransformersArm(setting.model)
        arms["transformers"] = lambda number: library.run(rounds[number], setting.static_rows)
    found = interleave(arms, setting.rounds)
    return _figures(setting, found, runtime.activity().num_preemptions)


def _figures(setting: Setting, found: dict[str, tuple[Outcome, ...]], num_preemptions: int) -> list[Figure]:
    case = f"{setting.model.name}-kv{setting.kv_tokens}"
    figures = []
    for arm, outcomes in found.items():
        speeds = [outcome.tok_per_s for outcome in outcomes]
        figures.append(
            Figure(f"{arm}-{case}", "tok_per_s", float(np.median(speeds)), "tok/s", min(speeds), max(speeds), len(speeds))
        )
    for arm in found.keys() - {"continuous"}:
        ratio = _ratio(found["continuous"], found[arm])
        name = "continuous_over_static_ratio" if arm == "static" else f"continuous_over_{arm}_ratio"
        bounds = ratio.interval
        figures.append(Figure(case, name, ratio.value, "ratio", bounds.lower, bounds.upper, ratio.num_pairs))
        pairs = [
            pair
            for ours, other in zip(found["continuous"], found[arm], strict=True)
            for pair in zip(ours.outputs, other.outputs, strict=True)
        ]
        equal = float(np.mean([left == right for left, right in pairs]))
        figures.append(Figure(f"{arm}-{case}", "equal_outputs_ratio", equal, "ratio", n=len(pairs)))
    for arm in ("continuous", "static"):
        waste = float(np.mean([outcome.waste_ratio for outcome in found[arm]]))
        figures.append(Figure(f"{arm}-{case}-page{setting.page_tokens}", "kv_waste_ratio", waste, "ratio", n=setting.rounds))
    figures.append(Figure(f"continuous-{case}", "preemptions_count", num_preemptions, "count", n=setting.rounds))
    return figures


def _ratio(top: Sequence[Outcome], bottom: Sequence[Outcome]) -> Ratio:
    return ratio_of_pairs([outcome.tok_per_s for outcome in top], [outcome.tok_per_s for outcome in bottom], seed=SEED)
