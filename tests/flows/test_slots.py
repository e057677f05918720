"""GPU slots by a global concurrency limit of the server: waited for, said, given back; and nothing of it on a CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from outside import wait_until
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from small_stage import WordInputs, counting_stage

from flows.slots import LIMIT_VARIABLE, gpu_slot, slot_for
from model_optimizer.protocols import Quiet
from model_optimizer.store import Store
from tasks._task import Workplace

LIMIT = "gpu-of-the-test"


class Notes(Quiet):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def limit(prefect_server: None) -> str:
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=LIMIT, limit=1))
    return LIMIT


def taken(name: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name).active_slots


def test_gpu_slot_is_waited_for_said_and_given_back(limit: str) -> None:
    first, second = Notes(), Notes()
    entered, leave = threading.Event(), threading.Event()

    def other_run() -> None:
        with gpu_slot(limit, second):
            entered.set()
            leave.wait(60)

    with gpu_slot(limit, first):
        assert (first.notes, taken(limit)) == ([], 1)
        thread = threading.Thread(target=other_run)
        thread.start()
        wait_until(lambda: bool(second.notes))
        assert not entered.is_set()
    assert entered.wait(60) and taken(limit) == 1
    leave.set()
    thread.join()
    assert second.notes == [f"waiting for a GPU: all 1 slots of the limit {LIMIT!r} are taken (`prefect gcl inspect {LIMIT}`)"]
    assert taken(limit) == 0


def test_gpu_slot_waits_for_nothing_where_the_server_has_no_such_limit(prefect_server: None) -> None:
    notes = Notes()
    with gpu_slot("no-such-limit", notes):
        assert notes.notes == []


def test_slot_for_a_cpu_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slot_for("cpu", Quiet()) is nullcontext
    monkeypatch.setenv(LIMIT_VARIABLE, LIMIT)
    assert slot_for("l40s", Quiet()) is not nullcontext


def test_stage_holds_a_slot_while_it_is_made_and_none_for_a_stored_result(prefect_server: None, tmp_path: Path) -> None:
    made: list[str] = []
    turns: list[str] = []

    @contextmanager
    def slot() -> Iterator[None]:
        turns.append("taken")
        yield
        turns.append(f"given back after {len(made)}")

    stage, place = counting_stage(made), Workplace(tmp_path, Store(tmp_path / "store"), Quiet(), slot=slot)
    inputs = WordInputs(fingerprint="f", word="slot")
    assert not stage(inputs, place).cached and stage(inputs, place).cached
    assert (made, turns) == (["slot"], ["taken", "given back after 1"])
