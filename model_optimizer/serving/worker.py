"""The engine's own process: reads orders from stdin, runs the engine, writes what happens to stdout.

`python -m model_optimizer.serving.worker`. It ends when the server closes its stdin or dies. A fault of
one request is told and forgotten; a fault of a step ends the process, and the server starts another one.
"""

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import psutil

from model_optimizer.errors import ConfigError, ModelOptimizerError, UnsupportedError
from model_optimizer.protocols import GenerationRequest, RequestId, Runtime, Sampling
from model_optimizer.runtimes.faults import RequestFault
from model_optimizer.runtimes.options import TUNABLES
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.serving.wire import (
    ORDER,
    Cancel,
    Failed,
    Message,
    Open,
    Reading,
    Ready,
    Refused,
    Submit,
    Token,
    Tokens,
)

_READING_EVERY_S = 1.0
_IDLE_LOOK_S = 1.0
"""How often an idle engine is stepped: so it sees that a process of its own has ended, or puts its pages in order."""
_END_S = 6.0
"""For what the engine started to end, once the server is gone."""
_OPENING_FAULTS = (ModelOptimizerError, OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError)
"""What a damaged or unfit engine raises while it loads; told to the server instead of dying silently."""

Orders = queue.SimpleQueue[Submit | Cancel]


class Worker:
    """One open runtime, driven by orders; single-threaded but for the reader of orders."""

    def __init__(self, runtime: Runtime, orders: Orders, output: BinaryIO):
        self._runtime = runtime
        self._orders = orders
        self._output = output
        self._number_of: dict[RequestId, int] = {}
        self._id_of: dict[int, RequestId] = {}
        self._read_at = 0.0

    def run(self) -> None:
        """Serve until the orders end."""
        while True:
            self._take_orders()
            if self._step():
                self._tell_memory()

    def _take_orders(self) -> None:
        """Take every waiting order; wait a little for one where nothing runs."""
        if not self._number_of:
            with contextlib.suppress(queue.Empty):
                self._follow(self._orders.get(timeout=_IDLE_LOOK_S))
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            self._follow(order)

    def _follow(self, order: Submit | Cancel) -> None:
        if isinstance(order, Cancel):
            request = self._id_of.pop(order.number, None)
            if request is not None:
                del self._number_of[request]
                self._runtime.cancel(request)
            return
        try:
            request = self._runtime.submit(_request(order))
        except (ConfigError, UnsupportedError) as error:
            self._say(Refused(number=order.number, message=str(error)))
            return
        self._number_of[request], self._id_of[order.number] = order.number, request

    def _step(self) -> bool:
        """Run the engine once; return whether there is something new to tell: it is idle, or a request went on."""
        told = []
        try:
            events = self._runtime.step()
        except RequestFault as fault:
            self._fail(fault)
            return True
        for event in events:
            number = self._number_of.get(event.request)
            if number is None:
                continue
            told.append(Token(number=number, token=event.token, log_prob=event.log_prob, finished=event.finished, top=event.top))
            if event.finished:
                del self._number_of[event.request], self._id_of[number]
        if told:
            self._say(Tokens(tokens=tuple(told)))
        return bool(told) or not self._number_of

    def _fail(self, fault: RequestFault) -> None:
        number = self._number_of.pop(fault.request, None)
        if number is not None:
            del self._id_of[number]
            self._say(Refused(number=number, message=str(fault), lost=not fault.refused))

    def _tell_memory(self) -> None:
        """Tell what is held, at most once a second, and whenever the engine falls idle."""
        if self._number_of and time.monotonic() - self._read_at < _READING_EVERY_S:
            return
        self._read_at = time.monotonic()
        memory = self._runtime.memory()
        self._say(Reading(kv_bytes=memory.kv_bytes, pool_bytes=memory.pool_bytes, process_bytes=memory.process_bytes))

    def _say(self, message: Message) -> None:
        self._output.write(message.line())
        self._output.flush()


def _request(order: Submit) -> GenerationRequest:
    return GenerationRequest(
        prompt=order.prompt,
        max_new_tokens=order.max_new_tokens,
        stop_tokens=order.stop_tokens,
        sampling=Sampling(temperature=order.temperature, top_p=order.top_p, seed=order.seed),
        num_top=order.num_top,
        shares_prefix=order.shares_prefix,
    )


def _read(source: BinaryIO, orders: Orders, ending: threading.Event) -> None:
    for line in source:
        orders.put(ORDER.validate_json(line))
    ending.set()
    _leave(0)  # the server is gone or wants no more; whatever still runs is nobody's


def _leave(status: int) -> None:
    """End this process, and first whatever it started: kindly, then not."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=_END_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)


def _open(wanted: Open) -> Runtime:
    name, options = wanted.engine.runtime, wanted.options
    factory = TUNABLES.get(name).tuned(options) if options.stated else RUNTIMES.get(name)
    return factory.open(wanted.engine, Path(wanted.directory), wanted.kv)


def main() -> None:
    """Open the engine that the first line names, say what it is, and serve."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like a message
    wanted = Open.model_validate_json(sys.stdin.buffer.readline())
    orders: Orders = queue.SimpleQueue()
    ending = threading.Event()
    threading.Thread(target=_read, args=(sys.stdin.buffer, orders, ending), daemon=True).start()
    start = time.monotonic()
    try:
        runtime = _open(wanted)
    except _OPENING_FAULTS as error:
        kind = type(error).__name__ if isinstance(error, ModelOptimizerError) else "UnsupportedError"
        message = " ".join(str(error).split())[:500] or type(error).__name__
        output.write(Failed(error=kind, message=message).line())
        output.flush()
        return
    facts, memory = runtime.facts, runtime.memory()
    ready = Ready(
        runtime=facts.name,
        version=facts.version,
        device=facts.device,
        precision=facts.precision,
        max_batch=facts.max_batch,
        max_model_len=facts.max_model_len,
        notes=facts.notes,
        load_s=time.monotonic() - start,
        weight_bytes=memory.weight_bytes,
        pool_bytes=memory.pool_bytes,
    )
    output.write(ready.line())
    output.flush()
    try:
        Worker(runtime, orders, output).run()
    finally:  # nothing but a fault of a step leads here
        if ending.is_set():  # the other thread is about it
            time.sleep(2 * _END_S)
        traceback.print_exc()
        _leave(1)


if __name__ == "__main__":
    main()
