"""What an operation of the page pool costs: CPU time of this thread for each, median of interleaved rounds.

Cases: `serving` is a seeded mix as a server makes it, every call an operation: sequences of log-normal lengths begin (a third
share a prefix), are prefilled in chunks, decode a token at a time, and are freed while others run, in a pool that is always
full. The others are single operations in a tight loop: `decode` a token (extend and commit count as two), `page` taking and
giving back one page, `hit` beginning with a known prefix, per page of it, `evict` taking a page that held a prefix.
"""

import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.evidence import Figure
from model_optimizer.measurement.percentiles import quantile
from model_optimizer.memory.kv_pool import KvPool, KvSequence, PoolExhausted

ROUNDS = 15
PAGE_TOKENS = 16


def measure() -> list[Figure]:
    """Return microseconds per operation of every case, and how busy the machine was."""
    cases: dict[str, Callable[[], tuple[int, int]]] = {
        "serving": serving,
        "decode": decode,
        "page": page,
        "hit": hit,
        "evict": evict,
    }
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            spent_ns, num_operations = case()
            samples[name].append(spent_ns / num_operations / 1e3)
    figures = []
    for name, times in samples.items():
        median = quantile(np.array(times), 0.5)
        figures.append(Figure(name, "allocator_us_per_op", median.value, "us", median.lower, median.upper, ROUNDS))
    figures.append(Figure("machine", "load_average", os.getloadavg()[0], "processes"))
    return figures


def serving() -> tuple[int, int]:
    """Return nanoseconds and operations of a mix of 400 sequences over a full pool."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.0, 0.8, (400, 2)), 8, 1500).astype(int).tolist()
    prefix = random.integers(0, 1000, 256).tolist()
    queue = []
    for index, (prompt, output) in enumerate(lengths):
        own = random.integers(0, 1000, prompt).tolist()
        queue.append((prefix + own if index % 3 == 0 else own, output))
    pool, running, operations = KvPool(2048, PAGE_TOKENS), [], 0
    start = time.thread_time_ns()
    while queue or running:
        while queue:
            try:
                sequence = pool.begin(queue[-1][0])
            except PoolExhausted:
                break
            finally:
                operations += 1
            tokens, output = queue.pop()
            for at in range(sequence.num_tokens, len(tokens), 512):
                chunk = tokens[at : at + 512]
                sequence.extend(len(chunk))
                sequence.commit(chunk)
                operations += 2
            running.append((sequence, len(tokens) + output))
        still: list[tuple[KvSequence, int]] = []
        for sequence, end in running:
            try:
                sequence.extend(1)
                sequence.commit((7,))
                operations += 2
                done = sequence.num_tokens >= end
            except PoolExhausted:
                done = True
            if done:
                sequence.free()
                operations += 1
            else:
                still.append((sequence, end))
        running = still
    return time.thread_time_ns() - start, operations


def decode() -> tuple[int, int]:
    pool = KvPool(2048, PAGE_TOKENS)
    sequence = pool.begin([])
    extend, commit, token = sequence.extend, sequence.commit, (7,)
    start = time.thread_time_ns()
    for _ in range(20_000):
        extend(1)
        commit(token)
    return time.thread_time_ns() - start, 40_000


def page() -> tuple[int, int]:
    pool = KvPool(2048, PAGE_TOKENS)
    sequence = pool.begin([])
    start = time.thread_time_ns()
    for _ in range(5_000):
        sequence.extend(PAGE_TOKENS)
        sequence.retract()
    return time.thread_time_ns() - start, 10_000


def hit() -> tuple[int, int]:
    pool = KvPool(2048, PAGE_TOKENS)
    tokens = list(range(100 * PAGE_TOKENS + 1))
    first = pool.begin(tokens)
    first.extend(len(tokens))
    first.commit(tokens)
    start = time.thread_time_ns()
    for _ in range(100):
        pool.begin(tokens).free()
    return time.thread_time_ns() - start, 20_000


def evict() -> tuple[int, int]:
    pool = KvPool(2048, PAGE_TOKENS)
    tokens = list(range(2048 * PAGE_TOKENS))
    first = pool.begin(tokens)
    first.extend(len(tokens))
    first.commit(tokens)
    first.free()
    sequence = pool.begin([])
    start = time.thread_time_ns()
    for _ in range(2048):
        sequence.extend(PAGE_TOKENS)
    return time.thread_time_ns() - start, 2048
