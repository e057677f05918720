"""Which candidates a scan looks at: bit widths and methods become weight recipes, times the runtimes.

A profile that pins a precision leaves the unquantized baselines and that one format.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.quantization.layers import LinearLayer, fitting_formats, require_fit
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.strategy.config import Method, ScanConfig

FULL_BITS, INT8_BITS = 32, 8
GROUPED_BITS = (4, 3, 2)
INT8 = "int8-channel"
RTN: Method = "rtn"
AUTO = "auto"
LARGEST_GROUP = 64
"""Largest group that a recipe may use. Source: TOOLCHAIN's measured choice; 128 loses more for 0.125 bits a weight."""


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination that the profile allows; `unsupported` maps a label to the runtime's reason."""

    strategies: tuple[Strategy, ...]
    unsupported: dict[str, str]
    decisions: tuple[Decision, ...]
    pinned: str | None = None
    """The one format that the profile asks for, whatever it costs; None where the scan is free."""


def candidates(config: ScanConfig, layers: tuple[LinearLayer, ...], default_precision: str = AUTO) -> Space:
    """Return recipes x runtimes as strategies, most bits first, and which of them a runtime refuses.

    Raises:
        ConfigError: an unknown runtime or format, a bit width without a format, no format that fits `layers`, or no
            unquantized candidate to compare with.
        UnsupportedError: the pinned format does not fit some layer.
    """
    factories = {name: RUNTIMES.get(name) for name in config.runtimes}
    pinned = None if default_precision == AUTO else default_precision
    recipes, decisions = _free(config, layers) if pinned is None else _pinned(config, layers, pinned)
    strategies = tuple(Strategy(weights=weights, runtime=name) for weights in recipes for name in factories)
    answers = {strategy.label: factories[strategy.runtime].supports(strategy) for strategy in strategies}
    return Space(
        strategies=strategies,
        unsupported={label: answer.reason for label, answer in answers.items() if not answer.supported},
        decisions=(*decisions, *_eight_bit_decisions(config, recipes)),
        pinned=pinned,
    )


def _free(config: ScanConfig, layers: tuple[LinearLayer, ...]) -> tuple[list[WeightRecipe], list[Decision]]:
    """Return every bit width's recipes, and the group size that was taken for each grouped width."""
    if FULL_BITS not in config.bits:
        raise ConfigError(f"scan.bits is {list(config.bits)}; it must hold 32, the unquantized baseline of every ratio")
    recipes = [it for bits in sorted(set(config.bits), reverse=True) for it in _by_method(recipe(bits, layers), config.methods)]
    grouped = {name for it in recipes for name in it.formats if FORMATS.get(name).bits in GROUPED_BITS}
    return recipes, [_group_decision(name, layers) for name in sorted(grouped)]


def _pinned(config: ScanConfig, layers: tuple[LinearLayer, ...], format_name: str) -> tuple[list[WeightRecipe], list[Decision]]:
    """Return the unquantized recipe and those of the one format that the profile asks for."""
    require_fit(layers, format_name)
    wanted = WeightRecipe() if format_name == FULL_PRECISION else WeightRecipe(method=RTN, formats=(format_name,))
    decision = Decision(
        subject="precision",
        choice=format_name,
        because="quantization.default_precision pins it; scan.bits is ignored, and limits do not change the precision",
        numbers={"bits": FORMATS.get(format_name).bits, "num_ignored_bits": len(config.bits)},
    )
    return list(dict.fromkeys((WeightRecipe(), *_by_method(wanted, config.methods)))), [decision]


def _by_method(plain: WeightRecipe, methods: tuple[Method, ...]) -> list[WeightRecipe]:
    """Return the recipe once per method where methods differ: not in full precision, and not in 8 bits per channel."""
    if not plain.quantized or plain.formats == (INT8,):
        return [plain]
    return [plain.model_copy(update={"method": method}) for method in dict.fromkeys(methods)]


def recipe(bits: float, layers: tuple[LinearLayer, ...]) -> WeightRecipe:
    """Return how weights of `bits` bits are stored, by plain rounding: 32, 8, 4, 3, 2 are formats, others mixed budgets.

    A budget that int4 keeps is shared by int4 and int8; a smaller one by int2, int3, int4 and int8.

    Raises:
        ConfigError: no format has that many bits.
    """
    if bits == FULL_BITS:
        return WeightRecipe()
    if bits == INT8_BITS:
        return WeightRecipe(method=RTN, formats=(INT8,))
    if bits in GROUPED_BITS:
        return WeightRecipe(method=RTN, formats=(grouped_format(int(bits), layers),))
    if min(GROUPED_BITS) < bits < INT8_BITS:
        int4, int3, int2 = (grouped_format(width, layers) for width in GROUPED_BITS)
        if bits >= true_bits(int4, layers):
            return WeightRecipe(method=RTN, formats=(int4, INT8), bits_budget=bits)
        if bits >= (least := true_bits(int2, layers)):
            return WeightRecipe(method=RTN, formats=(int2, int3, int4, INT8), bits_budget=bits)
        raise ConfigError(
            f"scan.bits holds {bits:g}; a mixed budget counts scales too: at least {least:.4g} with {int2}, below 8"
        )
    raise ConfigError(f"scan.bits holds {bits:g}; known: 32 (unquantized), 8, 4, 3, 2, and mixed budgets between 2 and 8")


def grouped_format(bits: int, layers: tuple[LinearLayer, ...]) -> str:
    """Return the format of `bits` bits with the largest group, at most 64, that divides every layer's input width.

    Raises:
        ConfigError: none does.
    """
    sizes = {name: FORMATS.get(name).group_size for name in fitting_formats(layers) if FORMATS.get(name).bits == bits}
    fitting = {name: size for name, size in sizes.items() if size is not None and size <= LARGEST_GROUP}
    if not fitting:
        widths = sorted({layer.in_features for layer in layers})
        raise ConfigError(f"no int{bits} group fits the input widths {widths}; leave {bits} and mixed budgets out of scan.bits")
    return max(fitting, key=lambda name: fitting[name])


def true_bits(format_name: str, layers: tuple[LinearLayer, ...]) -> float:
    """Return bits per weight with scales and padding when every layer is stored in one format."""
    stored = sum(FORMATS.get(format_name).num_bytes(layer.out_features, layer.in_features) for layer in layers)
    return 8 * stored / sum(layer.num_weights for layer in layers)


def _group_decision(name: str, layers: tuple[LinearLayer, ...]) -> Decision:
    widths = ", ".join(str(width) for width in sorted({layer.in_features for layer in layers}))
    return Decision(
        subject=f"int{FORMATS.get(name).bits} group size",
        choice=name,
        because=f"it is the largest known group up to {LARGEST_GROUP} that divides every input width ({widths})",
        numbers={"group_size": FORMATS.get(name).group_size or 0},
    )


def _eight_bit_decisions(config: ScanConfig, recipes: list[WeightRecipe]) -> list[Decision]:
    """Say so where 8 bits per channel is scanned with plain rounding although other methods are asked for."""
    others = [method for method in dict.fromkeys(config.methods) if method != RTN]
    if not others or not any(it.formats == (INT8,) for it in recipes):
        return []
    return [
        Decision(
            subject=f"method of {INT8}",
            choice=RTN,
            because=f"plain rounding loses so little in 8 bits that {', '.join(others)} would only cost time",
            numbers={"num_recipes_left_out": len(others)},
        )
    ]
