"""The generator's judgement of itself, its alarms, and the prompts it sends."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.prompts import RequestForm, build_bodies, default_text, tokenizer_counter
from model_optimizer.measurement.samples import LoadSamples
from model_optimizer.measurement.self_watch import SelfWatch
from model_optimizer.measurement.timer import Agenda, Alarm
from model_optimizer.traffic.lengths import RequestShape

MS = 1_000_000


def samples(delay_ms: float, latency_ms: float, num: int = 200) -> LoadSamples:
    """Requests due every millisecond, each sent `delay_ms` late and ended `latency_ms` after it was due."""
    due_ns = np.arange(num, dtype=np.int64) * MS
    none = np.full(num, -1, dtype=np.int64)
    return LoadSamples(
        intended_ns=due_ns,
        started_ns=due_ns + int(delay_ms * MS),
        first_token_ns=none,
        finished_ns=due_ns + int(latency_ms * MS),
        num_tokens=np.zeros(num, dtype=np.int64),
        offsets=np.zeros(num + 1, dtype=np.int64),
        token_times_ns=none[:0],
        chunk_tokens=none[:0],
        status=np.zeros(num, dtype=np.int8),
    )


async def _watched(block_s: float = 0.0) -> SelfWatch:
    watch = SelfWatch(asyncio.get_running_loop())
    await asyncio.sleep(0.05)
    end = time.perf_counter() + block_s
    while time.perf_counter() < end:
        pass
    await asyncio.sleep(0.02)
    watch.close()
    return watch


def test_self_watch_names_late_requests_in_proportion_to_the_latency() -> None:
    watch = asyncio.run(_watched())
    late = watch.judge(samples(5.0, 100.0), 0)  # 5 ms of 100 ms: more than 1 %
    assert late.limits[0] == "requests were sent 5 ms late at P50, where the latency is 100 ms"
    assert late.dispatch_delay_ms["p99"] == 5.0
    fine = watch.judge(samples(5.0, 2000.0), 0)
    assert not [limit for limit in fine.limits if limit.startswith("requests were sent")]


def test_self_watch_sees_its_own_loop_blocked() -> None:
    health = asyncio.run(_watched(block_s=0.3)).judge(samples(0.0, 100.0), 0)
    assert health.limited and any(limit.startswith("arrivals were seen") for limit in health.limits)
    assert health.loop_lag_ms["max"] >= 280


def test_self_watch_tells_being_behind_from_being_late() -> None:
    watch = asyncio.run(_watched())
    assert "half of the requests were sent 0.05 s late" in watch.judge(samples(50.0, 60.0), 0).behind
    assert watch.judge(samples(0.0, 60.0), 0).behind == ""
    assert "3 requests waited for a free connection" in watch.judge(samples(0.0, 60.0), 3).behind


def test_agenda_calls_in_the_order_of_times_and_never_early() -> None:
    async def run() -> list[tuple[int, int]]:
        agenda, called = Agenda(asyncio.get_running_loop()), list[tuple[int, int]]()
        start_ns = time.perf_counter_ns()
        for wait_ms in (9, 3, 6, 3):
            agenda.at(
                start_ns + wait_ms * MS, lambda wait_ms=wait_ms: called.append((wait_ms, time.perf_counter_ns() - start_ns))
            )
        agenda.at(start_ns - MS, lambda: called.append((0, 0)))  # already due: at once, but not from within
        assert called == []
        while len(called) < 5:
            await asyncio.sleep(0.001)
        agenda.close()
        return called

    called = asyncio.run(run())
    assert [wait for wait, _ in called] == [0, 3, 3, 6, 9] and all(passed >= wait * MS for wait, passed in called)


def test_alarm_forgets_the_time_that_was_set_before() -> None:
    async def run() -> list[int]:
        rung: list[int] = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.perf_counter_ns()))
        start_ns = time.perf_counter_ns()
        alarm.set(start_ns + 10 * MS)
        alarm.set(start_ns + 30 * MS)
        while not rung:
            await asyncio.sleep(0.001)
        alarm.close()
        return [at - start_ns for at in rung]

    (waited_ns,) = asyncio.run(run())
    assert waited_ns >= 30 * MS


FORM = RequestForm("m", chat=False, stream=True, extra={"ignore_eos": True})


def test_build_bodies_cuts_prompts_of_the_asked_lengths_with_a_tokenizer(tiny_llama: Path) -> None:
    counter = tokenizer_counter(tiny_llama)
    text = default_text()[:400]
    shapes = [RequestShape(12, 7), RequestShape(300, 9)]  # the second is longer than the text
    asked = [json.loads(body) for body in build_bodies(FORM, shapes, text, 3, counter)]
    assert [it["max_tokens"] for it in asked] == [7, 9] and all(it["ignore_eos"] for it in asked)
    assert all(it["stream_options"] == {"include_usage": True} and it["temperature"] == 0 for it in asked)
    lengths = [len(counter(it["prompt"])) for it in asked]
    assert lengths == pytest.approx([12, 300], abs=3)  # a token may be cut otherwise at a seam
    assert asked == [json.loads(body) for body in build_bodies(FORM, shapes, text, 3, counter)]


def test_build_bodies_takes_four_characters_a_token_without_one() -> None:
    form = RequestForm("m", chat=True, stream=False, extra={})
    bodies = build_bodies(form, [RequestShape(10, 5)] * 50, default_text(), 1, None)
    prompts = [json.loads(body)["messages"][0]["content"] for body in bodies]
    assert all(len(prompt) == 40 or len(prompt) > 36 for prompt in prompts) and len(set(prompts)) > 45
    assert "stream_options" not in json.loads(bodies[0])


def test_build_bodies_refuses_more_than_memory_should_hold() -> None:
    with pytest.raises(ConfigError, match="1024 MiB at most"):
        build_bodies(FORM, [RequestShape(1 << 20, 1)] * 300, "some text", 0, None)
