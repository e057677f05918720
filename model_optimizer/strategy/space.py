"""Which candidates a scan looks at: bit widths become weight recipes, times the runtimes."""

from collections.abc import Iterable
from dataclasses import dataclass

from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.strategy.config import ScanConfig

FULL_BITS, INT8_BITS, INT4_BITS = 32, 8, 4
INT4_GROUPS = (64, 32, 16)
"""Group sizes of int4, largest first: a larger one spends fewer bytes on scales."""


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination that the profile allows; `unsupported` maps a label to the runtime's reason."""

    strategies: tuple[Strategy, ...]
    unsupported: dict[str, str]
    decisions: tuple[Decision, ...]


def candidates(config: ScanConfig, in_features: Iterable[int]) -> Space:
    """Return bits x runtimes as strategies, unquantized ones first, and which of them a runtime refuses.

    `in_features` are the input widths of the model's linear layers.

    Raises:
        ConfigError: an unknown runtime, a bit width without a format, or no unquantized candidate to compare with.
    """
    if FULL_BITS not in config.bits:
        raise ConfigError(f"scan.bits is {list(config.bits)}; it must hold 32, the unquantized baseline of every ratio")
    factories = {name: RUNTIMES.get(name) for name in config.runtimes}
    group = int4_group(in_features)
    recipes = [recipe(bits, group) for bits in sorted(set(config.bits), reverse=True)]
    strategies = tuple(Strategy(weights=weights, runtime=name) for weights in recipes for name in factories)
    answers = {strategy.label: factories[strategy.runtime].supports(strategy) for strategy in strategies}
    because = f"{group} is the largest of {INT4_GROUPS} that divides every linear layer's input width"
    decision = Decision(subject="int4 group size", choice=f"int4-g{group}", because=because, numbers={"num_group_weights": group})
    return Space(
        strategies=strategies,
        unsupported={label: answer.reason for label, answer in answers.items() if not answer.supported},
        decisions=(decision,) if any(bits < INT8_BITS for bits in config.bits) else (),
    )


def recipe(bits: float, group: int) -> WeightRecipe:
    """Return how weights of `bits` bits are stored: 32, 8, 4 are formats, between 4 and 8 lies a mixed budget.

    Raises:
        ConfigError: no format has that many bits.
    """
    int4, int8 = f"int4-g{group}", "int8-channel"
    if bits == FULL_BITS:
        return WeightRecipe()
    if bits == INT8_BITS:
        return WeightRecipe(method="rtn", formats=(int8,))
    if bits == INT4_BITS:
        return WeightRecipe(method="rtn", formats=(int4,))
    if INT4_BITS < bits < INT8_BITS:
        return WeightRecipe(method="rtn", formats=(int4, int8), bits_budget=bits)
    raise ConfigError(f"scan.bits holds {bits:g}; known: 32 (unquantized), 8, 4, and mixed budgets between 4 and 8")


def int4_group(in_features: Iterable[int]) -> int:
    """Return the largest int4 group that divides every input width.

    Raises:
        ConfigError: none does.
    """
    widths = sorted(set(in_features))
    for group in INT4_GROUPS:
        if all(width % group == 0 for width in widths):
            return group
    raise ConfigError(
        f"no int4 group of {INT4_GROUPS} divides the input widths {widths}; leave 4 and mixed budgets out of scan.bits"
    )
