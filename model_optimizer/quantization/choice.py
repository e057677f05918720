"""Which assignment of formats a recipe means, and the plan and decisions that follow from it."""

from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.quantization.allocation import Allocation, allocate
from model_optimizer.quantization.breaker import GroupRule, Planned


def choose(rules: tuple[GroupRule, ...], recipe: WeightRecipe, sensitivity: dict[str, LayerSensitivity]) -> Allocation:
    """Return the assignment of least predicted damage that the recipe's budget allows.

    Raises:
        UnsupportedError: the smallest allowed formats exceed the budget.
    """
    options = tuple(tuple(rule.option(name, sensitivity) for name in rule.formats) for rule in rules)
    generous = sum(max(option.num_bytes for option in group) for group in options)
    return allocate(options, _budget_bytes(rules, recipe) or generous)


def planned(
    rules: tuple[GroupRule, ...], recipe: WeightRecipe, allocation: Allocation, second_look: Decision | None = None
) -> Planned:
    """Return every layer's format and why it got it; a budget's use is a decision."""
    plan, reasons = {}, {}
    for rule, name in zip(rules, allocation.formats, strict=True):
        for layer in rule.layers:
            plan[layer.name] = name
            reasons[layer.name] = "allocation" if len(rule.formats) > 1 else rule.reason
    budget_bytes = _budget_bytes(rules, recipe)
    if budget_bytes is None:
        return Planned(plan, reasons)
    num_weights = sum(layer.num_weights for rule in rules for layer in rule.layers)
    counts = {
        f"num_layers_{name.replace('-', '_')}": float(list(plan.values()).count(name)) for name in sorted(set(plan.values()))
    }
    numbers = {"budget_bytes": float(budget_bytes), "used_bytes": float(allocation.num_bytes), **counts}
    if second_look is None:
        numbers["predicted_kl_nats"] = allocation.damage_nats
    decision = Decision(
        subject="bit budget",
        choice=f"{8 * allocation.num_bytes / num_weights:.4f} of {recipe.bits_budget} bits per weight used",
        because="this assignment has the least predicted KL of all that fit"
        + ("; then a second look at it" if second_look else ""),
        numbers=numbers,
    )
    return Planned(plan, reasons, decisions=(decision, *((second_look,) if second_look else ())))


def _budget_bytes(rules: tuple[GroupRule, ...], recipe: WeightRecipe) -> int | None:
    num_weights = sum(layer.num_weights for rule in rules for layer in rule.layers)
    return int(recipe.bits_budget * num_weights / 8) if recipe.bits_budget else None
