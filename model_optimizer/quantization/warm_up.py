"""Static input ranges from the first requests, within bounds around the offline ones, shared through a ScaleStore.

    range = largest magnitude over the accepted requests, lifted to `lowest_ratio` of the offline range
    a request is accepted if no layer's input exceeds `highest_ratio` of its offline range

The first requests are whatever users send. One hostile or broken request must not set the scales of all later ones, hence the
bounds, and what is refused is named. If more than `most_rejected_ratio` are refused the offline ranges stay: then it is they, or
the traffic, that a person must look at.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import ScaleStore

log = logging.getLogger(__name__)

NUM_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far warm ranges may leave the offline ones.

    A step twice as large costs one bit of the smallest inputs; one half as large cuts what offline text did reach.
    """

    lowest_ratio: float = 0.5
    highest_ratio: float = 2.0
    most_rejected_ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.lowest_ratio <= 1 <= self.highest_ratio < math.inf:
            raise ConfigError(f"warm-up bounds {self.lowest_ratio:g} to {self.highest_ratio:g} must enclose 1; e.g. 0.5 to 2")


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that did not count, and the layer that tells why."""

    request: str
    layer: str
    value: float
    highest: float

    def __str__(self) -> str:
        return f"request {self.request}: input of {self.layer} reaches {self.value:.4g}, at most {self.highest:.4g} is believed"


@dataclass(frozen=True, slots=True)
class WarmRanges:
    """The ranges to use, and where they come from."""

    ranges: dict[str, float]
    origin: Literal["cached", "measured", "offline"]
    num_accepted: int = 0
    rejections: tuple[Rejection, ...] = ()
    lifted: tuple[str, ...] = ()
    """Layers whose requests reached so little that the lower bound counts."""


@dataclass(slots=True)
class ScaleCollector:
    """Takes the input peaks of the first requests, one request after another."""

    offline: Mapping[str, float]
    bounds: Bounds = Bounds()
    num_requests: int = NUM_REQUESTS
    _largest: dict[str, float] = field(default_factory=dict)
    _rejections: list[Rejection] = field(default_factory=list)
    _num_accepted: int = 0

    @property
    def complete(self) -> bool:
        """Return whether as many requests were seen as were asked for, accepted or not."""
        return self._num_accepted + len(self._rejections) >= self.num_requests

    def observe(self, request: str, peaks: Mapping[str, float]) -> Rejection | None:
        """Count one request's largest input magnitudes by layer; return why it does not count, or None.

        Raises:
            ConfigError: the layers are not those of the offline ranges.
        """
        if peaks.keys() != self.offline.keys():
            odd = sorted(peaks.keys() ^ self.offline.keys())
            raise ConfigError(
                f"request {request} and the offline ranges differ in layers: {', '.join(odd[:3])}; give all of them"
            )
        for layer, value in peaks.items():
            highest = self.bounds.highest_ratio * self.offline[layer]
            if not value <= highest:
                rejection = Rejection(request, layer, value, highest)
                self._rejections.append(rejection)
                log.warning("%s; it does not count", rejection)
                return rejection
        self._num_accepted += 1
        self._largest = {layer: max(value, self._largest.get(layer, 0.0)) for layer, value in peaks.items()}
        return None

    def result(self) -> WarmRanges:
        """Return what the requests so far come to."""
        seen, rejected = self._num_accepted + len(self._rejections), tuple(self._rejections)
        if not self._num_accepted or len(rejected) > self.bounds.most_rejected_ratio * seen:
            log.warning("%d of %d warm-up requests were refused; the offline ranges stay", len(rejected), seen)
            return WarmRanges(dict(self.offline), "offline", self._num_accepted, rejected)
        lowest = {layer: self.bounds.lowest_ratio * value for layer, value in self.offline.items()}
        lifted = tuple(layer for layer, value in self._largest.items() if value < lowest[layer])
        ranges = {layer: max(value, lowest[layer]) for layer, value in self._largest.items()}
        return WarmRanges(ranges, "measured", self._num_accepted, rejected, lifted)


def warm_ranges(
    store: ScaleStore, key: str, collector: ScaleCollector, requests: Iterable[tuple[str, Mapping[str, float]]]
) -> WarmRanges:
    """Return stored ranges that the bounds allow; else those of the first requests, which are stored then.

    `requests` gives (name, input peaks by layer) and is read only as far as needed. A store that fails changes nothing but the
    time that this takes.
    """
    stored = store.read(key)
    if stored is not None and _is_believed(stored, collector):
        return WarmRanges(stored, "cached")
    for name, peaks in requests:
        collector.observe(name, peaks)
        if collector.complete:
            break
    found = collector.result()
    if found.origin == "measured" and collector.complete:
        store.write(key, found.ranges)
    return found


def _is_believed(stored: Mapping[str, float], collector: ScaleCollector) -> bool:
    """Return whether every stored range lies within the bounds; the first that does not is warned of."""
    if stored.keys() != collector.offline.keys():
        log.warning("stored input ranges are of other layers; they are ignored")
        return False
    for layer, value in stored.items():
        lowest, highest = (
            ratio * collector.offline[layer] for ratio in (collector.bounds.lowest_ratio, collector.bounds.highest_ratio)
        )
        if not lowest <= value <= highest:
            log.warning(
                "the stored input range %.4g of %s lies outside %.4g to %.4g; all are ignored", value, layer, lowest, highest
            )
            return False
    return True
