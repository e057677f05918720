"""Which tokens run next: continuous batching, chunked prefill, and who gives way when pages run out.

Every step, the oldest request first: whoever has one token to compute (it decodes) computes it; prompts share a budget of
tokens and are cut into chunks; then waiting requests are admitted in the order they came. When pages run out the youngest
request gives all of its pages back and waits at the front, to be computed again later, so the oldest always gets on.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model_optimizer.memory.budget import pages_for
from model_optimizer.memory.kv_pool import Copy, KvPool, PoolExhausted
from model_optimizer.protocols import RequestId
from model_optimizer.runtimes.torch.sequence import Running


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one step may hold."""

    max_batch: int
    """Requests that run at once; also how many may decode in one step."""
    max_prefill_tokens: int
    max_prefills: int
    num_drafts: int = 0
    """Guesses of a draft model that a decoding request may have checked in one step."""
    window: int | None = None
    """Tokens back that any layer sees, the token itself counted; pages wholly before them are given back. None: all."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request computes in a step; slots for it and its guesses are reserved."""

    running: Running
    num_tokens: int
    ends: bool
    """Whether the request's next token is known after this turn."""
    num_drafts: int = 0


@dataclass(slots=True)
class _Budget:
    """What is left of a step for prompts."""

    num_tokens: int
    num_prefills: int

    def share(self, running: Running) -> int:
        """Return how many tokens a request may compute now, and take them from the budget."""
        if running.num_pending == 1:
            return 1
        if not self.num_prefills:
            return 0
        granted = min(self.num_tokens, running.num_pending)
        self.num_tokens -= granted
        self.num_prefills -= 1
        return granted

    @property
    def is_spent(self) -> bool:
        return not self.num_tokens or not self.num_prefills


class Scheduler:
    """The queue, the running requests, and their pages."""

    def __init__(self, pool: KvPool, limits: Limits, grow: Callable[[bool], bool]):
        """Start empty; `grow` is asked for more pages when they run out and says whether there are more now.

        It is told whether there is no other way, since nobody else holds pages.
        """
        self.num_preemptions = 0
        self.num_starved = 0
        """Requests that waited for pages after the last plan, not for a batch slot."""
        self._pool = pool
        self._limits = limits
        self._grow = grow
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Return the tokens of running requests whose keys and values are held, shared ones once for each."""
        dropped = sum(running.pages.num_dropped for running in self._running) if self._limits.window else 0
        return sum(running.num_computed for running in self._running) - dropped * self._pool.page_tokens

    def add(self, running: Running) -> None:
        """Queue a request behind all others."""
        self._waiting.append(running)

    def cancel(self, identity: RequestId) -> None:
        """Drop a request and give its pages back; an unknown one is ignored."""
        self._waiting = deque(running for running in self._waiting if running.id != identity)
        for running in [running for running in self._running if running.id == identity]:
            self.finish(running)

    def finish(self, running: Running) -> None:
        """Give a running request's pages back and forget it."""
        self._running.remove(running)
        running.pages.free()
        running.cache = None

    def plan(self) -> tuple[list[Turn], list[Copy]]:
        """Return the next step's turns, their slots reserved, and the page copies that it starts with; [] when idle."""
        budget = _Budget(self._limits.max_prefill_tokens, self._limits.max_prefills)
        turns, copies = list[Turn](), list[Copy]()
        preemptions = self.num_preemptions
        for running in self._still_running():
            if turn := self._turn(running, budget, copies):
                turns.append(turn)
        self.num_starved = 0
        if self.num_preemptions > preemptions:
            self.num_starved = len(self._waiting)
            return turns, copies
        while self._waiting and len(self._running) < self._limits.max_batch and not budget.is_spent:
            if not self._admit(self._waiting[0]):
                self.num_starved = len(self._waiting)
                break
            running = self._waiting.popleft()
            if turn := self._turn(running, budget, copies):
                turns.append(turn)
        return turns, copies

    def commit(self, running: Running, num_tokens: int) -> None:
        """Say that keys and values of the request's next tokens are written, and give back what was reserved beyond them."""
        start = running.num_computed
        running.pages.commit(running.named(start, start + num_tokens))
        running.pages.retract()
        running.num_computed += num_tokens
        if self._limits.window is not None:
            running.pages.drop_before(running.num_computed - self._limits.window + 1)

    def retract(self) -> None:
        """Give back what a failed step reserved."""
        for running in self._running:
            running.pages.retract()

    def clear(self) -> None:
        """Drop every request."""
        self._waiting.clear()
        for running in list(self._running):
            self.finish(running)

    def _still_running(self) -> Iterator[Running]:
        """Yield the running requests, oldest first, leaving out those that gave way meanwhile."""
        index = 0
        while index < len(self._running):
            yield self._running[index]
            index += 1

    def _admit(self, running: Running) -> bool:
        """Start a waiting request where the pool has room for its whole prompt."""
        while running.cache is None:
            try:
                running.cache = self._pool.begin(running.named(0, len(running.tokens)), self._growth_pages(running))
            except PoolExhausted:
                if not self._grow(not self._running):
                    return False
        running.num_computed = running.cache.num_tokens
        self._running.append(running)
        return True

    def _growth_pages(self, new: Running) -> int:
        """Return what the running requests and `new` may need at their full length, beyond the pages of their tokens so far."""
        size = self._pool.page_tokens
        return sum(
            pages_for(len(running.request.prompt) + running.request.max_new_tokens, size) - pages_for(len(running.tokens), size)
            for running in (*self._running, new)
        )

    def _turn(self, running: Running, budget: _Budget, copies: list[Copy]) -> Turn | None:
        """Return a request's turn, its slots reserved; None where the budget is spent or it had to give way itself."""
        num_tokens = budget.share(running)
        if not num_tokens:
            return None
        ends = num_tokens == running.num_pending
        if running.num_pending == 1 and running.num_generated:
            num_drafts = min(self._limits.num_drafts, running.request.max_new_tokens - running.num_generated - 1)
            if num_drafts > 0 and self._try_reserve(running, 1 + num_drafts, copies):
                return Turn(running, 1, ends, num_drafts)
        return Turn(running, num_tokens, ends) if self._reserve(running, num_tokens, copies) else None

    def _try_reserve(self, running: Running, num_tokens: int, copies: list[Copy]) -> bool:
        """Reserve slots where there is room for them."""
        try:
            copies += running.pages.extend(num_tokens)
        except PoolExhausted:
            return False
        return True

    def _reserve(self, running: Running, num_tokens: int, copies: list[Copy]) -> bool:
        """Reserve slots, at the cost of the youngest requests; False where the youngest was this one."""
        while not self._try_reserve(running, num_tokens, copies):
            if self._grow(len(self._running) == 1):
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is running:
                return False
        return True

    def _preempt(self, running: Running) -> None:
        self.finish(running)
        running.num_computed = 0
        running.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(running)
