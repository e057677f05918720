"""A repair raises as few bytes as reach the aimed damage, never lowers, and leaves what the profile fixes."""

import itertools

import pytest
from attempt_fixtures import attempt, verification

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.breaker import DEMANDED, GroupRule
from model_optimizer.quantization.layers import LinearLayer
from model_optimizer.quantization.repair import SAFETY_RATIO, repair

INT4 = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64",)), runtime="onnxruntime")
LADDER = ("int4-g64", "int8-channel", "float32")
DAMAGE = {"a": 0.4, "b": 0.1, "c": 0.3, "d": 0.2}


def rules(**reasons: str) -> tuple[GroupRule, ...]:
    return tuple(
        GroupRule((LinearLayer(name, 64 * (1 + index), 128),), ("int4-g64",), reasons.get(name, "recipe"))
        for index, name in enumerate(DAMAGE)
    )


def sensitivity() -> dict[str, LayerSensitivity]:
    def row(name: str, nats: float) -> LayerSensitivity:
        damage = {other: nats * 4.0 ** (4 - FORMATS.get(other).bits) for other in FORMATS.names() if FORMATS.get(other).on_grid}
        cosine = dict.fromkeys(damage, 1.0)
        return LayerSensitivity(layer=name, num_weights=1, predicted_kl_nats=damage, output_cosine=cosine, weight_variance=1.0)

    return {name: row(name, nats) for name, nats in DAMAGE.items()}


def rejected(difference: float = -0.2, **formats: str):
    plan = {name: (formats.get(name, "int4-g64"), 64) for name in DAMAGE}
    return attempt(INT4, verification(Verdict.REJECT, difference=difference, margin=0.02), plan=plan)


def size(formats: dict[str, str]) -> int:
    shapes = {rule.layers[0].name: rule.layers[0] for rule in rules()}
    return sum(FORMATS.get(name).num_bytes(shapes[layer].out_features, 128) for layer, name in formats.items())


def damage(formats: dict[str, str]) -> float:
    table = sensitivity()
    return sum(table[layer].predicted_kl_nats[name] if FORMATS.get(name).on_grid else 0.0 for layer, name in formats.items())


@pytest.mark.parametrize("difference", [-0.03, -0.05, -0.1, -0.3])
def test_repair_takes_the_fewest_bytes_that_reach_the_aim(difference: float) -> None:
    found = repair(rules(), rejected(difference), sensitivity())
    aim = sum(DAMAGE.values()) * min(0.5, SAFETY_RATIO * 0.02 / (0.01 - difference))  # the interval is 0.01 to either side
    ways = [dict(zip(DAMAGE, names, strict=True)) for names in itertools.product(LADDER, repeat=len(DAMAGE))]
    best = min(size(way) for way in ways if damage(way) <= aim)
    assert damage(found.formats) <= aim
    assert size(found.formats) == best


def test_repair_raises_more_for_a_larger_loss() -> None:
    small, large = (repair(rules(), rejected(loss), sensitivity()) for loss in (-0.03, -0.3))
    assert size(small.formats) < size(large.formats)
    assert damage(small.formats) > damage(large.formats)


def test_repair_names_the_raised_layers_most_harmful_first() -> None:
    found = repair(rules(), rejected(-0.05), sensitivity())
    gains = [row.kl_before_nats - row.kl_after_nats for row in found.raised]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    assert {row.layer for row in found.raised} == {name for name, form in found.formats.items() if form != "int4-g64"}
    assert {decision.subject for decision in found.decisions} >= {row.layer for row in found.raised}
    assert all(found.reasons[row.layer] == "repair 1" for row in found.raised)


def test_repair_never_lowers_a_layer() -> None:
    found = repair(rules(), rejected(-0.03, a="float32", b="int8-channel"), sensitivity())
    assert found.formats["a"] == "float32"
    assert found.formats["b"] in ("int8-channel", "float32")


def test_repair_leaves_what_the_profile_demands() -> None:
    found = repair(rules(a=DEMANDED), rejected(-0.3), sensitivity())
    assert found.formats["a"] == "int4-g64"
    assert {found.formats[name] for name in "bcd"} == {"float32"}  # the aim is out of reach: as near as the rest allows


def test_repair_offers_only_what_the_runtime_computes() -> None:
    found = repair(rules(), rejected(-0.3), sensitivity())
    assert set(found.formats.values()) <= {"int4-g32", "int4-g64", "int4-g128", "int8-channel", "float32"}


def test_repair_halves_the_damage_when_no_golden_set_shows_a_loss() -> None:
    found = repair(rules(), rejected(0.0), sensitivity())
    assert damage(found.formats) <= 0.5 * sum(DAMAGE.values())
