"""The native runtime: continuous batching over paged keys and values, one forward pass a step.

Shape letters: T tokens, V vocabulary.
"""

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.memory.budget import pages_for
from model_optimizer.memory.kv_pool import Copy, KvPool, Occupancy
from model_optimizer.protocols import (
    GenerationRequest,
    MemoryReading,
    RequestId,
    RuntimeFacts,
    TokenBatch,
    TokenEvent,
    TokenLogProbs,
)
from model_optimizer.runtimes.limits import check_request, check_tokens
from model_optimizer.runtimes.torch import scoring
from model_optimizer.runtimes.torch.attention import ATTENTIONS
from model_optimizer.runtimes.torch.config import NativeOptions, read_model_config
from model_optimizer.runtimes.torch.executor import Executor, PagedModel
from model_optimizer.runtimes.torch.model import Model
from model_optimizer.runtimes.torch.regions import EAGER, Regions
from model_optimizer.runtimes.torch.resizing import PoolKeeper
from model_optimizer.runtimes.torch.sampler import Choice, check_sampling
from model_optimizer.runtimes.torch.scheduler import Limits, Scheduler, Turn
from model_optimizer.runtimes.torch.sequence import Running
from model_optimizer.runtimes.torch.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Activity:
    """What the runtime is doing: for metrics and benchmarks."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_drafted: int
    """Tokens that a draft model guessed so far, and how many of them were right."""
    num_accepted: int
    pool: Occupancy
    num_orders: int
    """How often the pool was resized or put in order by rule."""


def open_native(directory: Path, plan: KvPlan, options: NativeOptions | None = None, *, level: int = 0) -> "NativeRuntime":
    """Load a model directory, plain or compressed-tensors, and set the plan's pages aside; from level 2 on, compile it.

    Raises:
        UnsupportedError: the architecture is not covered (the message names what is), or the compiler fails.
        ConfigError, IntegrityError: a directory cannot be read, or the draft does not fit the model.
    """
    options = options or NativeOptions()
    num_pages = min(plan.num_pages, options.initial_pages or plan.num_pages)
    paged, notes = _load(directory, plan, num_pages, options, Regions(level))
    if Regions(level).compiled:
        paged.model.compile_regions()
        notes += (f"what lies around attention is compiled, level {level}",)
    draft = None
    if options.draft is not None:
        draft, _ = _load(options.draft, plan, num_pages, options, EAGER)
        notes += (f"{options.num_drafts} tokens at a time are guessed by a draft model",)
    facts = RuntimeFacts(
        name="torch",
        version=torch.__version__.partition("+")[0],
        device=paged.model.device.type,
        precision=options.dtype,
        max_batch=plan.max_batch,
        max_model_len=plan.max_model_len,
        notes=(f"native: keys and values in {plan.num_pages} pages of {plan.page_tokens} tokens", *notes),
    )
    return NativeRuntime(Executor(paged, draft, hide_unwritten=options.debug), facts, plan, options)


def _load(
    directory: Path, plan: KvPlan, num_pages: int, options: NativeOptions, regions: Regions
) -> tuple[PagedModel, tuple[str, ...]]:
    """Return a model with its pages, and what there is to say of its weights."""
    config = read_model_config(directory)
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(f"native.device is {name} and no GPU is usable here; leave it out, or say cpu")
    checkpoint = Checkpoint(directory, options, torch.device(name))
    model = Model(checkpoint, config, ATTENTIONS.get(options.attention), torch.device(name), regions)
    return PagedModel(model, plan.page_tokens, num_pages, plan.precision), checkpoint.notes


class NativeRuntime:
    """A `LogitsRuntime`; used from one thread.

    Law: a request's tokens depend on the request alone, up to the rounding of float sums of other shapes, whoever shares
    its steps, however its prompt is cut, whatever was found in the prefix cache, and after any preemption.
    """

    def __init__(self, executor: Executor, facts: RuntimeFacts, plan: KvPlan, options: NativeOptions):
        self._facts = facts
        self._plan = plan
        self._executor: Executor | None = executor
        self._debug = options.debug
        num_pages = min(plan.num_pages, options.initial_pages or plan.num_pages)
        on_free = executor.poison if options.debug else None
        self._pool = KvPool(num_pages, plan.page_tokens, debug=options.debug, on_free=on_free)
        num_drafts = options.num_drafts if options.draft else 0
        limits = Limits(plan.max_batch, options.max_prefill_tokens, options.max_prefills, num_drafts, executor.window)
        self._scheduler = Scheduler(self._pool, limits, self._grow)
        least = min(plan.num_pages, pages_for(plan.max_model_len, plan.page_tokens))
        self._keeper = PoolKeeper(options.resize, self._pool, least, plan.num_pages) if options.resize.enabled else None
        self._ids = itertools.count()

    @property
    def facts(self) -> RuntimeFacts:
        return self._facts

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def activity(self) -> Activity:
        """Return queue, preemptions and pool of this moment."""
        scheduler, executor = self._scheduler, self._opened
        return Activity(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_preemptions,
            executor.num_drafted,
            executor.num_accepted,
            self._pool.occupancy(),
            self._keeper.num_orders if self._keeper else 0,
        )

    def submit(self, request: GenerationRequest) -> RequestId:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty, holds unknown tokens, or is too long with what it asks for; or its sampling is
                out of range.
        """
        check_request(request, self._plan, self._vocab_size)
        check_sampling(request, self._vocab_size)
        identity = RequestId(next(self._ids))
        self._scheduler.add(Running(identity, request, list(request.prompt)))
        return identity

    def step(self) -> list[TokenEvent]:
        """Run forward passes until one gives a token; [] when idle."""
        while True:
            events = self.advance()
            if events or not self.has_work:
                return events

    def advance(self) -> list[TokenEvent]:
        """Run one forward pass; [] when idle, or when it only computed pieces of prompts.

        A request whose logits are not finite ends there, its event's log-probability being NaN.
        """
        try:
            turns, copies = self._scheduler.plan()
            choices = self._run(turns, copies)
        except BaseException:
            self._scheduler.retract()
            raise
        now = time.perf_counter_ns()
        events = [event for turn, found in zip(turns, choices, strict=True) for event in self._take(turn, found, now)]
        if self._keeper is not None:
            self._keeper.look(self, self._scheduler.num_starved)
        if self._debug:
            self._pool.verify()
        return events

    def cancel(self, request: RequestId) -> None:
        """Drop a request and give its pages back; unknown or finished ids are ignored."""
        self._scheduler.cancel(request)

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        """Return teacher-forced log-probabilities, one entry per sequence, independent of batch mates.

        Raises:
            ConfigError: a sequence is empty or too long, or `score_from` lies outside it.
        """
        for tokens, first in zip(batch.tokens, batch.score_from, strict=True):
            check_tokens(tokens, self._plan, self._vocab_size)
            if not 1 <= first <= len(tokens):
                raise ConfigError(f"score_from is {first}; for a sequence of {len(tokens)} tokens 1..{len(tokens)} is allowed")
        return scoring.score(self._opened.model, self._opened.layout, batch)

    def logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """Return logits of one sequence, float32 [T, V].

        Raises:
            ConfigError: the sequence is empty or too long.
        """
        check_tokens(tokens, self._plan, self._vocab_size)
        return scoring.full_logits(self._opened.model, self._opened.layout, tokens)

    def memory(self) -> MemoryReading:
        """Return bytes of weights, of the running requests' keys and values, of the process and of all pages."""
        executor = self._opened
        kv_bytes = self._scheduler.num_cached_tokens * executor.bytes_per_token
        return MemoryReading(executor.weight_bytes, kv_bytes, psutil.Process().memory_info().rss, executor.pool_bytes)

    def close(self) -> None:
        """Drop every request, the pages and the weights."""
        self._scheduler.clear()
        self._executor = None

    @property
    def _opened(self) -> Executor:
        if self._executor is None:
            raise ConfigError("the runtime is closed; open it again")
        return self._executor

    @property
    def _vocab_size(self) -> int:
        return self._opened.model.config.shape.vocab_size

    def resize_pool(self, num_pages: int) -> None:
        """Change pages and storage between two batches; pages in use move down before the end is cut off.

        Raises:
            PoolExhausted: more pages are in use; nothing was changed.
        """
        if num_pages > self._pool.num_pages:
            self._opened.resize(num_pages)
            self._pool.resize(num_pages)
        elif num_pages < self._pool.num_pages:
            self._opened.copy(self._pool.resize(num_pages))
            self._opened.resize(num_pages)

    def reset_pool(self) -> None:
        """Forget cached pages and put free ones in order; only while no request runs."""
        self._pool.reset()

    def _run(self, turns: list[Turn], copies: list[Copy]) -> list[list[Choice]]:
        if not turns:
            return []
        self._opened.copy(copies)
        return self._opened.run(turns)

    def _grow(self, is_needed: bool) -> bool:
        """Double the pages, up to the plan's; where rules say when to grow, only for a request that could not go on at all."""
        num_pages = min(self._plan.num_pages, 2 * self._pool.num_pages)
        if num_pages == self._pool.num_pages or not (is_needed or self._keeper is None):
            return False
        self.resize_pool(num_pages)
        return True

    def _take(self, turn: Turn, choices: list[Choice], now: int) -> list[TokenEvent]:
        """Give a request the tokens that were chosen for it, up to the one that ends it; return their events."""
        running, events = turn.running, list[TokenEvent]()
        for choice in choices:
            running.tokens.append(choice.token)
            is_broken = not math.isfinite(choice.log_prob)
            self._opened.hide_unwritten |= is_broken
            finished = running.is_finished or is_broken
            events.append(TokenEvent(running.id, choice.token, choice.log_prob, now, finished, choice.top))
            if finished:
                break
        self._scheduler.commit(running, turn.num_tokens + max(0, len(events) - 1))
        if events and events[-1].finished:
            self._scheduler.finish(running)
        return events
