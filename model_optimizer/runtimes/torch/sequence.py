"""One request while it lives: its tokens, and how far its keys and values are computed."""

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass

from model_optimizer.memory.kv_pool import KvSequence
from model_optimizer.protocols import GenerationRequest, RequestId


@dataclass(slots=True, eq=False)
class Running:
    """A request that waits or runs. `tokens` is the prompt and what was generated; the newest is never computed yet."""

    id: RequestId
    request: GenerationRequest
    tokens: list[int]
    num_computed: int = 0
    cache: KvSequence | None = None
    """None while it waits."""
    num_preemptions: int = 0

    @property
    def pages(self) -> KvSequence:
        """Return the page table of a request that runs."""
        assert self.cache is not None, f"request {self.id} waits and has no pages"
        return self.cache

    @property
    def num_pending(self) -> int:
        """Return how many tokens must be computed before the next one is known."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        stopped = self.num_generated > 0 and self.tokens[-1] in self.request.stop_tokens
        return stopped or self.num_generated >= self.request.max_new_tokens

    def named(self, start: int, end: int) -> TokenSequence[int]:
        """Return tokens under which pages are filed.

        A first one that no other request has keeps others from finding them; the request itself does, after a preemption.
        """
        tokens = self.tokens[start:end]
        if start == 0 and tokens and not self.request.shares_prefix:
            tokens[0] = -1 - self.id
        return tokens
