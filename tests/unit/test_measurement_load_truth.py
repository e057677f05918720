"""The arithmetic that the load generator's figures are held against."""

import asyncio

import numpy as np

from benchmarks.load_generator_truth import relative_errors, true_latency_s
from model_optimizer.measurement.scripted_server import Script, ScriptedServer, Stall


def test_true_latency_counts_the_rest_of_a_stall_from_when_a_request_was_due() -> None:
    due_s, delay_s = np.array([0.0, 0.95, 1.0, 1.4, 1.99, 2.0]), np.array([0.1, 0.1, 0.1, 0.2, 0.1, 0.1])
    latency_s = true_latency_s(due_s, delay_s, (Stall(at_s=1.0, length_s=1.0),))
    # done before; due to leave within the stall: leaves at its end; read at its end and served then; after it
    assert np.allclose(latency_s, [0.1, 1.05, 1.1, 0.8, 0.11, 0.1])


def test_true_latency_of_a_request_that_runs_through_the_whole_stall_is_its_own() -> None:
    assert np.allclose(true_latency_s(np.array([0.5]), np.array([3.0]), (Stall(at_s=1.0, length_s=1.0),)), [3.0])


def test_true_latency_adds_up_two_stalls() -> None:
    stalls = (Stall(at_s=3.0, length_s=1.0), Stall(at_s=1.0, length_s=1.0))
    assert np.allclose(true_latency_s(np.array([1.5]), np.array([1.2]), stalls), [2.5])


def test_relative_errors_are_zero_for_the_truth_itself() -> None:
    values = np.random.default_rng(0).lognormal(size=5000)
    assert set(relative_errors(values, values).values()) == {0.0}
    assert np.allclose(list(relative_errors(values * 1.02, values).values()), 0.02)


def test_scripted_server_takes_what_came_during_a_stall_as_come_at_its_end() -> None:
    async def arrivals() -> list[int]:
        loop = asyncio.get_running_loop()
        server = ScriptedServer(Script(), loop)
        server._stand_still(0.0)
        found = list[int]()
        for pause in (0, 3, 5, 30):  # turns of the loop between requests; the last one comes after all were read
            for _ in range(pause):
                await asyncio.sleep(0)
            found.append(server.arrived_ns())
        return found

    first, second, third, later = asyncio.run(arrivals())
    assert first == second == third < later
