"""Does calibration text have the lengths that requests have? A score, and the lengths that it lacks by name.

Lengths are compared, not words: a layer that has never seen position 3000 in calibration is quantized blindly there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.quantization.reading import READERS, reader_name
from model_optimizer.spec import Traffic
from model_optimizer.traffic.lengths import sample_requests

NUM_REQUESTS = 4096
"""Drawn from a profile's percentiles; stratified, so that a share of an octave is exact to about 1e-3."""
NOTABLE_RATIO = 0.05
"""An octave with less of the traffic than this is not named."""
UNDER_COVERED = 0.5
"""An octave whose share of the samples is below this part of its share of the traffic is under-covered."""
LOW_SCORE = 0.5
"""Below it most requests have lengths that calibration hardly holds, and a warning is given."""
PROMPT_NAMES = ("prompt_tokens", "input_tokens", "ContextTokens")
OUTPUT_NAMES = ("output_tokens", "completion_tokens", "GeneratedTokens")
"""Fields of a trace; the last are those of the Azure LLM inference trace."""


class Octave(Frozen):
    """Requests and samples of `lower` to `upper` tokens, as shares of all."""

    lower: int
    upper: int
    traffic_ratio: float
    calibration_ratio: float

    @property
    def under_covered(self) -> bool:
        return self.traffic_ratio >= NOTABLE_RATIO and self.calibration_ratio < UNDER_COVERED * self.traffic_ratio


class TrafficCoverage(Frozen):
    """How the lengths of calibration samples compare with those of requests (prompt and output together)."""

    score_ratio: float
    """Sum over octaves of the smaller share: 1 = the same distribution, 0 = no length in common."""
    distance_octaves: float
    """Wasserstein-1 distance of log2 lengths: by how many doublings a sample is off on the average."""
    reached_ratio: float
    """Share of the requests that are no longer than the longest sample."""
    longest_request: int
    octaves: tuple[Octave, ...]

    def gaps(self) -> tuple[str, ...]:
        """Name what is under-covered, one sentence each."""
        found = [
            f"{it.lower} to {it.upper} tokens: {it.traffic_ratio:.0%} of the traffic, {it.calibration_ratio:.0%} of the samples"
            for it in self.octaves
            if it.under_covered
        ]
        if self.reached_ratio < 1 - NOTABLE_RATIO:
            found.append(f"{1 - self.reached_ratio:.0%} of the traffic is longer than every sample")
        return tuple(found)


def cover(sample_lengths: Sequence[int], request_lengths: Sequence[int]) -> TrafficCoverage:
    """Compare two sets of lengths, both in tokens and not empty.

    Source: histogram intersection, Swain and Ballard 1991 ("Color indexing", section 3), over octaves.
    """
    from scipy.stats import wasserstein_distance

    samples, requests = np.asarray(sample_lengths), np.asarray(request_lengths)
    numbers = [_octaves(samples), _octaves(requests)]
    edges = range(int(min(map(np.min, numbers))), int(max(map(np.max, numbers))) + 1)
    shares = [[float(np.mean(found == octave)) for octave in edges] for found in numbers]
    octaves = tuple(
        Octave(lower=2 ** (octave - 1) + 1 if octave else 1, upper=2**octave, traffic_ratio=asked, calibration_ratio=given)
        for octave, given, asked in zip(edges, *shares, strict=True)
    )
    return TrafficCoverage(
        score_ratio=sum(min(it.traffic_ratio, it.calibration_ratio) for it in octaves),
        distance_octaves=float(wasserstein_distance(np.log2(samples), np.log2(requests))),
        reached_ratio=float(np.mean(requests <= samples.max())),
        longest_request=int(requests.max()),
        octaves=octaves,
    )


def _octaves(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array([(int(length) - 1).bit_length() for length in lengths])


def traffic_lengths(traffic: Traffic, max_model_len: int) -> tuple[int, ...]:
    """Return prompt and output tokens together of requests that look like the stated traffic."""
    return tuple(map(sum, sample_requests(traffic, max_model_len, NUM_REQUESTS, seed=0)))


def trace_lengths(path: Path) -> tuple[int, ...]:
    """Return prompt and output tokens together of every request of a trace (JSON, JSONL or Parquet).

    Raises:
        ConfigError: no such file, or a request without whole token counts.
    """
    if not path.is_file():
        raise ConfigError(f"traffic trace {path} does not exist; give a file with prompt_tokens and output_tokens per request")
    lengths = []
    for place, row in READERS.get(reader_name(path))(path):
        if isinstance(row, str):
            raise ConfigError(f"traffic trace {path}, {place}: {row}")
        lengths.append(_count(row, PROMPT_NAMES, path, place) + _count(row, OUTPUT_NAMES, path, place))
    if not lengths:
        raise ConfigError(f"traffic trace {path} has no requests")
    return tuple(max(1, length) for length in lengths)


def _count(row: Mapping[str, object], names: tuple[str, ...], path: Path, place: str) -> int:
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"traffic trace {path}, {place}: {names[0]} is {value!r}, not a count of tokens; known: {', '.join(names)}"
        )
    return value
