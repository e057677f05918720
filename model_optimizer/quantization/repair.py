"""Which layers are guilty of a rejected accuracy gate, and what they are raised to.

The gate says how far the loss may lie beyond its margin (the far end of its interval). Predicted damage is taken to fall
in the same proportion, and half of that again, so that the next gate has room. Among all ways to get there by raising
layers (never lowering one), the one of fewest bytes is taken, exactly. The layers that it raises are the guilty ones.
"""

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.artifacts.repair import LayerRaise
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.verification import Verification
from model_optimizer.decisions import Decision
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.quantization.allocation import Option, allocate_within_damage
from model_optimizer.quantization.breaker import DEMANDED, GroupRule, Planned, damage_of
from model_optimizer.quantization.layers import LinearLayer, fitting_formats
from model_optimizer.runtimes.registry import RUNTIMES

SAFETY_RATIO = 0.5
"""Aimed share of the damage at which the gate would just accept: room for the gate's interval."""
ROUNDING_RATIO = 1e-9
"""Room for sums that are taken in another order."""
SMALLEST_CUT_RATIO, LARGEST_CUT_RATIO = 0.01, 0.5
"""Bounds on what is left of the predicted damage after one round: a gate near its floor says little about proportion."""


def repair(rules: tuple[GroupRule, ...], rejected: Attempt, sensitivity: dict[str, LayerSensitivity]) -> Planned:
    """Return the rejected plan with its most harmful layers raised.

    `rules` are the groups of layers that must share a format; a group that the profile fixes stays as it is.
    """
    before = {layer.layer: layer.format for layer in rejected.quantized.artifact.plan}
    linears = tuple(layer for rule in rules for layer in rule.layers)
    ladder = _ladder(linears, rejected.strategy)
    options = tuple(_options(rule, before, ladder, sensitivity) for rule in rules)
    share, because = _remaining_share(rejected.verification.artifact)
    damage = sum(damage_of(sensitivity[layer], name) for layer, name in before.items())
    floor = sum(min(option.damage_nats for option in group) for group in options)
    allocation = allocate_within_damage(options, max(damage * share, floor * (1 + ROUNDING_RATIO)))
    after = {layer.name: name for rule, name in zip(rules, allocation.formats, strict=True) for layer in rule.layers}
    raised = _raised(before, after, sensitivity)
    decision = Decision(
        subject=f"repair {rejected.round + 1}",
        choice=f"{len(raised)} of {len(linears)} layers raised",
        because=because,
        numbers={
            "predicted_before_nats": damage,
            "aimed_nats": damage * share,
            "predicted_after_nats": allocation.damage_nats,
            "after_bytes": allocation.num_bytes,
        },
    )
    guilty = tuple(_decision(it, rejected.round + 1) for it in raised)
    return Planned(after, _reasons(rules, before, after, rejected.round + 1), raised, (decision, *guilty))


def _ladder(linears: tuple[LinearLayer, ...], strategy: Strategy) -> tuple[str, ...]:
    """Return the formats that fit every layer and that the candidate's runtime computes, and full precision."""
    runtime, method = RUNTIMES.get(strategy.runtime), strategy.weights.method
    able = [
        name
        for name in fitting_formats(linears)
        if runtime.supports(Strategy(weights=WeightRecipe(method=method, formats=(name,)), runtime=strategy.runtime)).supported
    ]
    return (*able, FULL_PRECISION)


def _options(
    rule: GroupRule, before: dict[str, str], ladder: tuple[str, ...], sensitivity: dict[str, LayerSensitivity]
) -> tuple[Option, ...]:
    """Return the group's present form and everything above it that is predicted to do less damage."""
    present = before[rule.layers[0].name]
    now = rule.option(present, sensitivity)
    if rule.reason == DEMANDED:
        return (now,)
    higher = [rule.option(name, sensitivity) for name in ladder if FORMATS.get(name).bits > FORMATS.get(present).bits]
    return (now, *(option for option in higher if option.damage_nats < now.damage_nats))


def _remaining_share(verification: Verification) -> tuple[float, str]:
    """Return which share of the predicted damage may stay, from the gate that lies furthest beyond its margin."""
    guilty = [row for row in verification.golden if row.gates and row.verdict is Verdict.REJECT and row.interval.lower < 0]
    if not guilty:
        return LARGEST_CUT_RATIO, "accuracy was rejected without a loss on a golden set; half of the predicted damage has to go"
    worst = min(guilty, key=lambda row: row.margin / -row.interval.lower)
    share = SAFETY_RATIO * worst.margin / -worst.interval.lower
    where = worst.golden_set if worst.slice is None else f"{worst.golden_set}/{worst.slice}"
    because = f"{where} lost {-worst.difference:.4f}, at most {-worst.interval.lower:.4f}, where {worst.margin:g} are allowed"
    return min(max(share, SMALLEST_CUT_RATIO), LARGEST_CUT_RATIO), because


def _raised(before: dict[str, str], after: dict[str, str], sensitivity: dict[str, LayerSensitivity]) -> tuple[LayerRaise, ...]:
    """Return the layers whose format changed, the largest predicted gain first."""
    found = [
        LayerRaise(
            layer=layer,
            before=before[layer],
            after=name,
            kl_before_nats=damage_of(sensitivity[layer], before[layer]),
            kl_after_nats=damage_of(sensitivity[layer], name),
        )
        for layer, name in after.items()
        if name != before[layer]
    ]
    return tuple(sorted(found, key=lambda it: (it.kl_after_nats - it.kl_before_nats, it.layer)))


def _reasons(rules: tuple[GroupRule, ...], before: dict[str, str], after: dict[str, str], number: int) -> dict[str, str]:
    return {
        layer.name: f"repair {number}" if after[layer.name] != before[layer.name] else rule.reason
        for rule in rules
        for layer in rule.layers
    }


def _decision(raised: LayerRaise, number: int) -> Decision:
    return Decision(
        subject=raised.layer,
        choice=f"{raised.after} instead of {raised.before}",
        because=f"repair {number}: it is among the layers whose damage is dearest for its bytes",
        numbers={"before_nats": raised.kl_before_nats, "after_nats": raised.kl_after_nats},
    )
