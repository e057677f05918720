"""Who owns which page of the KV cache: pure bookkeeping, no tensor.

A page is free, used by sequences (counted), or cached: full, findable by its tokens, used by nobody, given away when no
page is free. A page that several sequences use is never written: who would write it gets a copy first. `KvStorage` holds
the numbers and does the copies; a runtime drives both from one thread.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from model_optimizer.memory.pages import PageAllocator, PoolMisuse

BREATHING_ROOM_RATIO = 0.1
"""Share of the pages that the admission of a new sequence leaves free, for those that already run (M3)."""


class PoolExhausted(Exception):
    """Not enough pages; nothing was changed. The caller waits, or preempts a sequence."""


class Copy(NamedTuple):
    """Keys and values of all layers are to be copied from one page to another before the next write."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the pool is and how well it is filled. free + used + cached = all pages."""

    num_pages: int
    num_free: int
    num_used: int
    """Held by at least one sequence."""
    num_cached: int
    """Kept for their content alone; given away when no page is free."""
    num_shared: int
    """Held by several sequences."""
    num_sequences: int
    waste_tokens: int
    """Slots of used pages that hold no token (yet)."""
    fragmentation_ratio: float
    """`waste_tokens` over the slots of used pages; pages are of one size, so nothing is lost between them."""
    scatter_ratio: float
    """Neighbours in a page table that are not neighbours in the pool, over all neighbours; costs locality, not space."""
    asked_tokens: int
    """Tokens of all sequences begun so far."""
    hit_tokens: int
    """Those of them that were found in the prefix cache."""
    num_evictions: int


class KvSequence:
    """One sequence's page table. Slots are reserved by `extend`, then written by the runtime, then named by `commit`."""

    __slots__ = ("_node", "_owed", "_pool", "_tail", "num_cached", "num_dropped", "num_reserved", "num_tokens", "number", "pages")

    def __init__(self, pool: "KvPool", number: int, pages: list[int], node: int) -> None:
        self.number = number
        self.pages = pages
        """The page table: token t lies in slot `pages[t // page_tokens] * page_tokens + t % page_tokens`."""
        self.num_dropped = 0
        """Pages at the front that were given back for good; their entries in the table stand for nothing."""
        self.num_cached = self.num_tokens = self.num_reserved = len(pages) * pool.page_tokens
        """`num_cached` tokens were found computed, `num_tokens` are written, `num_reserved` have a slot."""
        self._pool: KvPool | None = pool
        self._node = node
        self._tail: list[int] = []
        self._owed = 0

    def extend(self, num_tokens: int) -> list[Copy]:
        """Reserve slots for so many more tokens; return the copies that the storage must do before they are written.

        Raises:
            PoolExhausted: too few pages; nothing was changed.
        """
        pool = self._pool
        if pool is None or pool.debug or num_tokens < 0:
            pool = self._alive()
            if num_tokens < 0:
                raise PoolMisuse(f"sequence {self.number} is extended by {num_tokens} tokens; retract gives slots back")
        start = self.num_reserved
        end = start + num_tokens
        page_tokens = pool.page_tokens
        if end > len(self.pages) * page_tokens:
            return pool._lengthen(self, end)
        if start % page_tokens and num_tokens and pool.pages.refs[self.pages[-1]] > 1:
            return pool._lengthen(self, end)
        self.num_reserved = end
        return []

    def commit(self, tokens: Sequence[int]) -> None:
        """Say that these tokens' keys and values are written; pages that they fill become findable by others.

        Raises:
            PoolMisuse: more tokens than slots were reserved.
        """
        pool = self._pool
        if pool is None or pool.debug:
            pool = self._alive()
        count = self.num_tokens + len(tokens)
        if count > self.num_reserved:
            raise PoolMisuse(
                f"sequence {self.number}: {count} tokens written but only {self.num_reserved} reserved; extend first"
            )
        tail, page_tokens = self._tail, pool.page_tokens
        tail += tokens
        if len(tail) >= page_tokens:
            index = self.num_tokens // page_tokens
            whole = len(tail) - len(tail) % page_tokens
            for start in range(0, whole, page_tokens):
                content = tuple(tail[start : start + page_tokens])
                self._node = pool.pages.cache.register(self._node, content, self.pages[index])
                index += 1
            del tail[:whole]
        self.num_tokens = count

    def retract(self) -> None:
        """Give back the slots that were reserved and not written (rejected drafts, a step that failed)."""
        pool = self._alive()
        keep = -(-self.num_tokens // pool.page_tokens)
        pool.pages.release(self.pages[keep:], self.number)
        del self.pages[keep:]
        self.num_reserved = self.num_tokens

    def drop_before(self, token: int) -> None:
        """Give back the pages that lie wholly before `token`, which nobody will read again (it left every window)."""
        pool = self._alive()
        num_pages = min(token, self.num_tokens) // pool.page_tokens
        if num_pages > self.num_dropped:
            pool.pages.release(self.pages[self.num_dropped : num_pages], self.number)
            self.pages[self.num_dropped : num_pages] = [0] * (num_pages - self.num_dropped)
            self.num_dropped = num_pages

    def fork(self) -> "KvSequence":
        """Return a second sequence with the same tokens and the same pages; whoever writes next gets a copy of the last.

        Raises:
            PoolMisuse: slots are reserved and not written; commit or retract them first.
        """
        pool = self._alive()
        if self.num_reserved != self.num_tokens:
            raise PoolMisuse(
                f"sequence {self.number}: {self.num_reserved - self.num_tokens} slots are reserved and not written; "
                "commit or retract them before the fork"
            )
        twin = pool._enter(self.pages[self.num_dropped :], self._node)
        twin.pages, twin.num_dropped = list(self.pages), self.num_dropped
        twin._tail = list(self._tail)
        twin.num_cached = twin.num_tokens = twin.num_reserved = self.num_tokens
        return twin

    def free(self) -> None:
        """Give all pages back; full ones stay findable until they are needed. The sequence is unusable afterwards."""
        pool = self._alive()
        pool._owed -= self._owed
        pool.pages.release(self.pages[self.num_dropped :], self.number)
        self.pages = []
        self._pool = None
        del pool._live[self.number]

    def slots(self, start: int, end: int) -> list[int]:
        """Return the storage slots of tokens `start` to `end` for writing; in debug mode, refuse those that others read."""
        pool = self._alive()
        page_tokens, pages = pool.page_tokens, self.pages
        if not 0 <= start <= end <= self.num_reserved:
            raise PoolMisuse(f"sequence {self.number}: slots {start} to {end} asked, {self.num_reserved} reserved")
        if pool.debug and start < end:
            pool.pages.check_private(pages[start // page_tokens : -(-end // page_tokens)], self.number)
        return [pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(start, end)]

    def _alive(self) -> "KvPool":
        """Return the pool; in debug mode make sure that every page in the table is this sequence's."""
        pool = self._pool
        if pool is None:
            raise PoolMisuse(f"sequence {self.number} is used after it was freed; begin a new one")
        if pool.debug:
            pool.pages.check_owned(self.pages[self.num_dropped :], self.number)
        return pool


class KvPool:
    """Pages of `page_tokens` tokens, all there from the start; every operation takes constant time a page."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        debug: bool = False,
        breathing_room_ratio: float = BREATHING_ROOM_RATIO,
        on_free: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Start with every page free; `on_free` hears of pages whose content is void (`KvStorage.poison` in debug mode)."""
        if num_pages < 1 or page_tokens < 1:
            raise PoolMisuse(f"a pool of {num_pages} pages of {page_tokens} tokens; both must be 1 or more")
        self.page_tokens = page_tokens
        self.debug = debug
        self.pages = PageAllocator(num_pages, debug=debug, on_free=on_free)
        self._breathing_room_ratio = breathing_room_ratio
        self._live: dict[int, KvSequence] = {}
        self._next_number = 1
        self._owed = 0
        """Pages that begun sequences still need for the tokens they began with."""
        self._asked_tokens = self._hit_tokens = 0

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def num_available(self) -> int:
        """Return the pages that `extend` can still hand out: free ones and cached ones."""
        return self.pages.num_available

    @property
    def num_used(self) -> int:
        """Return the pages that sequences hold; cheaper than `occupancy`."""
        return self.num_pages - self.num_available

    @property
    def breathing_pages(self) -> int:
        return int(self._breathing_room_ratio * self.num_pages)

    def can_begin(self, tokens: Sequence[int], growth_pages: int | None = None) -> bool:
        """Return whether `begin` would succeed now."""
        return self._fits(tokens, self._find(tokens)[0], growth_pages)

    def begin(self, tokens: Sequence[int], growth_pages: int | None = None) -> KvSequence:
        """Admit a sequence; whole pages of a known prefix are shared, its `num_tokens` says how far.

        The last token is never among them, so that there is something to compute. Slots for the rest come from `extend`.
        `growth_pages` is what all sequences together, this one counted, may ever ask for beyond the tokens they have; no more
        breathing room than that is kept. None: not known, the whole room is kept.

        Raises:
            PoolExhausted: beside what was promised to others and the breathing room, its pages are not there. A pool that
                nobody uses needs no breathing room.
        """
        pages, node = self._find(tokens)
        if not self._fits(tokens, pages, growth_pages):
            raise PoolExhausted(
                f"{self._pages_for(len(tokens)) - len(pages)} pages asked beside {len(pages)} found for {len(tokens)} tokens; "
                f"{self.num_available - self._woken(pages)} available, {self._owed} promised, "
                f"{self._room(growth_pages)} kept free"
            )
        sequence = self._enter(pages, node)
        sequence._owed = self._pages_for(len(tokens)) - len(pages)
        self._owed += sequence._owed
        self._asked_tokens += len(tokens)
        self._hit_tokens += sequence.num_cached
        return sequence

    def occupancy(self) -> Occupancy:
        """Return the figures of this moment; takes time in proportion to the pages."""
        used = [count for count in self.pages.refs if count]
        empty: dict[int, int] = {}
        breaks = neighbours = 0
        for sequence in self._live.values():
            for index in range(sequence.num_tokens // self.page_tokens, len(sequence.pages)):
                page, filled = sequence.pages[index], max(0, sequence.num_tokens - index * self.page_tokens)
                empty[page] = min(empty.get(page, self.page_tokens), self.page_tokens - filled)
            held = sequence.pages[sequence.num_dropped :]
            neighbours += max(0, len(held) - 1)
            breaks += sum(right != left + 1 for left, right in pairwise(held))
        waste = sum(empty.values())
        return Occupancy(
            num_pages=self.num_pages,
            num_free=len(self.pages.free),
            num_used=len(used),
            num_cached=len(self.pages.cache.idle),
            num_shared=sum(count > 1 for count in used),
            num_sequences=len(self._live),
            waste_tokens=waste,
            fragmentation_ratio=waste / (len(used) * self.page_tokens) if used else 0.0,
            scatter_ratio=breaks / neighbours if neighbours else 0.0,
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            num_evictions=self.pages.num_evictions,
        )

    def reset(self) -> None:
        """Forget every cached page and put the free pages back in order; for a quiet window.

        Raises:
            PoolMisuse: sequences are live.
        """
        if self._live:
            raise PoolMisuse(f"the pool is reset while {len(self._live)} sequences are live; wait until they are done")
        self.pages.reset()

    def resize(self, num_pages: int) -> list[Copy]:
        """Change the number of pages; return the copies to do before the storage is cut, since live pages move down.

        Raises:
            PoolExhausted: more pages are in use, or promised, than would be left; nothing was changed.
        """
        if num_pages >= self.num_pages:
            self.pages.grow(num_pages)
            return []
        needed = max(1, self.num_pages - self.num_available + self._owed)
        if num_pages < needed:
            raise PoolExhausted(f"{num_pages} pages asked for, {needed} are in use or promised")
        moved = self.pages.shrink(num_pages)
        for sequence in self._live.values():
            sequence.pages[:] = [moved.get(page, page) for page in sequence.pages]  # page 0 never moves, nor what stands for none
        return [Copy(source, target) for source, target in moved.items()]

    def verify(self) -> None:
        """Raise `PoolMisuse` where a page is lost, doubled or leaked, and say which."""
        for sequence in self._live.values():
            if len(sequence.pages) != self._pages_for(sequence.num_reserved):
                raise PoolMisuse(f"sequence {sequence.number}: {len(sequence.pages)} pages for {sequence.num_reserved} tokens")
        live = self._live.values()
        self.pages.verify(Counter(page for sequence in live for page in sequence.pages[sequence.num_dropped :]))
        if self._owed != sum(sequence._owed for sequence in self._live.values()):
            raise PoolMisuse(f"{self._owed} pages are promised, not what the sequences are owed")

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the cached pages of a prefix that leaves at least one token, and their last node."""
        whole = max(0, len(tokens) - 1) // self.page_tokens * self.page_tokens
        return self.pages.cache.find(tokens[:whole], self.page_tokens)

    def _fits(self, tokens: Sequence[int], shared: list[int], growth_pages: int | None) -> bool:
        fresh = self._pages_for(len(tokens)) - len(shared)
        return fresh <= self.num_available - self._woken(shared) - self._owed - self._room(growth_pages)

    def _room(self, growth_pages: int | None) -> int:
        """Return the pages kept free for those that are in already, and for the new one once it grows."""
        if not self._live:
            return 0
        return self.breathing_pages if growth_pages is None else min(self.breathing_pages, growth_pages)

    def _woken(self, shared: list[int]) -> int:
        return sum(page in self.pages.cache.idle for page in shared)

    def _enter(self, pages: list[int], node: int) -> KvSequence:
        sequence = KvSequence(self, self._next_number, pages, node)
        self._next_number += 1
        self.pages.share(pages, sequence.number)
        self._live[sequence.number] = sequence
        return sequence

    def _lengthen(self, sequence: KvSequence, end: int) -> list[Copy]:
        """Take the pages up to token `end`, and a page of its own for a tail that others read."""
        pages, number, allocator = sequence.pages, sequence.number, self.pages
        missing = -(-end // self.page_tokens) - len(pages)
        copied = bool(sequence.num_reserved % self.page_tokens) and allocator.refs[pages[-1]] > 1
        if missing + copied > len(allocator.free) and missing + copied > allocator.num_available:
            raise PoolExhausted(f"sequence {number}: {missing + copied} pages asked, {self.num_available} available")
        copies = []
        if copied:
            copies.append(Copy(source=pages[-1], target=allocator.take(number)))
            allocator.release(pages[-1:], number)
            pages[-1] = copies[0].target
        for _ in range(missing):
            pages.append(allocator.take(number))
        if sequence._owed:
            paid = min(sequence._owed, missing)
            sequence._owed -= paid
            self._owed -= paid
        sequence.num_reserved = end
        return copies
