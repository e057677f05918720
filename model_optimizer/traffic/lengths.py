"""Requests that look like the stated traffic: lengths from percentiles, prompts from real text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import GenerationRequest
from model_optimizer.spec import Lengths, Traffic


class RequestShape(NamedTuple):
    """Lengths of one request, in tokens."""

    prompt_tokens: int
    output_tokens: int


def length_at(lengths: Lengths, position: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the token counts at the quantiles `position` in [0, 1].

    The logarithm is linear between p50, p95 and max; below the median, where a profile states nothing, the curve is
    mirrored: length(u) = p50^2 / length(1 - u), never below 1.
    """
    knots = np.log([lengths.p50, lengths.p95, lengths.max])
    mirrored = np.maximum(position, 1 - position)
    above = np.interp(mirrored, [0.5, 0.95, 1.0], knots)
    logs = np.where(position < 0.5, 2 * knots[0] - above, above)
    return np.maximum(1, np.rint(np.exp(logs))).astype(np.int64)


def sample_requests(traffic: Traffic, max_model_len: int, num: int, seed: int) -> tuple[RequestShape, ...]:
    """Return `num` request shapes; the same arguments give the same shapes.

    Quantiles are stratified (one draw in each of `num` equal slices, shuffled), so that even a few dozen requests
    reproduce the percentiles. Where a request would not fit into `max_model_len`, first its output is cut (to half
    of it at most), then its prompt.

    Raises:
        ConfigError: fewer than one request, or a max_model_len below 2.
    """
    if num < 1 or max_model_len < 2:
        raise ConfigError(f"sampling needs num >= 1 and max_model_len >= 2; seen: {num}, {max_model_len}")
    generator = np.random.default_rng(seed)
    prompts = length_at(traffic.prompt_tokens, _stratified(num, generator))
    outputs = length_at(traffic.output_tokens, _stratified(num, generator))
    crowded = prompts + outputs > max_model_len
    outputs = np.where(crowded, np.minimum(outputs, max(1, max_model_len // 2)), outputs)
    prompts = np.minimum(prompts, max_model_len - outputs)
    return tuple(RequestShape(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True))


def prompt_of_length(text_tokens: Sequence[int], length: int, start: int = 0) -> tuple[int, ...]:
    """Return `length` token ids of the text from `start` on, beginning again at its end.

    Raises:
        ConfigError: the text has no tokens.
    """
    if not text_tokens:
        raise ConfigError("prompts are cut from held-out text, which has no tokens here; give more calibration text")
    return tuple(text_tokens[(start + offset) % len(text_tokens)] for offset in range(length))


def build_requests(shapes: Sequence[RequestShape], text_tokens: Sequence[int], seed: int) -> tuple[GenerationRequest, ...]:
    """Return one greedy request per shape, its prompt cut from a seeded place of the text; nothing stops it early."""
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, max(1, len(text_tokens)), size=len(shapes))
    return tuple(
        GenerationRequest(
            prompt=prompt_of_length(text_tokens, shape.prompt_tokens, int(start)), max_new_tokens=shape.output_tokens
        )
        for shape, start in zip(shapes, starts, strict=True)
    )


def _stratified(num: int, generator: np.random.Generator) -> NDArray[np.float64]:
    return np.asarray(generator.permutation((np.arange(num) + generator.random(num)) / num), dtype=np.float64)
