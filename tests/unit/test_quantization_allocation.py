"""The allocation is exact: brute force on small cases, an integer program on a medium one."""

import itertools
import random
import time

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from model_optimizer.errors import UnsupportedError
from model_optimizer.quantization.allocation import Option, allocate, frontier

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


def integer_program(groups: Groups, budget: int) -> float:
    """Return the least damage within the budget as HiGHS finds it."""
    options = [option for group in groups for option in group]
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    once = LinearConstraint((owner == np.arange(len(groups))[:, None]).astype(float), 1, 1)
    fits = LinearConstraint(np.array([[option.num_bytes for option in options]], dtype=float), ub=budget)
    damage = np.array([option.damage_nats for option in options])
    solved = milp(damage, integrality=np.ones(len(options)), bounds=(0, 1), constraints=[once, fits], options={"mip_rel_gap": 0})
    return float(solved.fun)


@pytest.mark.parametrize("seed", range(3))
def test_allocate_equals_an_integer_program(seed: int) -> None:
    groups = random_groups(100 + seed, num_groups=60)
    budget = middle_budget(groups)
    assert allocate(groups, budget).damage_nats == pytest.approx(integer_program(groups, budget), rel=1e-9)


@pytest.mark.parametrize("block", range(5))
def test_allocate_and_frontier_equal_an_integer_program_in_many_small_cases(block: int) -> None:
    for seed in range(1000 + 50 * block, 1000 + 50 * (block + 1)):
        source = random.Random(seed)
        groups = random_groups(seed, num_groups=source.randint(2, 12), num_options=source.randint(2, 7))
        smallest, largest = (sum(pick(it.num_bytes for it in group) for group in groups) for pick in (min, max))
        budget = source.randint(smallest, largest)
        certified = integer_program(groups, budget)
        assert allocate(groups, budget).damage_nats == pytest.approx(certified, rel=1e-9, abs=1e-9)
        assert frontier(groups).within_bytes(budget).damage_nats == pytest.approx(certified, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_frontier_holds_exactly_the_choices_that_none_beats(seed: int) -> None:
    groups = random_groups(200 + seed, num_groups=6)
    sums = {(sum(o.num_bytes for o in c), sum(o.damage_nats for o in c)) for c in itertools.product(*groups)}
    best = sorted(it for it in sums if not any(o != it and o[0] <= it[0] and o[1] <= it[1] for o in sums))
    found = frontier(groups)
    assert found.num_bytes.tolist() == [num_bytes for num_bytes, _ in best]
    assert found.damage_nats == pytest.approx([damage for _, damage in best])


def test_frontier_traces_every_point_back_to_options_that_give_it() -> None:
    groups = random_groups(9, num_groups=10)
    found = frontier(groups)
    for position, num_bytes in enumerate(found.num_bytes.tolist()):
        allocation = found.at(position)
        chosen = [next(o for o in group if o.format == name) for group, name in zip(groups, allocation.formats, strict=True)]
        assert sum(option.num_bytes for option in chosen) == num_bytes == allocation.num_bytes
        assert sum(option.damage_nats for option in chosen) == pytest.approx(allocation.damage_nats)
        assert allocate(groups, num_bytes) == allocation


def test_frontier_of_a_real_sized_model_takes_little_time() -> None:
    source = random.Random(0)
    sizes = [576 * 576 + 2 * 192 * 576, 576 * 576, 2 * 1536 * 576, 576 * 1536] * 30
    bits = (2.25, 3.25, 3.5, 4.25, 5.25, 6.25, 8.0)
    groups = tuple(
        tuple(Option(f"f{it}", int(size * it / 8), source.lognormvariate(0, 1) * 4.0**-it) for it in bits) for size in sizes
    )
    start = time.perf_counter()
    found = frontier(groups)
    assert time.perf_counter() - start < 20
    for budget_bits in (3.0, 4.25, 6.0):
        budget = int(budget_bits * sum(size for size in sizes) / 8)
        assert found.within_bytes(budget).damage_nats == pytest.approx(integer_program(groups, budget), rel=1e-3)
        assert found.within_bytes(budget) == allocate(groups, budget)


def test_frontier_refuses_a_budget_below_its_first_point() -> None:
    found = frontier(((Option("a", 3, 1.0),), (Option("a", 4, 1.0), Option("b", 8, 0.0))))
    with pytest.raises(UnsupportedError, match=r"budget of 6 bytes .* need 7 bytes"):
        found.within_bytes(6)
    assert found.within_bytes(7).formats == ("a", "a") and found.within_damage(1.5).formats == ("a", "b")


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
