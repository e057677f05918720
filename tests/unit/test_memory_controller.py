"""The resize controller in simulation: bursts, ebbs, flapping, quiet windows; time is an argument."""

import itertools
from dataclasses import dataclass, field

import pytest

from model_optimizer.memory.controller import Action, Order, PoolController, Reading, ResizeRules, apply
from model_optimizer.memory.kv_pool import KvPool, PoolExhausted

RULES = ResizeRules()
STEP_S = 0.1


@dataclass
class Service:
    """A pool whose use follows a demand in pages; what does not fit waits. Orders are carried out at once."""

    num_pages: int = 100
    min_pages: int = 20
    max_pages: int = 200
    rules: ResizeRules = RULES
    time_s: float = 0.0
    orders: list[tuple[float, Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = PoolController(self.rules, self.min_pages, self.max_pages)

    def run(self, demand_pages: int, num_batches: int, *, scatter_ratio: float = 0.0, step_s: float = STEP_S) -> None:
        for _ in range(num_batches):
            self.time_s += step_s
            used, waiting = min(demand_pages, self.num_pages), int(demand_pages > self.num_pages)
            order = self.controller.observe(Reading(self.time_s, self.num_pages, used, waiting, scatter_ratio))
            if order:
                self.orders.append((self.time_s, order))
                self.num_pages = order.num_pages

    @property
    def actions(self) -> list[Action]:
        return [order.action for _, order in self.orders]


def test_observe_grows_by_a_fifth_after_ten_pressed_batches() -> None:
    service = Service()
    service.run(95, 9)
    assert service.orders == []
    service.run(95, 1)
    assert (service.actions, service.num_pages) == ([Action.GROW], 120)
    assert service.orders[0][1].because.startswith("10 batches in a row used 90% or had requests waiting (now 95 of 100")


def test_observe_starts_counting_anew_when_one_batch_disagrees() -> None:
    service = Service()
    service.run(95, 9)
    service.run(70, 1)
    service.run(95, 9)
    assert service.orders == []


def test_observe_grows_in_a_burst_until_the_demand_fits_and_never_beyond_the_budget() -> None:
    service = Service()
    service.run(150, 100)
    assert service.num_pages == 173  # 120, 144, 173: then 150 pages are below nine tenths
    service.run(1000, 100)
    assert service.num_pages == 200


def test_observe_shrinks_by_a_tenth_after_ten_slack_batches_and_never_below_one_long_request() -> None:
    service = Service()
    service.run(30, 9)
    assert service.orders == []
    service.run(30, 1)
    assert service.num_pages == 90
    service.run(10, 1000)
    assert service.num_pages == 20
    assert set(service.actions) == {Action.SHRINK}


def test_observe_leaves_a_pool_alone_between_the_marks() -> None:
    service = Service()
    service.run(50, 200)
    service.run(89, 200)
    assert service.orders == []


def test_observe_changes_direction_only_after_the_hold_time() -> None:
    service = Service()
    service.run(95, 10)
    grown_s = service.orders[0][0]
    service.run(10, 1000)
    assert service.orders[1][1].action is Action.SHRINK
    assert service.orders[1][0] - grown_s == pytest.approx(30, abs=2 * STEP_S)


def test_observe_does_not_flap_with_a_flapping_load() -> None:
    service = Service()
    for _ in range(1800):  # one hour, the load turning every second
        service.run(95, 10)
        service.run(10, 10)
    directions = service.actions
    turns = sum(left is not right for left, right in itertools.pairwise(directions))
    assert turns <= 8  # holds of 30, 60, ... 1800 s
    assert 20 <= service.num_pages <= 200


def test_observe_serves_a_day_of_ebb_and_flood_without_being_full_for_long() -> None:
    service, waited = Service(), 0
    for hour in range(48):
        demand = 160 if hour % 24 in range(9, 18) else 30
        for _ in range(360):  # a batch every ten seconds
            service.run(demand, 1, step_s=10.0)
            waited += demand > service.num_pages
    assert service.num_pages < 60
    assert waited <= 2 * 6 * 10 + 120  # each morning: ten batches for each of at most ten growth steps


def test_observe_resets_in_a_quiet_window_only_where_page_tables_were_scattered() -> None:
    service = Service(rules=RULES.model_copy(update={"low_ratio": 0.0}))
    service.run(60, 10, scatter_ratio=0.2)
    service.run(0, 700)
    assert service.orders == []
    service.run(60, 10, scatter_ratio=0.7)
    quiet_s = service.time_s
    service.run(0, 1500)
    assert service.actions == [Action.RESET]
    assert service.orders[0][0] - quiet_s == pytest.approx(60, abs=2 * STEP_S)
    assert "scattered by 70%" in service.orders[0][1].because


def test_observe_does_not_reset_while_requests_come_now_and_then() -> None:
    service = Service(rules=RULES.model_copy(update={"low_ratio": 0.0}))
    for _ in range(20):
        service.run(60, 1, scatter_ratio=0.9)
        service.run(0, 500)  # 50 s
    assert service.orders == []


class RealPool:
    """A KvPool behind the protocol."""

    def __init__(self) -> None:
        self.pool = KvPool(100, 4)

    def resize_pool(self, num_pages: int) -> None:
        self.pool.resize(num_pages)

    def reset_pool(self) -> None:
        self.pool.reset()


def test_apply_carries_orders_out_and_says_why_a_pool_refused() -> None:
    target = RealPool()
    assert apply(Order(Action.GROW, 120, ""), target) == ""
    assert target.pool.num_pages == 120
    sequence = target.pool.begin([])
    sequence.extend(400)
    assert apply(Order(Action.SHRINK, 90, ""), target) == "90 pages asked for, 100 are in use or promised"
    assert target.pool.num_pages == 120
    sequence.free()
    assert apply(Order(Action.RESET, 120, ""), target) == ""


def test_controller_keeps_a_real_pool_serving_through_a_burst() -> None:
    target, clock = RealPool(), 0.0
    controller = PoolController(RULES, 20, 200)
    sequences, refused = [], 0
    for _ in range(200):
        clock += STEP_S
        waiting = 0
        if len(sequences) < 15:  # fifteen requests of ten pages want in
            try:
                sequences.append(target.pool.begin([len(sequences)] * 40))
                sequences[-1].extend(40)
            except PoolExhausted:
                refused, waiting = refused + 1, 15 - len(sequences)
        order = controller.observe(Reading.of(target.pool.occupancy(), waiting, clock))
        if order:
            assert apply(order, target) == ""
        target.pool.verify()
    assert (len(sequences), refused > 0) == (15, True)
    assert target.pool.num_pages == 173
