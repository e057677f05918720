"""Load runs against a scripted server in a process of its own; the machine may be busy, so bounds are one-sided."""

import json
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.arrivals import steady
from model_optimizer.measurement.http_client import Endpoint
from model_optimizer.measurement.openloop import ClosedLoop, LoadPlan, LoadRun, OpenLoop, Snapshot, run_load
from model_optimizer.measurement.samples import RequestStatus
from model_optimizer.measurement.scripted_server import Script, Stall, Step, running

NUM = 40


def bodies(num: int, *, stream: bool, max_tokens: int = 4) -> list[bytes]:
    return [json.dumps({"stream": stream, "max_tokens": max_tokens, "seed": seed}).encode() for seed in range(num)]


def load(script: Script, *, stream: bool, num: int = NUM, timeout_s: float = 30.0, closed: int | None = None) -> LoadRun:
    """Send `num` requests in half a second, or `closed` at a time."""
    arrivals = ClosedLoop(closed, num_requests=num) if closed else OpenLoop(steady(2 * num, 0.5))
    with running(script) as url:
        plan = LoadPlan(bodies(num, stream=stream), arrivals, stream, timeout_s=timeout_s)
        return run_load(Endpoint.of(url, "/v1/completions"), plan)


@pytest.fixture(scope="module")
def troubled() -> Iterator[LoadRun]:
    """A server with one failure of every kind among forty requests, which are streamed."""
    script = Script(ttft_ms=(5.0,), itl_ms=(5.0,), fail_every=10, fail_status=429, break_every=8, hang_every=20, lie_every=19)
    yield load(script, stream=True, timeout_s=2.0)


def test_failures_are_failures_by_their_kind_and_never_fast_answers(troubled: LoadRun) -> None:
    kinds = {number: "status 429" for number in range(NUM) if number % 10 == 9}
    kinds |= {number: "the connection broke within the answer" for number in range(NUM) if number % 8 == 7}
    kinds |= {number: "no end within 2 s" for number in range(NUM) if number % 20 == 19}
    kinds = {18: "an error within the stream", 37: "an error within the stream"} | kinds
    kinds[39] = "no end within 2 s"  # of several, the one that comes first in the script
    wanted = {reason: list(kinds.values()).count(reason) for reason in set(kinds.values())}
    assert dict(troubled.reasons) == wanted
    samples = troubled.samples
    assert samples.num_requests == NUM and int(samples.ok.sum()) == NUM - len(kinds)
    assert samples.count(RequestStatus.REJECTED) == 2 and samples.count(RequestStatus.TIMEOUT) == 2
    assert np.isinf(samples.end_to_end_ms(failures_infinite=True)).sum() == len(kinds)
    assert samples.end_to_end_ms().min() >= 19.9  # 5 + 3 gaps of 5 ms: no failure slipped in as a fast answer


def test_timeouts_end_when_they_are_due(troubled: LoadRun) -> None:
    late = troubled.samples.status == RequestStatus.TIMEOUT
    waited_s = (troubled.samples.finished_ns - troubled.samples.intended_ns)[late] / 1e9
    assert (waited_s >= 2.0).all()


def test_open_loop_counts_from_the_intended_start_through_a_stall() -> None:
    """A server that freezes for 0.6 s: requests due meanwhile are sent on time and wait for the rest of the freeze."""
    run = load(Script(stalls=(Stall(at_s=0.1, length_s=0.6),)), stream=False)
    due_s = (run.samples.intended_ns - run.samples.intended_ns[0]) / 1e9
    latency_s = run.samples.end_to_end_ms() / 1e3
    frozen = due_s > 0.13
    assert frozen.sum() == 29 and run.samples.ok.all()
    assert (latency_s[frozen] >= 0.7 - due_s[frozen] - 0.03).all()
    assert np.median(latency_s[frozen]) > 0.3  # a closed loop would have one slow request here
    assert (run.samples.started_ns >= run.samples.intended_ns).all()


def test_streams_give_scripted_times_and_tokens() -> None:
    steps = (Step(at_ms=50, num_tokens=0), *(Step(at_ms=at, num_tokens=num) for at, num in ((100, 1), (300, 4), (500, 4))))
    run = load(Script(steps=steps), stream=True, num=4)
    assert run.samples.num_tokens.tolist() == [9] * 4 and run.num_events == 12
    assert (run.samples.ttft_ms() >= 100).all() and run.prompt_tokens.tolist() == [8] * 4
    relative_ms = (run.samples.token_times_ns.reshape(4, 3) - run.samples.intended_ns[:, None]) / 1e6
    assert (relative_ms >= [100, 300, 500]).all()
    assert np.median(run.samples.tpot_ms()) == pytest.approx(50, rel=0.25)


def test_closed_loop_keeps_so_many_in_flight() -> None:
    run = load(Script(ttft_ms=(20.0,)), stream=False, num=32, closed=4)
    samples = run.samples
    assert samples.num_requests == 32 and samples.ok.all()
    in_flight = [int(((samples.started_ns <= at) & (samples.finished_ns > at)).sum()) for at in samples.started_ns]
    assert max(in_flight) == 4 and np.array_equal(samples.intended_ns, np.sort(samples.intended_ns))
    assert samples.wall_s() >= 8 * 0.02


def test_queue_of_a_server_with_slots_refuses_with_429() -> None:
    run = load(Script(ttft_ms=(100.0,), num_slots=1, max_waiting=2), stream=False)
    assert run.samples.count(RequestStatus.REJECTED) == run.reasons["status 429"] >= 20
    assert "too many requests wait" in run.first_fault


def test_run_load_ends_when_its_observer_says_so() -> None:
    class Ends:
        seen: list[Snapshot] = []

        def tick(self, snapshot: Snapshot) -> bool:
            self.seen.append(snapshot)
            return snapshot.elapsed_s > 0.2

    with running(Script(ttft_ms=(60_000.0,))) as url:
        plan = LoadPlan(bodies(1, stream=False), OpenLoop(steady(100, 50.0)), stream=False)
        run = run_load(Endpoint.of(url, "/v1/completions"), plan, Ends())
    assert run.stopped_early and 10 < run.samples.num_requests < 4000
    assert run.samples.count(RequestStatus.CANCELLED) == run.samples.num_requests and not run.reasons
    assert Ends.seen[0].num_planned == 5000


def test_connection_limit_is_told_as_the_generators_own() -> None:
    with running(Script(ttft_ms=(100.0,))) as url:
        plan = LoadPlan(bodies(1, stream=False), OpenLoop(steady(200, 0.1)), stream=False, max_connections=2)
        run = run_load(Endpoint.of(url, "/v1/completions"), plan)
    assert run.samples.ok.all() and run.samples.end_to_end_ms()[-1] >= 900
    assert run.health.num_waited_for_connection >= 17 and "waited for a free connection" in run.health.behind


def test_request_is_sent_once_more_when_the_server_closes_an_idle_connection_at_that_moment() -> None:
    """A server that closes each connection when its second request arrives, as keep-alive limits do."""
    answer = b'{"choices":[{"text":"hi","finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
    listener, served = socket.create_server(("127.0.0.1", 0)), list[int]()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if not connection.recv(65_536):
                    continue
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                served.append(1)
                connection.recv(65_536)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        plan = LoadPlan(bodies(1, stream=False), ClosedLoop(1, num_requests=4), stream=False, timeout_s=20)
        run = run_load(Endpoint.of(f"http://127.0.0.1:{listener.getsockname()[1]}", "/v1/completions"), plan)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert run.samples.ok.tolist() == [True] * 4 and not run.reasons and len(served) == 4
    assert run.samples.num_tokens.tolist() == [1] * 4


def test_no_server_is_a_failure_of_every_request() -> None:
    plan = LoadPlan(bodies(1, stream=False), OpenLoop(steady(50, 0.1)), stream=False)
    run = run_load(Endpoint.of("http://127.0.0.1:9", "/v1/completions"), plan)
    assert run.reasons == {"no connection: ConnectionRefusedError": 5} and not run.samples.ok.any()


@pytest.mark.parametrize("closed", [(0, 1, None), (1, None, None), (1, 0, None), (1, None, -1.0)])
def test_closed_loop_refuses_what_never_ends_or_begins(closed: tuple[int, int | None, float | None]) -> None:
    with pytest.raises(ConfigError, match="a closed loop takes"):
        ClosedLoop(closed[0], num_requests=closed[1], duration_s=closed[2])
