"""Any sequence of operations on a KvPool beside a naive model: what each sequence reads back must be what it wrote.

The model stores, in a plain list of slots, for every written token the whole prefix up to it: the true content of keys and
values. A page shared, copied, moved or evicted wrongly shows as a prefix that is not the reader's own.
"""

from collections.abc import Callable

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from model_optimizer.memory.kv_pool import KvPool, KvSequence, PoolExhausted, PoolMisuse

Prefix = tuple[int, ...]
OPERATIONS = [0]
"""Operations done so far by all machines."""
HITS = [0]
"""Tokens that they found in the prefix cache."""


class PoolMachine(RuleBasedStateMachine):
    """Sequences by number, each with the tokens that it committed."""

    @initialize(
        num_pages=st.sampled_from(range(2, 25)), page_tokens=st.sampled_from(range(1, 6)), room=st.sampled_from([0.0, 0.1, 0.3])
    )
    def start(self, num_pages: int, page_tokens: int, room: float) -> None:
        self.slots: list[Prefix | None] = [None] * num_pages * page_tokens
        self.pool = KvPool(num_pages, page_tokens, debug=True, breathing_room_ratio=room, on_free=self._void)
        self.room = room
        self.live: dict[int, tuple[KvSequence, list[int]]] = {}
        self.owed: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}
        self.dead: KvSequence | None = None

    def teardown(self) -> None:
        """Free everything that is left: then nothing is used, and a reset makes every page free."""
        if hasattr(self, "pool"):
            for sequence, _ in self.live.values():
                sequence.free()
            assert self.pool.occupancy().num_used == 0
            self.pool.reset()
            assert self.pool.occupancy().num_free == self.pool.num_pages
            self.pool.verify()

    @rule(prefix=st.sampled_from(range(3)), length=st.sampled_from(range(31)))
    def begin(self, prefix: int, length: int) -> None:
        """Few prompts of few tokens, so that hits are frequent; the middle of one is the beginning of another."""
        tokens = [prefix if at < 12 and prefix < 2 else (prefix % 2 + at) % 3 for at in range(length)]
        self._counted()
        available, owed = self.pool.num_available, self._owed()
        room = int(self.room * self.pool.num_pages) if self.live else 0
        admitted = self.pool.can_begin(tokens)
        if not admitted:
            with pytest.raises(PoolExhausted):
                self.pool.begin(tokens)
            assert self._pages(length) > available - owed - room - self.pool.occupancy().num_cached
            return
        sequence = self.pool.begin(tokens)
        assert sequence.num_tokens % self.pool.page_tokens == 0
        assert sequence.num_tokens < max(1, len(tokens))
        self.live[sequence.number] = (sequence, tokens[: sequence.num_tokens])
        self.owed[sequence.number] = self._pages(length) - len(sequence.pages)
        self.prompts[sequence.number] = tokens
        HITS[0] += sequence.num_cached
        assert self.pool.num_available - self._owed() >= room

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)), num_tokens=st.sampled_from(range(13)))
    def extend(self, which: int, num_tokens: int) -> None:
        sequence, _ = self._pick(which)
        self._counted()
        missing = self._pages(sequence.num_reserved + num_tokens) - len(sequence.pages)
        tail_shared = sequence.num_reserved % self.pool.page_tokens and self._holders(sequence.pages[-1]) > 1
        new_pages = missing = max(0, missing)
        missing += bool(num_tokens and tail_shared)
        before = (list(sequence.pages), sequence.num_reserved, self.pool.num_available)
        if missing > self.pool.num_available:
            with pytest.raises(PoolExhausted):
                sequence.extend(num_tokens)
            assert (sequence.pages, sequence.num_reserved, self.pool.num_available) == before
            return
        for source, target in sequence.extend(num_tokens):
            size = self.pool.page_tokens
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        assert self.pool.num_available == before[2] - missing
        self.owed[sequence.number] -= min(self.owed[sequence.number], new_pages)

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)))
    def prefill(self, which: int) -> None:
        """Compute a whole prompt: what makes prefixes known."""
        sequence, _ = self._pick(which)
        rest = len(self.prompts[sequence.number]) - sequence.num_tokens
        if rest > 0:
            self.extend(which, max(0, rest - (sequence.num_reserved - sequence.num_tokens)))
            self.write_and_commit(which, rest, 0)

    @rule(prefix=st.sampled_from(range(3)), length=st.sampled_from(range(31)))
    def begin_and_prefill(self, prefix: int, length: int) -> None:
        """What most requests do at once."""
        self.begin(prefix, length)
        if self.live:
            self.prefill(len(self.live) - 1)

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)), num_tokens=st.sampled_from(range(13)), salt=st.sampled_from(range(3)))
    def write_and_commit(self, which: int, num_tokens: int, salt: int) -> None:
        sequence, tokens = self._pick(which)
        self._counted()
        start, end = sequence.num_tokens, min(sequence.num_reserved, sequence.num_tokens + num_tokens)
        prompt = self.prompts[sequence.number]
        fresh = [prompt[at] if at < len(prompt) else (salt + at) % 3 for at in range(start, end)]
        for slot in sequence.slots(start, end):
            tokens.append(fresh[len(tokens) - start])
            self.slots[slot] = tuple(tokens)
        sequence.commit(fresh)

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)))
    def commit_too_much(self, which: int) -> None:
        sequence, _ = self._pick(which)
        self._counted()
        with pytest.raises(PoolMisuse, match="extend first"):
            sequence.commit([0] * (sequence.num_reserved - sequence.num_tokens + 1))

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)))
    def retract(self, which: int) -> None:
        self._counted()
        self._pick(which)[0].retract()

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)), back=st.sampled_from(range(12)))
    def drop_behind_a_window(self, which: int, back: int) -> None:
        self._counted()
        sequence, _ = self._pick(which)
        sequence.drop_before(sequence.num_tokens - back)
        assert sequence.num_dropped >= max(0, sequence.num_tokens - back) // self.pool.page_tokens

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)))
    def fork(self, which: int) -> None:
        sequence, tokens = self._pick(which)
        self._counted()
        if sequence.num_reserved != sequence.num_tokens:
            with pytest.raises(PoolMisuse, match="before the fork"):
                sequence.fork()
            return
        twin = sequence.fork()
        self.live[twin.number] = (twin, list(tokens))
        self.owed[twin.number] = 0
        self.prompts[twin.number] = self.prompts[sequence.number]

    @precondition(lambda self: self.live)
    @rule(which=st.sampled_from(range(64)))
    def free(self, which: int) -> None:
        sequence, _ = self._pick(which)
        self._counted()
        sequence.free()
        del self.live[sequence.number], self.owed[sequence.number]
        self.dead = sequence

    @precondition(lambda self: self.dead)
    @rule(use=st.sampled_from(["free", "extend", "commit", "retract", "fork", "slots"]))
    def use_after_free(self, use: str) -> None:
        self._counted()
        assert self.dead is not None
        dead = self.dead
        calls: dict[str, Callable[[], object]] = {
            "free": dead.free,
            "extend": lambda: dead.extend(1),
            "commit": lambda: dead.commit([1]),
            "retract": dead.retract,
            "fork": dead.fork,
            "slots": lambda: dead.slots(0, 0),
        }
        with pytest.raises(PoolMisuse, match="after it was freed"):
            calls[use]()

    @rule(num_pages=st.sampled_from(range(1, 31)))
    def resize(self, num_pages: int) -> None:
        self._counted()
        needed = max(1, len(self._used()) + self._owed())
        if num_pages < min(needed, self.pool.num_pages):
            with pytest.raises(PoolExhausted):
                self.pool.resize(num_pages)
            return
        size = self.pool.page_tokens
        self.slots += [None] * (num_pages * size - len(self.slots))
        for source, target in self.pool.resize(num_pages):
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        del self.slots[num_pages * size :]
        assert self.pool.num_pages == num_pages

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        self._counted()
        self.pool.reset()
        assert self.pool.occupancy().num_cached == 0

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.verify()
        size = self.pool.page_tokens
        for sequence, tokens in self.live.values():
            assert sequence.num_tokens == len(tokens)
            kept = range(sequence.num_dropped * size, len(tokens))
            read = [self.slots[sequence.pages[at // size] * size + at % size] for at in kept]
            assert read == [tuple(tokens[: at + 1]) for at in kept]

    @invariant()
    def occupancy_agrees_with_a_count(self) -> None:
        if not hasattr(self, "pool"):
            return
        seen, used, size = self.pool.occupancy(), self._used(), self.pool.page_tokens
        assert seen.num_free + seen.num_used + seen.num_cached == seen.num_pages == self.pool.num_pages
        assert seen.num_used == len(used)
        assert seen.num_shared == sum(self._holders(page) > 1 for page in used)
        filled = {
            sequence.pages[at // size] * size + at % size
            for sequence, tokens in self.live.values()
            for at in range(sequence.num_dropped * size, len(tokens))
        }
        assert seen.waste_tokens == len(used) * size - len(filled)

    def _void(self, pages: list[int]) -> None:
        size = self.pool.page_tokens
        for page in pages:
            self.slots[page * size : (page + 1) * size] = [None] * size

    def _pick(self, which: int) -> tuple[KvSequence, list[int]]:
        return list(self.live.values())[which % len(self.live)]

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_tokens)

    def _used(self) -> set[int]:
        return {page for sequence, _ in self.live.values() for page in sequence.pages[sequence.num_dropped :]}

    def _holders(self, page: int) -> int:
        return sum(page in sequence.pages[sequence.num_dropped :] for sequence, _ in self.live.values())

    def _owed(self) -> int:
        """Return the pages that were promised at `begin` and not yet taken."""
        return sum(self.owed.values())

    def _counted(self) -> None:
        OPERATIONS[0] += 1


def run_operations(num_operations: int, *, num_steps: int = 50, shrink: bool = True, first_seed: int = 0) -> int:
    """Run machines until at least so many operations are done, and return how many were.

    The same ones every time: values are sampled from ranges, for `integers` would also draw constants of whatever modules other
    tests have loaded.
    """
    start, round_number = OPERATIONS[0], first_seed
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    while (left := num_operations - (OPERATIONS[0] - start)) > 0:
        chosen = settings(
            max_examples=max(1, left // num_steps), stateful_step_count=num_steps, deadline=None, database=None, phases=phases
        )
        run_state_machine_as_test(seed(round_number)(PoolMachine), settings=chosen)
        round_number += 1
    return OPERATIONS[0] - start
