"""One engine in its own process, and its keeper, who replaces it when it dies or says nothing any more.

A crash of the engine costs the requests that it was running, never the server.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from typing import Self

from model_optimizer.errors import ConfigError, IntegrityError, ModelOptimizerError, UnsupportedError
from model_optimizer.serving.config import EngineConfig
from model_optimizer.serving.faults import Refusal, engine_is_down, request_is_lost
from model_optimizer.serving.wire import REPORT, Cancel, Failed, Message, Open, Reading, Ready, Refused, Submit, Token, Tokens

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "model_optimizer.serving.worker")
_LINE_LIMIT_BYTES = 64 << 20
_END_S = 10.0
"""For an engine to end by itself once its orders have ended."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LOOK_EVERY_S = 1.0
_LONGEST_RETRY_S = 60
_FAULTS: dict[str, type[ModelOptimizerError]] = {
    "ConfigError": ConfigError,
    "IntegrityError": IntegrityError,
    "UnsupportedError": UnsupportedError,
}


class EngineProcess:
    """One process that holds one open engine; used from one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Ready):
        assert process.stdin is not None and process.stdout is not None, "opened with pipes"
        self.facts = ready
        self.reading = Reading(kv_bytes=0, pool_bytes=0, process_bytes=0)
        self.dead = asyncio.Event()
        self.start_s = 0.0
        self._process = process
        self._orders, self._reports = process.stdin, process.stdout
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Queue[Token | Refusal]] = {}
        self._heard_at = time.monotonic()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, wanted: Open, timeout_s: float) -> Self:
        """Start a process and wait until its engine is loaded.

        Raises:
            ConfigError, UnsupportedError, IntegrityError: as the engine says, or it took too long.
        """
        pipe = asyncio.subprocess.PIPE
        start = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=pipe, stdout=pipe, limit=_LINE_LIMIT_BYTES, start_new_session=True
        )
        try:
            engine = cls(process, await _opened(process, wanted, timeout_s))
        except BaseException:
            _kill_group(process.pid)
            await process.communicate()
            raise
        engine.start_s = time.monotonic() - start
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def retry_after_s(self) -> int:
        """Return when it is worth asking again once this one is dead: after about one start."""
        return min(_LONGEST_RETRY_S, max(1, round(self.start_s)))

    @property
    def silent_s(self) -> float:
        """Return for how long an engine with work has said nothing."""
        return time.monotonic() - self._heard_at if self._open else 0.0

    async def generate(self, job: Submit, deadline: float) -> AsyncGenerator[Token, None]:
        """Yield the tokens of one request; whoever stops listening cancels it. `deadline` is on the loop's clock.

        Raises:
            Refusal: 400 the engine does not accept it; 503 the engine died; 504 the deadline passed.
        """
        number = next(self._numbers)
        inbox: asyncio.Queue[Token | Refusal] = asyncio.Queue()
        if self.dead.is_set():
            raise engine_is_down(self.retry_after_s)
        if not self._open:
            self._heard_at = time.monotonic()
        self._open[number] = inbox
        self._say(job.model_copy(update={"number": number}))
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    news = await inbox.get()
                if isinstance(news, Refusal):
                    raise news
                yield news
                if news.finished:
                    return
        except TimeoutError as error:
            raise Refusal(504, "the request took longer than the server allows; ask for fewer tokens", "timeout") from error
        finally:
            if self._open.pop(number, None) is not None:
                self._say(Cancel(number=number))

    def kill(self) -> None:
        """End the process, and whatever it started, at once."""
        if self._process.returncode is None:
            _kill_group(self.pid)

    async def close(self) -> None:
        """End the process: kindly, then not."""
        self._orders.close()
        await self._end()
        await self._listener

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        _kill_group(self.pid)  # where it was killed, what it started may go on

    def _say(self, message: Message) -> None:
        if not self.dead.is_set() and not self._orders.is_closing():
            self._orders.write(message.line())

    async def _listen(self) -> None:
        try:
            while line := await self._reports.readline():
                self._heard_at = time.monotonic()
                self._hear(line)
        except ValueError as error:
            log.warning("the engine said what nobody understands, and is ended: %s", error)
        finally:
            self.dead.set()
            for inbox in self._open.values():
                inbox.put_nowait(engine_is_down(self.retry_after_s))
            self._open.clear()
            await self._end()

    def _hear(self, line: bytes) -> None:
        match REPORT.validate_json(line):
            case Tokens(tokens=tokens):
                for token in tokens:
                    inbox = self._open.pop(token.number, None) if token.finished else self._open.get(token.number)
                    if inbox is not None:
                        inbox.put_nowait(token)
            case Refused(number=number, message=message, lost=lost):
                if (inbox := self._open.pop(number, None)) is not None:
                    inbox.put_nowait(request_is_lost(message) if lost else Refusal(400, message, "refused_by_engine"))
            case Reading() as reading:
                self.reading = reading
            case Ready() | Failed():
                pass


def _kill_group(pid: int) -> None:
    """Kill a process that leads a group of its own, and all that are in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _opened(process: asyncio.subprocess.Process, wanted: Open, timeout_s: float) -> Ready:
    """Tell a new process what to load and return what it says of itself once it has."""
    assert process.stdin is not None and process.stdout is not None, "opened with pipes"
    process.stdin.write(wanted.line())
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise UnsupportedError(
            f"{wanted.directory} was not loaded within {timeout_s:g} s; raise engine.start_timeout_s or use a smaller model"
        ) from error
    if not line:
        raise UnsupportedError(
            f"the {wanted.engine.runtime} engine of {wanted.directory} ended while it was loading; "
            "its last words are above; was memory short?"
        )
    said = REPORT.validate_json(line)
    if isinstance(said, Failed):
        raise _FAULTS.get(said.error, UnsupportedError)(said.message)
    assert isinstance(said, Ready), said
    return said


class EngineKeeper:
    """Keeps one engine running for as long as it is wanted."""

    def __init__(self, wanted: Open, config: EngineConfig):
        self._wanted = wanted
        self._config = config
        self._engine: EngineProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def engine(self) -> EngineProcess | None:
        """Return the engine, or None while there is none."""
        return None if self._engine is None or self._engine.dead.is_set() else self._engine

    @property
    def retry_after_s(self) -> int:
        return 1 if self._engine is None else self._engine.retry_after_s

    async def open(self) -> Ready:
        """Start the engine for the first time; from then on it is replaced whenever it ends.

        Raises:
            ConfigError, UnsupportedError, IntegrityError: it does not open.
        """
        ready = await self._start()
        self._watch = asyncio.create_task(self._keep())
        return ready

    def running(self) -> EngineProcess:
        """Return the engine.

        Raises:
            Refusal: 503, there is none at the moment.
        """
        if self.engine is None:
            raise engine_is_down(self.retry_after_s)
        return self.engine

    async def close(self) -> None:
        """End the engine for good."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._engine is not None:
            await self._engine.close()

    async def _start(self) -> Ready:
        self._engine = await EngineProcess.start(self._wanted, self._config.start_timeout_s)
        return self._engine.facts

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._engine is not None, "watched only once it is open"
            await self._until_dead(self._engine)
            self.num_restarts += 1
            log.warning("the engine of %s ended; it is started again", self._wanted.directory)
            try:
                await self._start()
                pause_s = _FIRST_PAUSE_S
            except (ModelOptimizerError, OSError, ValueError) as error:
                log.warning("the engine does not start (%s); next try in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _until_dead(self, engine: EngineProcess) -> None:
        while not engine.dead.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await engine.dead.wait()
            if engine.silent_s > self._config.stall_timeout_s:
                log.warning("the engine has said nothing for %.0f s though it has work; it is ended", engine.silent_s)
                engine.kill()
