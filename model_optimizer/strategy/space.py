"""Which candidates a scan looks at: bit widths become weight recipes, times the runtimes."""

from dataclasses import dataclass

from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.layers import LinearLayer, fitting_formats
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.strategy.config import ScanConfig

FULL_BITS, INT8_BITS, INT4_BITS = 32, 8, 4
INT8 = "int8-channel"
LARGEST_GROUP = 64
"""Largest int4 group that a recipe may use. Source: TOOLCHAIN's measured choice; 128 loses more for 0.125 bits a weight."""


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination that the profile allows; `unsupported` maps a label to the runtime's reason."""

    strategies: tuple[Strategy, ...]
    unsupported: dict[str, str]
    decisions: tuple[Decision, ...]


def candidates(config: ScanConfig, layers: tuple[LinearLayer, ...]) -> Space:
    """Return bits x runtimes as strategies, most bits first, and which of them a runtime refuses.

    Raises:
        ConfigError: an unknown runtime, a bit width without a format, no format that fits `layers`, or no
            unquantized candidate to compare with.
    """
    factories = {name: RUNTIMES.get(name) for name in config.runtimes}
    if FULL_BITS not in config.bits:
        raise ConfigError(f"scan.bits is {list(config.bits)}; it must hold 32, the unquantized baseline of every ratio")
    recipes = [recipe(bits, layers) for bits in sorted(set(config.bits), reverse=True)]
    strategies = tuple(Strategy(weights=weights, runtime=name) for weights in recipes for name in factories)
    answers = {strategy.label: factories[strategy.runtime].supports(strategy) for strategy in strategies}
    groups = {name for weights in recipes for name in weights.formats if FORMATS.get(name).bits == INT4_BITS}
    return Space(
        strategies=strategies,
        unsupported={label: answer.reason for label, answer in answers.items() if not answer.supported},
        decisions=tuple(_group_decision(name, layers) for name in sorted(groups)),
    )


def recipe(bits: float, layers: tuple[LinearLayer, ...]) -> WeightRecipe:
    """Return how weights of `bits` bits are stored: 32, 8, 4 are formats, between 4 and 8 lies a mixed budget.

    Raises:
        ConfigError: no format has that many bits.
    """
    if bits == FULL_BITS:
        return WeightRecipe()
    if bits == INT8_BITS:
        return WeightRecipe(method="rtn", formats=(INT8,))
    if bits == INT4_BITS:
        return WeightRecipe(method="rtn", formats=(int4_format(layers),))
    if INT4_BITS < bits < INT8_BITS:
        int4 = int4_format(layers)
        if bits < (least := true_bits(int4, layers)):
            raise ConfigError(
                f"scan.bits holds {bits:g}; a mixed budget counts scales too: at least {least:.4g} with {int4}, below 8"
            )
        return WeightRecipe(method="rtn", formats=(int4, INT8), bits_budget=bits)
    raise ConfigError(f"scan.bits holds {bits:g}; known: 32 (unquantized), 8, 4, and mixed budgets between 4 and 8")


def int4_format(layers: tuple[LinearLayer, ...]) -> str:
    """Return the int4 format with the largest group, at most 64, that divides every layer's input width.

    Raises:
        ConfigError: none does.
    """
    sizes = {name: FORMATS.get(name).group_size for name in fitting_formats(layers) if FORMATS.get(name).bits == INT4_BITS}
    fitting = {name: size for name, size in sizes.items() if size is not None and size <= LARGEST_GROUP}
    if not fitting:
        widths = sorted({layer.in_features for layer in layers})
        raise ConfigError(f"no int4 group fits the input widths {widths}; leave 4 and mixed budgets out of scan.bits")
    return max(fitting, key=lambda name: fitting[name])


def true_bits(format_name: str, layers: tuple[LinearLayer, ...]) -> float:
    """Return bits per weight with scales and padding when every layer is stored in one format."""
    stored = sum(FORMATS.get(format_name).num_bytes(layer.out_features, layer.in_features) for layer in layers)
    return 8 * stored / sum(layer.num_weights for layer in layers)


def _group_decision(name: str, layers: tuple[LinearLayer, ...]) -> Decision:
    widths = ", ".join(str(width) for width in sorted({layer.in_features for layer in layers}))
    return Decision(
        subject="int4 group size",
        choice=name,
        because=f"it is the largest known group up to {LARGEST_GROUP} that divides every input width ({widths})",
        numbers={"group_size": FORMATS.get(name).group_size or 0},
    )
