"""The allocation is exact: brute force on small cases, an integer program on a medium one."""

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from model_optimizer.errors import UnsupportedError
from model_optimizer.quantization.allocation import Option, allocate

Groups = tuple[tuple[Option, ...], ...]


def random_groups(seed: int, num_groups: int, num_options: int = 3) -> Groups:
    source = random.Random(seed)
    return tuple(
        tuple(
            Option(f"f{index}", source.randint(1, 40), source.expovariate(1)) for index in range(source.randint(1, num_options))
        )
        for _ in range(num_groups)
    )


def middle_budget(groups: Groups) -> int:
    sizes = [[option.num_bytes for option in options] for options in groups]
    return (sum(map(min, sizes)) + sum(map(max, sizes))) // 2


@pytest.mark.parametrize("seed", range(20))
def test_allocate_equals_brute_force(seed: int) -> None:
    groups = random_groups(seed, num_groups=6)
    budget = middle_budget(groups)
    choices = [c for c in itertools.product(*groups) if sum(option.num_bytes for option in c) <= budget]
    best = min(sum(option.damage_nats for option in choice) for choice in choices)
    found = allocate(groups, budget)
    assert found.damage_nats == pytest.approx(best, abs=1e-12)
    assert found.num_bytes <= budget


@pytest.mark.parametrize("seed", range(3))
def test_allocate_equals_an_integer_program(seed: int) -> None:
    groups = random_groups(100 + seed, num_groups=60)
    budget = middle_budget(groups)
    options = [option for group in groups for option in group]
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    once = LinearConstraint((owner == np.arange(len(groups))[:, None]).astype(float), 1, 1)
    fits = LinearConstraint(np.array([[option.num_bytes for option in options]], dtype=float), ub=budget)
    damage = np.array([option.damage_nats for option in options])
    solved = milp(damage, integrality=np.ones(len(options)), bounds=(0, 1), constraints=[once, fits], options={"mip_rel_gap": 0})
    assert allocate(groups, budget).damage_nats == pytest.approx(solved.fun, rel=1e-9)


def test_allocate_names_options_that_give_its_sums() -> None:
    groups = random_groups(7, num_groups=12)
    found = allocate(groups, middle_budget(groups))
    chosen = [next(o for o in options if o.format == name) for options, name in zip(groups, found.formats, strict=True)]
    assert found.num_bytes == sum(option.num_bytes for option in chosen)
    assert found.damage_nats == pytest.approx(sum(option.damage_nats for option in chosen))


def test_allocate_never_hurts_more_when_the_budget_grows() -> None:
    groups = random_groups(8, num_groups=15)
    smallest = sum(min(option.num_bytes for option in options) for options in groups)
    damages = [allocate(groups, budget).damage_nats for budget in range(smallest, smallest + 200, 7)]
    assert damages == sorted(damages, reverse=True)


def test_allocate_takes_fewer_bytes_when_damage_is_equal() -> None:
    assert allocate(((Option("large", 9, 1.0), Option("small", 4, 1.0)),), 100).formats == ("small",)


def test_allocate_refuses_a_budget_that_nothing_fits() -> None:
    with pytest.raises(UnsupportedError, match=r"budget of 6 bytes .* need 7 bytes"):
        allocate(((Option("a", 3, 1.0),), (Option("a", 4, 1.0), Option("b", 8, 0.0))), 6)
