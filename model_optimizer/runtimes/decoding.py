"""Continuous batching over any model that can run one padded batch: requests join and leave between steps.

Rows of unequal length share one cache by left padding with zeros, which the attention mask hides. A
request is prefilled alone, and draws by seed and position, so its tokens do not depend on who shares the batch. Knows no
framework: a backend brings a `DecoderModel`.

Shape letters: B rows, S new tokens, V vocabulary.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import psutil
from numpy.typing import NDArray

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import (
    GenerationRequest,
    MemoryReading,
    RequestId,
    RuntimeFacts,
    TokenBatch,
    TokenEvent,
    TokenLogProbs,
)
from model_optimizer.runtimes.decoder_model import C, DecoderModel, ModelInput
from model_optimizer.runtimes.limits import check_request, check_tokens, pages_of
from model_optimizer.runtimes.scoring import full_logits, log_sum_exp, score_batch


@dataclass(slots=True)
class _Row:
    """One running request; its cache holds `num_cached` tokens and `token` is the newest, not yet cached."""

    id: RequestId
    request: GenerationRequest
    num_cached: int
    token: int
    num_generated: int = 1

    @property
    def finished(self) -> bool:
        return self.num_generated >= self.request.max_new_tokens or self.token in self.request.stop_tokens


class DecodingRuntime(Generic[C]):
    """A `LogitsRuntime` over a `DecoderModel` within a `KvPlan`.

    Law: rows x longest reserved row, in pages, never exceeds the plan's pages, so the padded cache
    never outgrows it.
    """

    def __init__(self, model: DecoderModel[C], facts: RuntimeFacts, plan: KvPlan):
        self._model = model
        self._facts = facts
        self._plan = plan
        self._ids = itertools.count()
        self._waiting: deque[tuple[RequestId, GenerationRequest]] = deque()
        self._rows: list[_Row] = []
        self._cache: C | None = None

    @property
    def facts(self) -> RuntimeFacts:
        return self._facts

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        """Return teacher-forced log-probabilities, one entry per sequence, independent of batch mates.

        Raises:
            ConfigError: a sequence is empty or too long, or `score_from` lies outside it.
        """
        for tokens, first in zip(batch.tokens, batch.score_from, strict=True):
            check_tokens(tokens, self._plan, self._model.vocab_size)
            if not 1 <= first <= len(tokens):
                raise ConfigError(f"score_from is {first}; for a sequence of {len(tokens)} tokens 1..{len(tokens)} is allowed")
        return score_batch(self._model, batch)

    def logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """Return logits of one sequence, float32 [T, V].

        Raises:
            ConfigError: the sequence is empty or too long.
        """
        check_tokens(tokens, self._plan, self._model.vocab_size)
        return full_logits(self._model, tokens)

    def submit(self, request: GenerationRequest) -> RequestId:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty, holds unknown tokens, or is too long with what it asks for; or its sampling is
                out of range.
        """
        check_request(request, self._plan, self._model.vocab_size)
        if not _is_plain(request):
            from model_optimizer.runtimes.torch.sampler import check_sampling

            check_sampling(request, self._model.vocab_size)
        identity = RequestId(next(self._ids))
        self._waiting.append((identity, request))
        return identity

    def step(self) -> list[TokenEvent]:
        """Decode one token for every running request and admit what fits; [] when idle."""
        events = self._decode()
        joined: list[_Row] = []
        caches: list[C] = []
        while self._waiting and self._can_admit(self._waiting[0][1], joined):
            row, cache, event = self._prefill(*self._waiting.popleft())
            events.append(event)
            if not row.finished:
                joined.append(row)
                caches.append(cache)
        if joined:
            caches = caches if self._cache is None else [self._cache, *caches]
            self._cache = caches[0] if len(caches) == 1 else self._model.join(caches)
            self._rows += joined
        return events

    def cancel(self, request: RequestId) -> None:
        """Drop a request and free its cache; unknown or finished ids are ignored."""
        self._waiting = deque(item for item in self._waiting if item[0] != request)
        self._keep([row.id != request for row in self._rows])

    def memory(self) -> MemoryReading:
        """Return bytes of weights, KV cache now (padding included) and the whole process."""
        kv_bytes = 0 if self._cache is None else self._model.cache_bytes(self._cache)
        return MemoryReading(self._model.weight_bytes, kv_bytes, psutil.Process().memory_info().rss)

    def close(self) -> None:
        """Drop every request and the model."""
        self._waiting.clear()
        self._rows, self._cache = [], None
        self._model.close()

    def _can_admit(self, request: GenerationRequest, joined: list[_Row]) -> bool:
        running = [row.request for row in (*self._rows, *joined)]
        longest = max(pages_of(other, self._plan) for other in (*running, request))
        return len(running) < self._plan.max_batch and (len(running) + 1) * longest <= self._plan.num_pages

    def _prefill(self, identity: RequestId, request: GenerationRequest) -> tuple[_Row, C, TokenEvent]:
        """Run a prompt alone and pick its first token."""
        num_tokens = len(request.prompt)
        prompt_BS = np.array([request.prompt], np.int64)
        batch = ModelInput(prompt_BS, np.ones_like(prompt_BS), np.arange(num_tokens, dtype=np.int64)[None], num_tokens - 1)
        logits_BSV, cache = self._model.forward(batch, None)
        token, log_prob, top = _pick(logits_BSV[:, -1], [(request, num_tokens)])[0]
        row = _Row(identity, request, num_tokens, token)
        return row, cache, TokenEvent(identity, token, log_prob, time.perf_counter_ns(), row.finished, top)

    def _decode(self) -> list[TokenEvent]:
        """Run the newest token of every row, pick the next ones, drop the finished rows."""
        if not self._rows:
            return []
        lengths_B = np.array([row.num_cached for row in self._rows], np.int64)
        width = int(lengths_B.max()) + 1
        batch = ModelInput(
            np.array([[row.token] for row in self._rows], np.int64),
            (np.arange(width) >= width - 1 - lengths_B[:, None]).astype(np.int64),
            lengths_B[:, None],
        )
        logits_BSV, self._cache = self._model.forward(batch, self._cache)
        picks = _pick(logits_BSV[:, -1], [(row.request, row.num_cached + 1) for row in self._rows])
        now = time.perf_counter_ns()
        events = []
        for row, (token, log_prob, top) in zip(self._rows, picks, strict=True):
            row.num_cached, row.token, row.num_generated = row.num_cached + 1, token, row.num_generated + 1
            events.append(TokenEvent(row.id, token, log_prob, now, row.finished, top))
        self._keep([not row.finished for row in self._rows])
        return events

    def _keep(self, kept: list[bool]) -> None:
        """Drop rows, and the padding that no remaining row needs."""
        if all(kept):
            return
        width = max(row.num_cached for row in self._rows)
        rows = [index for index, keep in enumerate(kept) if keep]
        self._rows = [self._rows[index] for index in rows]
        if not self._rows:
            self._cache = None
            return
        assert self._cache is not None
        self._cache = self._model.select(self._cache, rows, width - max(row.num_cached for row in self._rows))


_Pick = tuple[int, float, tuple[tuple[int, float], ...]]
"""A token, its log-probability in nats, and the likeliest tokens where they are wanted."""


def _is_plain(request: GenerationRequest) -> bool:
    return request.sampling.temperature == 0 and request.num_top == 0


def _pick(logits_BV: NDArray[np.float32], rows: Sequence[tuple[GenerationRequest, int]]) -> list[_Pick]:
    """Return the next token of every row, given its request and the position that the token will have."""
    if all(_is_plain(request) for request, _ in rows):
        return _greedy(logits_BV)
    import torch

    from model_optimizer.runtimes.torch.sampler import Draw, choose

    draws = [Draw(request.sampling, position, request.num_top) for request, position in rows]
    return [(choice.token, choice.log_prob, choice.top) for choice in choose(torch.tensor(logits_BV), draws)]


def _greedy(logits_BV: NDArray[np.float32]) -> list[_Pick]:
    """Return the most likely token of every row with its log-probability in nats."""
    tokens_B = logits_BV.argmax(axis=-1)
    best_B = np.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    log_probs_B = best_B - log_sum_exp(logits_BV)
    return [(int(token), float(log_prob), ()) for token, log_prob in zip(tokens_B, log_probs_B, strict=True)]
