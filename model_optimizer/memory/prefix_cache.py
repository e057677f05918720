"""Which page holds which tokens after which prefix, and which of those pages nobody uses.

A chain of nodes, one a page: a page is found by the node before it and its own tokens, compared token by token, so that
two prefixes are never taken for one (no digest, no collision). A node's number is never given twice: what hangs below an
evicted page can no longer be found, and is evicted in its own turn. Knows no sequence and no tensor.
"""

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0
"""The node before the first page."""

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Full pages by their content; those without a user wait in order of last use, the oldest is evicted first."""

    __slots__ = ("_entry_of", "_next_node", "_page_of", "idle")

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._entry_of: dict[int, tuple[Key, int]] = {}
        self._next_node = ROOT + 1
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Pages kept for their content alone, the least recently used first."""

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    def find(self, tokens: Sequence[int], page_tokens: int) -> tuple[list[int], int]:
        """Return the pages that hold the longest known prefix of `tokens`, whole pages only, and its last node."""
        pages: list[int] = []
        node = ROOT
        for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
            page = self._page_of.get((node, tuple(tokens[start : start + page_tokens])))
            if page is None:
                break
            pages.append(page)
            node = self._entry_of[page][1]
        return pages, node

    def register(self, node: int, tokens: tuple[int, ...], page: int) -> int:
        """Make a full page findable after `node` and return its node; content that another page holds keeps that page's."""
        key = (node, tokens)
        known = self._page_of.get(key)
        if known is not None:
            return self._entry_of[known][1]
        fresh = self._next_node
        self._page_of[key] = page
        self._entry_of[page] = (key, fresh)
        self._next_node = fresh + 1
        return fresh

    def evict_oldest(self) -> int:
        """Forget the idle page that was used longest ago and return it.

        Raises:
            KeyError: no page is idle.
        """
        page, _ = self.idle.popitem(last=False)
        del self._page_of[self._entry_of.pop(page)[0]]
        return page

    def evict(self, page: int) -> None:
        """Forget one idle page."""
        del self.idle[page]
        del self._page_of[self._entry_of.pop(page)[0]]

    def move(self, source: int, target: int) -> None:
        """Let `target` stand for what `source` held, where that is findable."""
        entry = self._entry_of.pop(source, None)
        if entry is not None:
            self._entry_of[target] = entry
            self._page_of[entry[0]] = target
