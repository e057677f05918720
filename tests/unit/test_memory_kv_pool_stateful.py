"""The pool under any sequence of operations; POOL_OPERATIONS (100,000 in `make test-full`) says how many."""

import os
from collections.abc import Callable

import pytest
from pool_machine import HITS, run_operations

from model_optimizer.memory.kv_pool import KvPool, KvSequence
from model_optimizer.memory.pages import PageAllocator
from model_optimizer.memory.prefix_cache import PrefixCache


def test_pool_loses_doubles_and_leaks_no_page() -> None:
    wanted = int(os.environ.get("POOL_OPERATIONS", "2000"))
    before = HITS[0]
    assert run_operations(wanted) >= wanted
    assert HITS[0] - before > wanted / 10  # shared prefixes are no rare event in it


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_pool_loses_doubles_and_leaks_no_page_in_100_000_operations() -> None:
    assert run_operations(100_000) >= 100_000


def _without_copy_on_write(pool: KvPool, sequence: KvSequence, end: int) -> list[object]:
    pages = sequence.pages
    for _ in range(-(-end // pool.page_tokens) - len(pages)):
        pages.append(pool.pages.take(sequence.number))
    sequence.num_reserved = end
    return []


def _leak_the_last(allocator: PageAllocator, pages: list[int], owner: int) -> None:
    original_release(allocator, pages[:-1], owner)


def _ignore_the_prefix(cache: PrefixCache, node: int, tokens: tuple[int, ...], page: int) -> int:
    return original_register(cache, 0, tokens, page)


def _stay_idle(allocator: PageAllocator, pages: list[int], owner: int) -> None:
    idle = dict(allocator.cache.idle)
    original_share(allocator, pages, owner)
    allocator.cache.idle.update(idle)


def _move_nothing(allocator: PageAllocator, num_pages: int) -> dict[int, int]:
    original_shrink(allocator, num_pages)
    return {}


original_release, original_share, original_shrink = PageAllocator.release, PageAllocator.share, PageAllocator.shrink
original_register = PrefixCache.register


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (KvPool, "_lengthen", _without_copy_on_write),
        (PageAllocator, "release", _leak_the_last),
        (PageAllocator, "share", _stay_idle),
        (PageAllocator, "shrink", _move_nothing),
        (PrefixCache, "register", _ignore_the_prefix),
    ],
)
def test_run_operations_finds_a_planted_fault(
    owner: type, method: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(BaseException):  # noqa: B017  whichever rule or invariant meets it first
        for attempt in range(10):
            run_operations(3000, shrink=False, first_seed=1000 * attempt)
