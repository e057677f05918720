"""Which formats each layer may get: the recipe's, less what the profile forbids or the KL breaker trips on.

Layers that serving engines fuse (q/k/v, gate/up) are judged together, since they must share a format.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.artifacts.repair import LayerRaise
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.quantization.allocation import Option
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.layers import LinearLayer, ModelLayers, matching_layers, require_fit, tie_groups

DEMANDED = "demanded by the profile"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Layers that share a format, the formats that they may get, and why these."""

    layers: tuple[LinearLayer, ...]
    formats: tuple[str, ...]
    reason: str

    def option(self, format_name: str, sensitivity: dict[str, LayerSensitivity]) -> Option:
        """Return what the group costs in one format: bytes as stored, predicted damage in nats."""
        weight_format = FORMATS.get(format_name)
        num_bytes = sum(weight_format.num_bytes(layer.out_features, layer.in_features) for layer in self.layers)
        return Option(format_name, num_bytes, sum(damage_of(sensitivity[layer.name], format_name) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class Planned:
    """What every layer gets, why, what a repair raised, and the decisions behind it."""

    formats: dict[str, str]
    reasons: dict[str, str]
    raised: tuple[LayerRaise, ...] = ()
    decisions: tuple[Decision, ...] = ()


def damage_of(layer: LayerSensitivity, format_name: str) -> float:
    """Return the predicted KL of one layer in a format, in nats; full precision does none."""
    return layer.predicted_kl_nats[format_name] if FORMATS.get(format_name).on_grid else 0.0


def group_rules(
    layers: ModelLayers, recipe: WeightRecipe, config: QuantizationConfig, sensitivity: dict[str, LayerSensitivity]
) -> tuple[tuple[GroupRule, ...], tuple[Decision, ...]]:
    """Return what every tie group may get, and the decisions that the breaker and the profile made.

    Raises:
        ConfigError: an unknown precision, a pattern that matches nothing, or two demands on one fused group.
    """
    demanded, decisions = _demands(layers, config)
    rules = []
    for group in tie_groups(layers.linears):
        demands = {demanded[layer.name] for layer in group if layer.name in demanded}
        if len(demands) > 1:
            names = ", ".join(f"{layer.name}={demanded.get(layer.name, 'free')}" for layer in group)
            raise ConfigError(f"layers that are fused when served must share a precision; seen: {names}; demand the same for all")
        if demands:
            rule = GroupRule(group, (demands.pop(),), DEMANDED)
            rules.append(rule)
            decisions += _extended_to_ties(rule, demanded)
            continue
        rule, tripped = _break(group, recipe, config.kl_breaker_nats, sensitivity)
        rules.append(rule)
        decisions += tripped
    return tuple(rules), tuple(decisions)


def suspects(
    plan: dict[str, str], sensitivity: dict[str, LayerSensitivity], floor: float
) -> tuple[dict[str, bool], tuple[Decision, ...]]:
    """Return which layers' outputs turn away from the original by more than the cosine floor allows."""
    flags = {layer: FORMATS.get(name).on_grid and sensitivity[layer].output_cosine[name] < floor for layer, name in plan.items()}
    decisions = tuple(
        Decision(
            subject=layer,
            choice=f"suspect in {plan[layer]}",
            because="the cosine of its outputs is below the floor",
            numbers={
                "cosine": sensitivity[layer].output_cosine[plan[layer]],
                "floor": floor,
                "kl_nats": sensitivity[layer].predicted_kl_nats[plan[layer]],
            },
        )
        for layer, flag in flags.items()
        if flag
    )
    return flags, decisions


def _demands(layers: ModelLayers, config: QuantizationConfig) -> tuple[dict[str, str], list[Decision]]:
    """Return layer -> precision where the profile leaves no choice; skips first, then overrides in order."""
    wanted = [(pattern, FULL_PRECISION, "skip_layers") for pattern in config.skip_layers]
    wanted += [(it, override.precision, "layer_overrides") for override in config.layer_overrides for it in override.layers]
    shapes = {layer.name: layer for layer in layers.linears}
    demanded: dict[str, str] = {}
    decisions = []
    for pattern, precision, source in wanted:
        weight_format = FORMATS.get(precision)
        found = matching_layers(pattern, layers)
        if not found and weight_format.on_grid:
            raise UnsupportedError(
                f"{source}: {pattern!r} names only layers that stay in full precision; {precision} is not possible there"
            )
        require_fit(tuple(shapes[name] for name in found), precision)
        demanded |= dict.fromkeys(found, precision)
        decisions.append(
            Decision(
                subject=pattern, choice=precision, because=f"the profile says so in {source}", numbers={"num_layers": len(found)}
            )
        )
    return demanded, decisions


def _extended_to_ties(rule: GroupRule, demanded: dict[str, str]) -> list[Decision]:
    """Say so when a demand on some members of a fused group also binds the others."""
    return [
        Decision(
            subject=layer.name, choice=rule.formats[0], because="it is fused when served with a layer that the profile names"
        )
        for layer in rule.layers
        if layer.name not in demanded
    ]


def _break(
    group: tuple[LinearLayer, ...], recipe: WeightRecipe, limit_nats: float, sensitivity: dict[str, LayerSensitivity]
) -> tuple[GroupRule, list[Decision]]:
    """Drop formats in which one layer alone exceeds the limit; a group that has none left keeps full precision."""
    worst = {
        name: max((sensitivity[layer.name].predicted_kl_nats[name], layer.name) for layer in group) for name in recipe.formats
    }
    allowed = tuple(name for name in recipe.formats if worst[name][0] <= limit_nats)
    decisions = [
        Decision(
            subject=worst[name][1],
            choice=f"not {name}" if allowed else f"{FULL_PRECISION} instead of {name}",
            because="the KL breaker trips on this layer alone",
            numbers={"kl_nats": worst[name][0], "limit_nats": limit_nats, "num_layers_tied": len(group)},
        )
        for name in recipe.formats
        if name not in allowed
    ]
    if allowed:
        return GroupRule(group, allowed, "recipe"), decisions
    return GroupRule(group, (FULL_PRECISION,), "KL breaker"), decisions
