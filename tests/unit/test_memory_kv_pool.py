"""Single rules of the page pool, each with numbers worked by hand; any mix of them is in test_memory_kv_pool_stateful."""

import pytest

from model_optimizer.memory.kv_pool import KvPool, KvSequence, PoolExhausted, PoolMisuse

PROMPT = list(range(100, 110))
"""Ten tokens: two pages of four, and two tokens more."""


def pool_of(num_pages: int = 8, **options: float) -> KvPool:
    return KvPool(num_pages, 4, debug=True, breathing_room_ratio=options.get("room", 0.0))


def computed(pool: KvPool, tokens: list[int]) -> KvSequence:
    """Return a sequence whose tokens are all computed."""
    sequence = pool.begin(tokens)
    rest = tokens[sequence.num_tokens :]
    sequence.extend(len(rest))
    sequence.commit(rest)
    return sequence


def test_begin_shares_whole_pages_of_a_known_prefix() -> None:
    pool = pool_of()
    first = computed(pool, PROMPT)
    second = pool.begin([*PROMPT[:9], 7, 7, 7])
    assert (second.num_cached, second.pages) == (8, first.pages[:2])
    assert pool.occupancy().num_shared == 2
    assert (pool.occupancy().asked_tokens, pool.occupancy().hit_tokens) == (22, 8)


def test_begin_leaves_the_last_token_to_compute_when_the_whole_prompt_is_known() -> None:
    pool = pool_of()
    computed(pool, PROMPT[:8])
    assert pool.begin(PROMPT[:8]).num_tokens == 4


def test_begin_does_not_share_the_same_tokens_after_another_prefix() -> None:
    pool = pool_of()
    computed(pool, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert pool.begin([2, 2, 2, 2, 5, 5, 5, 5, 0]).num_tokens == 0
    assert pool.begin([5, 5, 5, 5, 0]).num_tokens == 0


def test_begin_finds_pages_of_a_freed_sequence_until_they_are_needed() -> None:
    pool = pool_of(4)
    computed(pool, PROMPT).free()
    assert (pool.occupancy().num_cached, pool.occupancy().num_free) == (2, 2)
    again = pool.begin(PROMPT)
    assert again.num_tokens == 8
    again.free()
    other = computed(pool, [0] * 16)
    assert (len(other.pages), pool.occupancy().num_evictions) == (4, 2)
    other.free()
    assert pool.begin(PROMPT).num_tokens == 0


def test_eviction_takes_the_longest_unused_and_of_one_prefix_the_end_first() -> None:
    pool = pool_of(6)
    computed(pool, [1, 1, 1, 1, 2, 2, 2, 2]).free()
    computed(pool, [3, 3, 3, 3]).free()
    pool.begin([1, 1, 1, 1, 0]).free()  # the first page of the older prefix is used again
    filler = pool.begin([])
    filler.extend(16)  # three free pages and one cached
    filler.retract()
    assert pool.begin([1, 1, 1, 1, 2, 2, 2, 2, 0]).num_tokens == 4
    assert pool.begin([3, 3, 3, 3, 0]).num_tokens == 4


def test_extend_changes_nothing_when_pages_run_out() -> None:
    pool = pool_of(3)
    sequence = computed(pool, PROMPT[:6])
    before = (list(sequence.pages), sequence.num_reserved, pool.occupancy())
    with pytest.raises(PoolExhausted, match="2 pages asked, 1 available"):
        sequence.extend(7)
    assert (sequence.pages, sequence.num_reserved, pool.occupancy()) == before


def test_extend_copies_the_last_page_when_a_fork_reads_it() -> None:
    pool = pool_of()
    first = computed(pool, PROMPT)
    second = first.fork()
    shared = first.pages[2]
    (copy,) = second.extend(1)
    assert (copy.source, copy.target) == (shared, second.pages[2])
    assert first.pages[2] == shared != second.pages[2]
    assert second.pages[:2] == first.pages[:2]
    assert first.extend(1) == []  # the page is its own again


def test_extend_refuses_a_negative_number() -> None:
    sequence = pool_of().begin([])
    with pytest.raises(PoolMisuse, match="is extended by -1 tokens"):
        sequence.extend(-1)


def test_extend_copies_nothing_when_a_shared_page_is_full() -> None:
    pool = pool_of()
    first = computed(pool, PROMPT[:8])
    assert first.fork().extend(3) == []


def test_retract_gives_back_pages_that_were_not_written() -> None:
    pool = pool_of()
    sequence = computed(pool, PROMPT)
    sequence.extend(9)
    assert len(sequence.pages) == 5
    sequence.commit([1, 2])
    sequence.retract()
    assert (sequence.num_reserved, len(sequence.pages), pool.num_available) == (12, 3, 5)


def test_slots_follow_the_page_table() -> None:
    pool = pool_of()
    blocker = pool.begin([])
    sequence = pool.begin([])
    sequence.extend(4)
    blocker.extend(4)
    sequence.extend(2)
    assert sequence.pages == [0, 2]
    assert sequence.slots(2, 6) == [2, 3, 8, 9]


def test_slots_refuses_pages_that_others_read_in_debug_mode() -> None:
    pool = pool_of()
    sequence = computed(pool, PROMPT)
    with pytest.raises(PoolMisuse, match="would write page 0, which others may read"):
        sequence.slots(0, 4)


def test_free_twice_raises_one_clear_line() -> None:
    sequence = pool_of().begin(PROMPT)
    sequence.free()
    with pytest.raises(PoolMisuse, match=r"^sequence 1 is used after it was freed; begin a new one$"):
        sequence.free()


def test_a_foreign_page_in_the_table_is_found_in_debug_mode() -> None:
    pool = pool_of()
    first, second = computed(pool, PROMPT), computed(pool, [1, 2, 3])
    second.pages[0] = first.pages[2]
    with pytest.raises(PoolMisuse, match="sequence 2 holds page 2, which it does not own"):
        second.extend(1)


def test_on_free_hears_of_pages_whose_content_is_void() -> None:
    void: list[list[int]] = []
    pool = KvPool(4, 4, on_free=lambda pages: void.append(list(pages)), breathing_room_ratio=0.0)
    sequence = computed(pool, PROMPT)
    sequence.free()
    assert void == [[2]]  # the full pages 0 and 1 stay findable
    computed(pool, [0] * 16)
    assert void[1:] == [[1], [0]]  # evicted, the end of the prefix first


def test_begin_keeps_breathing_room_for_those_that_run() -> None:
    pool = pool_of(10, room=0.2)
    first = pool.begin([0] * 24)  # promised six pages
    assert pool.can_begin([1] * 8)
    assert not pool.can_begin([1] * 9)
    with pytest.raises(PoolExhausted, match="3 pages asked beside 0 found for 9 tokens; 10 available, 6 promised, 2 kept free"):
        pool.begin([1] * 9)
    first.extend(24)
    pool.begin([1] * 8).extend(8)
    first.extend(8)  # a running sequence may use the room
    assert pool.num_available == 0


def test_begin_keeps_no_more_room_than_all_may_grow() -> None:
    pool = pool_of(10, room=0.2)
    pool.begin([0] * 24)
    assert pool.can_begin([1] * 16, growth_pages=0)
    assert not pool.can_begin([1] * 17, growth_pages=0)
    assert pool.can_begin([1] * 12, growth_pages=1)
    assert not pool.can_begin([1] * 16, growth_pages=1)
    assert not pool.can_begin([1] * 12, growth_pages=50)  # never more than the breathing room
    assert pool.can_begin([1] * 8, growth_pages=50)


def test_begin_needs_no_breathing_room_when_nobody_runs() -> None:
    assert pool_of(10, room=0.2).can_begin([0] * 40)


def test_occupancy_counts_waste_in_slots() -> None:
    pool = pool_of()
    first = computed(pool, PROMPT)
    first.fork()
    seen = pool.occupancy()
    assert (seen.num_used, seen.num_free, seen.num_shared, seen.num_sequences) == (3, 5, 3, 2)
    assert (seen.waste_tokens, seen.fragmentation_ratio) == (2, pytest.approx(2 / 12))
    assert seen.scatter_ratio == 0.0


def test_resize_moves_live_pages_down_and_keeps_their_prefix_findable() -> None:
    pool = pool_of(8)
    pool.begin(PROMPT).free()
    blocker = computed(pool, [9] * 16)
    sequence = computed(pool, PROMPT)
    blocker.free()
    assert sequence.pages == [4, 5, 6]
    copies = pool.resize(4)
    assert [copy.source for copy in copies] == [4, 5, 6]
    assert sequence.pages == [copy.target for copy in copies]
    assert max(sequence.pages) < 4
    assert pool.begin(PROMPT).num_tokens == 8
    pool.verify()


def test_resize_refuses_to_cut_what_is_in_use_or_promised() -> None:
    pool = pool_of(8)
    computed(pool, PROMPT)
    pool.begin([1] * 8)
    with pytest.raises(PoolExhausted, match="4 pages asked for, 5 are in use or promised"):
        pool.resize(4)
    assert pool.num_pages == 8


def test_resize_hands_out_added_pages() -> None:
    pool = pool_of(2)
    sequence = computed(pool, PROMPT[:8])
    assert pool.resize(4) == []
    assert sequence.extend(8) == []
    assert sequence.pages == [0, 1, 2, 3]


def test_reset_forgets_prefixes_and_restores_order() -> None:
    pool = pool_of()
    first, second = computed(pool, PROMPT), computed(pool, [1] * 10)
    first.free()
    second.free()
    pool.reset()
    assert pool.occupancy().num_free == 8
    again = computed(pool, PROMPT)
    assert (again.num_cached, again.pages) == (0, [0, 1, 2])


def test_reset_refuses_while_sequences_are_live() -> None:
    pool = pool_of()
    pool.begin(PROMPT)
    with pytest.raises(PoolMisuse, match="1 sequences are live"):
        pool.reset()


@pytest.mark.parametrize(("pages", "tokens"), [(0, 4), (4, 0)])
def test_kv_pool_refuses_a_pool_of_nothing(pages: int, tokens: int) -> None:
    with pytest.raises(PoolMisuse, match="both must be 1 or more"):
        KvPool(pages, tokens)
