"""Pages of one size: which are free, how often each is used, and which are kept for their content alone.

Free, used and cached exclude each other. In debug mode every page knows its owners, and whoever gives back or writes what
is not his is told so. Knows no sequence, only the owner's number.
"""

from collections.abc import Callable, Iterable

from model_optimizer.memory.prefix_cache import PrefixCache


class PoolMisuse(Exception):
    """A page or a sequence was used against the rules: a bug of the caller, never to be masked (X27)."""


class PageAllocator:
    """A free list, reference counts and the prefix cache's idle pages; constant time a page."""

    def __init__(self, num_pages: int, *, debug: bool, on_free: Callable[[list[int]], None] | None) -> None:
        """Start with every page free; `on_free` hears of pages whose content is void."""
        self.num_pages = num_pages
        self.debug = debug
        self.cache = PrefixCache()
        self.refs = [0] * num_pages
        """Sequences that use each page."""
        self.free = list(range(num_pages - 1, -1, -1))
        """Taken from the end, so that a fresh pool hands out pages in order."""
        self.num_evictions = 0
        self._on_free = on_free
        self._owners: list[set[int]] = [set() for _ in range(num_pages)] if debug else []

    @property
    def num_available(self) -> int:
        """Return the pages that `take` can still give: free ones and cached ones."""
        return len(self.free) + len(self.cache.idle)

    def take(self, owner: int) -> int:
        """Return a page for one owner: a free one, else the cached one that was used longest ago.

        Raises:
            KeyError: none is available; ask `num_available` first.
        """
        if self.free:
            page = self.free.pop()
        else:
            page = self.cache.evict_oldest()
            self.num_evictions += 1
            if self._on_free is not None:
                self._on_free([page])
        self.refs[page] = 1
        if self.debug:
            if self._owners[page]:
                raise PoolMisuse(f"page {page} was handed out while sequence {min(self._owners[page])} owns it")
            self._owners[page].add(owner)
        return page

    def share(self, pages: Iterable[int], owner: int) -> None:
        """Count one more user of each page; a cached page is in use again."""
        refs, idle = self.refs, self.cache.idle
        for page in pages:
            if not refs[page]:
                del idle[page]
            refs[page] += 1
            if self.debug:
                self._owners[page].add(owner)

    def release(self, pages: list[int], owner: int) -> None:
        """Count one user less of each page, the last first, so that of a prefix the longest part is evicted first.

        Raises:
            PoolMisuse: in debug mode, the owner does not hold one of them.
        """
        if self.debug:
            self.check_owned(pages, owner)
        refs, cache = self.refs, self.cache
        void: list[int] = []
        for page in reversed(pages):
            left = refs[page] - 1
            refs[page] = left
            if self.debug:
                self._owners[page].discard(owner)
            if not left:
                if page in cache:
                    cache.idle[page] = None
                else:
                    void.append(page)
        if void:
            self.free += void
            if self._on_free is not None:
                self._on_free(void)

    def grow(self, num_pages: int) -> None:
        """Add free pages at the end; they are handed out after those that were there."""
        self.free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        self.refs += [0] * (num_pages - self.num_pages)
        if self.debug:
            self._owners += [set() for _ in range(num_pages - self.num_pages)]
        self.num_pages = num_pages

    def shrink(self, num_pages: int) -> dict[int, int]:
        """Cut the last pages off; return where each used one among them moved. The used ones must fit into what is left."""
        cache, refs = self.cache, self.refs
        for page in [page for page in cache.idle if page >= num_pages]:
            cache.evict(page)
        self.free = [page for page in self.free if page < num_pages]
        moved: dict[int, int] = {}
        for page in range(num_pages, self.num_pages):
            if refs[page]:
                moved[page] = target = self.free.pop() if self.free else cache.evict_oldest()
                refs[target] = refs[page]
                cache.move(page, target)
                if self.debug:
                    self._owners[target] = self._owners[page]
        del refs[num_pages:]
        del self._owners[num_pages:]
        self.num_pages = num_pages
        return moved

    def reset(self) -> None:
        """Forget all cached pages and put the free ones back in order; no page may be in use."""
        idle = list(self.cache.idle)
        for page in idle:
            self.cache.evict(page)
        if self._on_free is not None and idle:
            self._on_free(idle)
        self.free = list(range(self.num_pages - 1, -1, -1))

    def check_owned(self, pages: Iterable[int], owner: int) -> None:
        """Refuse pages that the owner does not hold; only in debug mode.

        Raises:
            PoolMisuse: it does not.
        """
        for page in pages:
            if not 0 <= page < self.num_pages or owner not in self._owners[page]:
                raise PoolMisuse(f"sequence {owner} holds page {page}, which it does not own (freed twice, or a foreign table?)")

    def check_private(self, pages: Iterable[int], owner: int) -> None:
        """Refuse pages that another sequence reads or may find.

        Raises:
            PoolMisuse: one is such a page.
        """
        for page in pages:
            if self.refs[page] != 1 or page in self.cache:
                raise PoolMisuse(f"sequence {owner} would write page {page}, which others may read")

    def verify(self, held: dict[int, int]) -> None:
        """Make sure that no page is lost, doubled or leaked, given how often sequences hold each.

        Raises:
            PoolMisuse: one is; the message says which.
        """
        free, idle = set(self.free), self.cache.idle
        if len(free) != len(self.free):
            raise PoolMisuse("a page is free twice")
        for page, count in enumerate(self.refs):
            if count != held.get(page, 0):
                raise PoolMisuse(f"page {page} counts {count} users and has {held.get(page, 0)}")
            if (count > 0) + (page in free) + (page in idle) != 1:
                raise PoolMisuse(f"page {page} is not in exactly one of free, used and cached")
