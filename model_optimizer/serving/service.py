"""The server without HTTP: one active model, admission, answers, draining, and the swap to another model."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.serving.answers import Finish, Piece, TokenScore
from model_optimizer.serving.config import ServeConfig
from model_optimizer.serving.engine import EngineKeeper
from model_optimizer.serving.faults import Refusal
from model_optimizer.serving.metrics import Metrics
from model_optimizer.serving.source import Source, read_source, refuse_served_version
from model_optimizer.serving.text import AnswerText, TextCodec, Turn
from model_optimizer.serving.wire import Open, Ready, Submit, Token

log = logging.getLogger(__name__)

_LONG_TEXT = 4096
"""Characters from which on a prompt is encoded beside the event loop."""
_SMOOTHING_RATIO = 0.1
_LONGEST_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, whichever endpoint it came by. `prompt` is a text, its tokens, or a conversation."""

    model: str
    prompt: str | tuple[int, ...] | tuple[Turn, ...]
    limit: int | None
    stops: tuple[str, ...]
    temperature: float | None
    top_p: float | None
    seed: int | None
    num_top: int | None
    """Likeliest tokens to tell beside the chosen one; None: no log-probabilities at all."""


class LoadedModel:
    """A model that can answer: where it came from, its text codec, its engine."""

    def __init__(self, source: Source, codec: TextCodec, keeper: EngineKeeper, ready: Ready):
        self.source = source
        self.codec = codec
        self.keeper = keeper
        self.ready = ready
        self.created = int(time.time())
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model open while a request runs."""
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def close_when_idle(self) -> None:
        """Wait for the last request, then end the engine."""
        await self._idle.wait()
        await self.keeper.close()


async def load_model(path: Path, config: ServeConfig) -> LoadedModel:
    """Verify, plan and open what lies at `path`.

    Raises:
        IntegrityError, ConfigError, UnsupportedError: it cannot be served.
    """
    source = await asyncio.to_thread(read_source, path, config)
    codec = await asyncio.to_thread(TextCodec.read, source.model)
    wanted = Open(engine=source.engine, directory=str(source.engine_directory), kv=source.kv, options=config.options)
    keeper = EngineKeeper(wanted, config.engine)
    ready = await keeper.open()
    try:
        refuse_served_version(source, ready.runtime, ready.version)
    except UnsupportedError:
        await keeper.close()
        raise
    return LoadedModel(source, codec, keeper, ready)


class Service:
    """What the endpoints talk to."""

    def __init__(self, model: LoadedModel, config: ServeConfig, metrics: Metrics):
        self.active = model
        self.config = config
        self.metrics = metrics
        self.draining = False
        self._num_open = self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0
        self._retiring: dict[asyncio.Task[None], LoadedModel] = {}

    @property
    def name(self) -> str:
        """Return the name that clients are told."""
        return self.config.served_name or self.active.source.family

    @property
    def ready(self) -> bool:
        return not self.draining and self.active.keeper.engine is not None

    def answers_to(self, name: str) -> bool:
        return name in (self.name, self.active.source.name)

    def observe(self) -> None:
        """Bring the gauges up to date."""
        engine, source, metrics = self.active.keeper.engine, self.active.source, self.metrics
        metrics.open_requests.set(self._num_open)
        metrics.running.set(self._num_running)
        metrics.waiting.set(self._num_open - self._num_running)
        metrics.engine_up.set(engine is not None)
        metrics.engine_restarts.set(self.active.keeper.num_restarts)
        metrics.kv_pool_bytes.set(source.kv.pool_bytes)
        metrics.kv_bytes.set(engine.reading.kv_bytes if engine else 0)
        metrics.kv_held_bytes.set(engine.reading.pool_bytes if engine else 0)
        metrics.process_bytes.set(engine.reading.process_bytes if engine else 0)
        metrics.model.clear()
        metrics.model.labels(source.name, source.engine.runtime, source.quantization, source.optimizer_hash).set(1)

    def swap(self, model: LoadedModel) -> None:
        """Give new requests to another model; the one before ends when its last request has ended."""
        before, self.active = self.active, model
        task = asyncio.create_task(before.close_when_idle())
        self._retiring[task] = before
        task.add_done_callback(lambda ended: self._retiring.pop(ended, None))

    async def drain(self) -> bool:
        """Take no more requests and wait for the running ones; return whether all ended in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.limits.drain_timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def close(self) -> None:
        """End every engine."""
        models = [*self._retiring.values(), self.active]
        for task in tuple(self._retiring):
            task.cancel()
        await asyncio.gather(*[model.keeper.close() for model in models])

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Yield an answer piece by piece, the first as soon as there is a token.

        Raises:
            Refusal: the request cannot be answered now, or at all.
        """
        start = time.monotonic()
        with self._admitted():
            model = self.active
            if not self.answers_to(ask.model):
                message = f"the model {ask.model[:200]!r} is not served here; it is {self.name!r}"
                raise Refusal(404, message, "model_not_found", "model")
            with model.in_use():
                prompt = await _encode(model.codec, ask)
                job = self._job(model, ask, prompt)
                pieces = self._pieces(model, job, ask, start)
                async with aclosing(pieces):
                    async for piece in pieces:
                        yield piece
        self._mean_s += _SMOOTHING_RATIO * (time.monotonic() - start - self._mean_s)

    async def _pieces(self, model: LoadedModel, job: Submit, ask: Ask, start: float) -> AsyncGenerator[Piece, None]:
        answer, scored = AnswerText(model.codec, ask.stops), ask.num_top is not None
        deadline = asyncio.get_running_loop().time() + self.config.limits.request_timeout_s
        tokens = model.keeper.running().generate(job, deadline)
        self.metrics.prompt_tokens.inc(len(job.prompt))
        num_generated = 0
        async with aclosing(self._timed(tokens, start)) as timed:
            async for token in timed:
                num_generated += 1
                ended = token.token in job.stop_tokens
                text = "" if ended else answer.push(token.token)
                if token.finished:
                    text += answer.finish()
                finish: Finish | None = "stop" if ended or answer.stopped else "length" if token.finished else None
                scores = (_score(model.codec, token),) if scored and not ended else ()
                yield Piece(text, scores, finish, len(job.prompt), num_generated)
                if finish is not None:
                    self.metrics.finished.labels(finish).inc()
                    self.metrics.request_seconds.observe(time.monotonic() - start)
                    return

    async def _timed(self, tokens: AsyncGenerator[Token, None], start: float) -> AsyncGenerator[Token, None]:
        """Pass tokens on and count them; a request runs from its first token on."""
        heard, histogram, running = start, self.metrics.first_token_seconds, 0
        try:
            async with aclosing(tokens):
                async for token in tokens:
                    now = time.monotonic()
                    histogram.observe(now - heard)
                    self.metrics.generated_tokens.inc()
                    self._num_running += 1 - running
                    heard, histogram, running = now, self.metrics.inter_token_seconds, 1
                    yield token
        finally:
            self._num_running -= running

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a request in; refuse it where the server ends or is full."""
        limit = self.active.ready.max_batch + self.config.limits.max_waiting
        if self.draining:
            raise Refusal(503, "the server is ending; ask another one", "draining", retry_after_s=1)
        if self._num_open >= limit:
            rounds = self._num_open / max(1, self.active.ready.max_batch)
            retry_after_s = min(_LONGEST_RETRY_S, max(1, round(rounds * self._mean_s)))
            message = f"the server has {limit} requests and takes no more; try again in about {retry_after_s} s"
            raise Refusal(429, message, "queue_full", retry_after_s=retry_after_s)
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    def _job(self, model: LoadedModel, ask: Ask, prompt: Sequence[int]) -> Submit:
        longest = model.ready.max_model_len
        limits = [longest - len(prompt)] if ask.limit is None else [ask.limit]
        if self.config.limits.max_new_tokens is not None:
            limits.append(self.config.limits.max_new_tokens)
        num_new = min(limits)
        if not prompt:
            raise Refusal(400, "the prompt has no tokens", "empty_prompt", "prompt")
        if num_new < 1 or len(prompt) + num_new > longest:
            message = f"{len(prompt)} prompt tokens and {max(1, num_new)} new ones exceed this model's {longest}; shorten one"
            raise Refusal(400, message, "context_length_exceeded", "messages" if isinstance(ask.prompt, tuple) else "prompt")
        sampling = self.config.sampling
        temperature = sampling.temperature if ask.temperature is None else ask.temperature
        return Submit(
            number=0,
            prompt=tuple(prompt),
            max_new_tokens=num_new,
            stop_tokens=model.codec.ends,
            temperature=temperature,
            top_p=sampling.top_p if ask.top_p is None else ask.top_p,
            seed=secrets.randbits(31) if ask.seed is None else ask.seed % 2**63,
            num_top=ask.num_top or 0,
            shares_prefix=self.config.engine.share_prefixes,
        )


async def _encode(codec: TextCodec, ask: Ask) -> Sequence[int]:
    """Return a prompt's tokens; long texts are encoded in a thread, so that they hold up nobody."""
    prompt = ask.prompt
    if isinstance(prompt, str):
        return codec.encode(prompt) if len(prompt) < _LONG_TEXT else await asyncio.to_thread(codec.encode, prompt)
    turns = [part for part in prompt if isinstance(part, Turn)]
    if not turns:
        return [part for part in prompt if isinstance(part, int)]
    try:
        if sum(len(turn.content) for turn in turns) < _LONG_TEXT:
            return codec.encode_chat(turns)
        return await asyncio.to_thread(codec.encode_chat, turns)
    except ConfigError as error:
        raise Refusal(400, str(error), "invalid_messages", "messages") from error


def _score(codec: TextCodec, token: Token) -> TokenScore:
    top = tuple((codec.token_text(other), log_prob) for other, log_prob in token.top)
    return TokenScore(codec.token_text(token.token), token.log_prob, top)
