"""Interleaved measuring: A B, B A, A B, ... so that a slow drift of the machine hits every arm alike."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import Progress, Quiet

T = TypeVar("T")


def schedule(arms: tuple[str, ...], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, arm), every second round in reverse order: two arms give A B B A A B B A."""
    for number in range(num_rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield number, arm


def interleave(
    arms: Mapping[str, Callable[[int], T]], num_rounds: int, *, progress: Progress | None = None, label: str = "rounds"
) -> dict[str, tuple[T, ...]]:
    """Call every arm once per round (with the round's number) and return each arm's results in round order.

    Raises:
        ConfigError: no arms or no rounds.
    """
    if not arms or num_rounds < 1:
        raise ConfigError(f"interleaving takes at least one arm and one round; seen: {len(arms)} arms, {num_rounds} rounds")
    results: dict[str, list[T]] = {arm: [] for arm in arms}
    blocks = schedule(tuple(arms), num_rounds)
    for number, arm in (progress or Quiet()).track(blocks, label, num_rounds * len(arms)):
        results[arm].append(arms[arm](number))
    return {arm: tuple(found) for arm, found in results.items()}
