"""Rounds on a real runtime: alternating order, whole rounds only after a kill."""

from collections.abc import Callable
from pathlib import Path

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.journal import Journal
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.strategy.race import Heat, Round, race

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=2, max_model_len=256)
HEAT = Heat([GenerationRequest(prompt=(5, 6, 7 + i), max_new_tokens=6) for i in range(3)], concurrency=2, num_rounds=3)


def openers(directory: Path, opened: list[str]) -> dict[str, Callable[[], LogitsRuntime]]:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))

    def opener(label: str) -> Callable[[], LogitsRuntime]:
        def open_engine() -> LogitsRuntime:
            opened.append(label)
            return RUNTIMES.get("torch").open(engine, directory, PLAN)

        return open_engine

    return {label: opener(label) for label in ("a", "b")}


def rounds_in(directory: Path) -> Journal[Round]:
    return Journal(directory / "rounds.jsonl", "k", Round)


def test_race_gives_every_engine_every_round_in_alternating_order(tiny_llama: Path, tmp_path: Path) -> None:
    rounds = race(openers(tiny_llama, []), HEAT, rounds_in(tmp_path), Quiet())
    assert [row.index for row in rounds] == [0, 1, 2]
    assert [list(row.decode_tok_per_s) for row in rounds] == [["a", "b"], ["b", "a"], ["a", "b"]]
    for row in rounds:
        assert all(speed > 0 for speed in row.decode_tok_per_s.values())
        assert {label: len(values) for label, values in row.latency_ms.items()} == {"a": 3, "b": 3}
        assert row.num_failed == {"a": 0, "b": 0}


def test_race_repeats_only_the_rounds_behind_the_journal(tiny_llama: Path, tmp_path: Path) -> None:
    first = race(openers(tiny_llama, []), HEAT, rounds_in(tmp_path), Quiet())
    journal = tmp_path / "rounds.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])  # killed while the third round was written
    opened: list[str] = []
    second = race(openers(tiny_llama, opened), HEAT, rounds_in(tmp_path), Quiet())
    assert second[:2] == first[:2] and len(second) == 3
    assert opened == ["a", "b"]
    opened.clear()
    assert race(openers(tiny_llama, opened), HEAT, rounds_in(tmp_path), Quiet()) == second
    assert opened == []
