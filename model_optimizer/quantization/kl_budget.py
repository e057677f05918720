"""The cumulative budget: what all layers together may do, beside the breaker that looks at one layer alone.

Where a plan's predicted KL exceeds it, layers are raised to formats that do less harm, at last to full precision, for the
fewest bytes, exactly. It wins over a budget of bits, and says by how much.
"""

from model_optimizer.artifacts.quantized import MOST_GROWTH_NATS, LayerSensitivity, Sensitivity
from model_optimizer.decisions import Decision
from model_optimizer.formats.registry import FULL_PRECISION
from model_optimizer.quantization.allocation import Option, allocate_within_damage
from model_optimizer.quantization.breaker import DEMANDED, GroupRule, Planned, damage_of

REASON = "KL budget"
BISECTIONS = 60


def keep_kl_budget(chosen: Planned, rules: tuple[GroupRule, ...], sensitivity: Sensitivity, limit_nats: float | None) -> Planned:
    """Return the plan, with layers raised where its predicted KL exceeds `limit_nats`; None = no limit.

    Raises:
        UnsupportedError: what the profile demands for some layers exceeds the limit by itself.
    """
    by_layer = {layer.layer: layer for layer in sensitivity.layers}
    before = sum(damage_of(by_layer[layer], name) for layer, name in chosen.formats.items())
    if limit_nats is None or sensitivity.total_kl_nats(before) <= limit_nats:
        return chosen
    options = tuple(_options(rule, chosen.formats, by_layer) for rule in rules)
    allocation = allocate_within_damage(options, largest_sum_nats(sensitivity, limit_nats))
    formats = {layer.name: name for rule, name in zip(rules, allocation.formats, strict=True) for layer in rule.layers}
    raised = [layer for layer, name in formats.items() if name != chosen.formats[layer]]
    present = sum(
        next(it for it in group if it.format == chosen.formats[rule.layers[0].name]).num_bytes
        for rule, group in zip(rules, options, strict=True)
    )
    decision = Decision(
        subject=REASON,
        choice=f"{len(raised)} of {len(formats)} layers raised",
        because="the predicted KL of all layers together exceeds quantization.kl_budget_nats; this way costs the fewest bytes",
        numbers={
            "limit_nats": limit_nats,
            "predicted_before_nats": sensitivity.total_kl_nats(before),
            "predicted_after_nats": sensitivity.total_kl_nats(allocation.damage_nats),
            "added_bytes": allocation.num_bytes - present,
        },
    )
    return Planned(formats, chosen.reasons | dict.fromkeys(raised, REASON), chosen.raised, (*chosen.decisions, decision))


def largest_sum_nats(sensitivity: Sensitivity, limit_nats: float) -> float:
    """Return the largest sum over layers whose predicted KL keeps the limit; law: `total_kl_nats` of it is at most the limit."""
    low, high = 0.0, limit_nats if sensitivity.growth_per_nat >= 0 else max(2 * limit_nats, MOST_GROWTH_NATS)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sensitivity.total_kl_nats(middle) <= limit_nats else (low, middle)
    return low


def _options(rule: GroupRule, plan: dict[str, str], sensitivity: dict[str, LayerSensitivity]) -> tuple[Option, ...]:
    """Return the group's present form, and those of its formats and full precision that are predicted to do less damage."""
    now = rule.option(plan[rule.layers[0].name], sensitivity)
    if rule.reason == DEMANDED:
        return (now,)
    others = [rule.option(name, sensitivity) for name in dict.fromkeys((*rule.formats, FULL_PRECISION)) if name != now.format]
    return (now, *(option for option in others if option.damage_nats < now.damage_nats))
