"""Registries find variants by file and name the known ones when asked for another."""

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.registry import Registry


def test_get_lists_the_known_names_when_the_name_is_unknown() -> None:
    registry: Registry[int] = Registry("toy", "model_optimizer.traffic")
    registry.register("one")(1)
    registry.register("two")(2)
    assert registry.get("two") == 2
    with pytest.raises(ConfigError, match=r"unknown toy 'three'; known: one, two"):
        registry.get("three")


def test_register_refuses_a_second_claim() -> None:
    registry: Registry[int] = Registry("toy", "model_optimizer.traffic")
    registry.register("one")(1)
    with pytest.raises(AssertionError, match="twice"):
        registry.register("one")(2)
