"""A server that does what a script says, so that a load generator's figures can be held against the truth.

It answers OpenAI's completions and chat without a model: when each event leaves, what fails, when it freezes and how many
requests it serves at once are given. Plain asyncio, one process, fast enough not to be what is measured.

    python -m model_optimizer.measurement.scripted_server --port 0 --script script.json
"""

import asyncio
import contextlib
import heapq
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from model_optimizer.measurement.timer import Agenda

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000
NAME = "scripted"
_SEED = re.compile(rb'"seed":\s*(\d+)')
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_DEFAULT_TOKENS = 16
_MAX_LATENESS = 2_000_000
_FLUSH_TURNS = 8
"""Turns of the event loop without a new request after which what came during a stall is read: accept, open, read take three."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stall(_Part):
    """The whole server stands still: nothing is read, nothing is sent."""

    at_s: float = Field(ge=0, description="after the first request")
    length_s: float = Field(gt=0)


class Step(_Part):
    """One event of an answer that is spelled out."""

    at_ms: float = Field(ge=0, description="after the request came")
    num_tokens: int = Field(ge=0, description="0: a chunk with a role and no text")


class Script(_Part):
    """What the server does. Request i takes entry i modulo their number of every list; i is its `seed`, else its turn."""

    ttft_ms: tuple[float, ...] = Field(default=(0.0,), min_length=1, description="to the first event, or to the whole answer")
    itl_ms: tuple[float, ...] = Field(default=(0.0,), min_length=1, description="between events; 0: all leave in one write")
    tokens_per_event: int = Field(default=1, ge=1)
    num_tokens: int | None = Field(default=None, ge=1, description="left out: the max_tokens that is asked for, else 16")
    steps: tuple[Step, ...] = Field(default=(), description="instead of all above: the events of every streamed answer")
    usage: bool = Field(default=True, description="whether a usage record ends the stream")
    stalls: tuple[Stall, ...] = ()
    num_slots: int | None = Field(default=None, ge=1, description="requests served at once; others wait their turn")
    max_waiting: int | None = Field(default=None, ge=0, description="with num_slots: more are answered 429")
    fail_every: int = Field(default=0, ge=0, description="every n-th request is answered with fail_status")
    fail_status: int = Field(default=500, ge=400, le=599)
    break_every: int = Field(default=0, ge=0, description="the connection of every n-th breaks in the middle of the answer")
    hang_every: int = Field(default=0, ge=0, description="every n-th is never answered")
    lie_every: int = Field(default=0, ge=0, description="every n-th stream holds an error instead of its second event")


def word_event(num_tokens: int, *, chat: bool) -> bytes:
    """Return one event whose text is `num_tokens` words."""
    text = " word" * num_tokens
    choice = f'"delta":{{"content":"{text}"}}' if chat else f'"text":"{text}"'
    return _event(f'{{"id":"s","object":"chunk","model":"{NAME}","choices":[{{"index":0,{choice},"finish_reason":null}}]}}')


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


_ROLE = _event('{"id":"s","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
_FINISH = _event('{"id":"s","choices":[{"index":0,"delta":{},"text":"","finish_reason":"length"}]}')
_FAULT = _event('{"error":{"message":"scripted","type":"server_error"}}')
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _whole(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class ScriptedServer:
    """What all connections of one server share."""

    def __init__(self, script: Script, loop: asyncio.AbstractEventLoop):
        self.script = script
        self.agenda = Agenda(loop)
        self.lateness_ns: list[int] = []
        """Of every scheduled write."""
        self.num_requests = 0
        self._slots: list[int] = [0] * (script.num_slots or 0)
        """When each will be free."""
        self._loop = loop
        self._woke_ns: int | None = None
        """End of a stall while what came during it is being read."""
        self._idle_turns = 0
        self._num_waiting = 0
        self._texts: dict[tuple[int, bool], bytes] = {}
        self._ends: dict[int, bytes] = {}
        self._wholes: dict[tuple[int, bool], bytes] = {}

    def number(self, body: bytes) -> int:
        """Count a request and return which one of the script it is."""
        turn, self.num_requests = self.num_requests, self.num_requests + 1
        if turn == 0:
            now_ns = time.perf_counter_ns()
            for stall in self.script.stalls:
                self.agenda.at(now_ns + int(stall.at_s * NS_PER_S), partial(self._stand_still, stall.length_s))
        found = _SEED.search(body) if b'"seed"' in body else None
        return int(found.group(1)) if found else turn

    def arrived_ns(self) -> int:
        """Return when a request that is read now came: after a stall that is its end, however long reading all of them takes."""
        self._idle_turns = 0
        return self._woke_ns or time.perf_counter_ns()

    def start_ns(self, now_ns: int, service_ns: int) -> int | None:
        """Return when a request's turn comes; None where it is refused."""
        if not self._slots:
            return now_ns
        if self.script.max_waiting is not None and self._slots[0] > now_ns and self._num_waiting >= self.script.max_waiting:
            return None
        begin = max(now_ns, heapq.heappop(self._slots))
        heapq.heappush(self._slots, begin + service_ns)
        if begin > now_ns:
            self._num_waiting += 1
            self.agenda.at(begin, self._begun)
        return begin

    def text(self, num_tokens: int, *, chat: bool) -> bytes:
        key = (num_tokens, chat)
        if key not in self._texts:
            self._texts[key] = _chunk(word_event(num_tokens, chat=chat))
        return self._texts[key]

    def end(self, num_tokens: int) -> bytes:
        """Return what ends a stream of so many tokens."""
        if num_tokens not in self._ends:
            usage = _chunk(_event(f'{{"id":"s","choices":[],"usage":{_usage(num_tokens)}}}')) if self.script.usage else b""
            self._ends[num_tokens] = _chunk(_FINISH) + usage + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        return self._ends[num_tokens]

    def whole(self, num_tokens: int, *, chat: bool) -> bytes:
        key = (num_tokens, chat)
        if key not in self._wholes:
            text = " word" * num_tokens
            choice = f'"message":{{"role":"assistant","content":"{text}"}}' if chat else f'"text":"{text}"'
            usage = f',"usage":{_usage(num_tokens)}' if self.script.usage else ""
            body = f'{{"id":"s","model":"{NAME}","choices":[{{"index":0,{choice},"finish_reason":"length"}}]{usage}}}'
            self._wholes[key] = _whole(200, body.encode())
        return self._wholes[key]

    def statistics(self) -> bytes:
        late_ms = np.array(self.lateness_ns or [0]) / NS_PER_MS
        found = {f"lateness_p{ratio:g}_ms": float(np.percentile(late_ms, ratio)) for ratio in (50, 99, 99.9, 100)}
        return json.dumps({"num_requests": self.num_requests, **found}).encode()

    def _begun(self) -> None:
        self._num_waiting -= 1

    def _stand_still(self, length_s: float) -> None:
        time.sleep(length_s)
        self._woke_ns, self._idle_turns = time.perf_counter_ns(), 0
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._idle_turns += 1
        if self._idle_turns > _FLUSH_TURNS:
            self._woke_ns = None
        else:
            self._loop.call_soon(self._flush)


def _usage(num_tokens: int) -> str:
    return f'{{"prompt_tokens":8,"completion_tokens":{num_tokens},"total_tokens":{num_tokens + 8}}}'


class _Connection(asyncio.Protocol):
    """Reads requests, one after the other, and puts their answers on the agenda."""

    __slots__ = ("_pending", "_server", "_transport")

    def __init__(self, server: ScriptedServer):
        self._server = server
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.arrived_ns()

    def data_received(self, data: bytes) -> None:
        data = self._pending + data if self._pending else data
        while data:
            head = data.find(b"\r\n\r\n")
            length = _LENGTH.search(data, 0, head + 2) if head >= 0 else None
            end = head + 4 + (int(length.group(1)) if length else 0)
            if head < 0 or end > len(data):
                break
            self._answer(data[:head], data[head + 4 : end])
            data = data[end:]
        self._pending = data

    def _answer(self, head: bytes, body: bytes) -> None:
        server, now_ns = self._server, self._server.arrived_ns()
        if head.startswith(b"GET "):
            known = {b"/v1/models": b'{"object":"list","data":[{"id":"%b"}]}' % NAME.encode(), b"/health": b"{}"}
            path = head.split(b" ", 2)[1]
            self._send(_whole(200, server.statistics() if path == b"/statistics" else known.get(path, b"{}")))
            return
        number = server.number(body)
        script = server.script
        if _nth(number, script.hang_every):
            return
        if _nth(number, script.fail_every):
            self._send(_whole(script.fail_status, b'{"error":{"message":"scripted failure"}}'))
            return
        asked = _MAX_TOKENS.search(body)
        num_tokens = script.num_tokens or (int(asked.group(1)) if asked else _DEFAULT_TOKENS)
        chat = b"/chat/" in head[:60]
        if _STREAM.search(body):
            steps = self._steps(number, num_tokens)
        else:
            steps = [(int(script.ttft_ms[number % len(script.ttft_ms)] * NS_PER_MS), num_tokens)]
        begin_ns = server.start_ns(now_ns, steps[-1][0])
        if begin_ns is None:
            self._send(_whole(429, b'{"error":{"message":"too many requests wait"}}'))
        elif _STREAM.search(body):
            self._stream(number, steps, begin_ns, chat=chat)
        else:
            self._at(begin_ns + steps[0][0], server.whole(num_tokens, chat=chat), now_ns)

    def _steps(self, number: int, num_tokens: int) -> list[tuple[int, int]]:
        """Return delay and tokens of every event of a stream."""
        script = self._server.script
        if script.steps:
            return [(int(step.at_ms * NS_PER_MS), step.num_tokens) for step in script.steps]
        first = int(script.ttft_ms[number % len(script.ttft_ms)] * NS_PER_MS)
        gap = int(script.itl_ms[number % len(script.itl_ms)] * NS_PER_MS)
        size = script.tokens_per_event
        counts = [min(size, num_tokens - done) for done in range(0, num_tokens, size)]
        return [(first + turn * gap, count) for turn, count in enumerate(counts)]

    def _stream(self, number: int, steps: list[tuple[int, int]], begin_ns: int, *, chat: bool) -> None:
        server, script, now_ns = self._server, self._server.script, time.perf_counter_ns()
        pieces = [(at, server.text(count, chat=chat) if count else _chunk(_ROLE)) for at, count in steps]
        if chat and not script.steps:
            pieces[0] = (pieces[0][0], _chunk(_ROLE) + pieces[0][1])
        pieces[0] = (pieces[0][0], _STREAM_HEAD + pieces[0][1])
        last_ns = pieces[-1][0]
        if _nth(number, script.lie_every):
            pieces = [pieces[0], (last_ns, _chunk(_FAULT) + b"0\r\n\r\n")]
        else:
            pieces[-1] = (last_ns, pieces[-1][1] + server.end(sum(count for _, count in steps)))
        if _nth(number, script.break_every):
            pieces = [pieces[0]]
            server.agenda.at(begin_ns + last_ns, self._break)
        if pieces[0][0] == last_ns:
            self._at(begin_ns + last_ns, b"".join(content for _, content in pieces), now_ns)
            return
        for at, content in pieces:
            self._at(begin_ns + at, content, now_ns)

    def _at(self, at_ns: int, content: bytes, now_ns: int) -> None:
        if at_ns <= now_ns:
            self._send(content)
        else:
            self._server.agenda.at(at_ns, partial(self._send_late, at_ns, content))

    def _send_late(self, at_ns: int, content: bytes) -> None:
        if len(self._server.lateness_ns) < _MAX_LATENESS:
            self._server.lateness_ns.append(time.perf_counter_ns() - at_ns)
        self._send(content)

    def _send(self, content: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(content)

    def _break(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _nth(number: int, every: int) -> bool:
    return every > 0 and number % every == every - 1


async def serve(script: Script, port: int, announce: Callable[[str], None], *, while_open: int | None = None) -> None:
    """Serve until cancelled, or until the file descriptor `while_open` ends; `announce` gets the address."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if while_open is not None and task is not None:
        loop.add_reader(while_open, task.cancel)
    server = ScriptedServer(script, loop)
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", port, backlog=2048)
    announce(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    async with listening:
        await listening.serve_forever()


@contextlib.contextmanager
def running(script: Script, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server in a process of its own while the body runs and give its address; `prefix` may pin it, e.g. `taskset`."""
    command = [*prefix, sys.executable, "-m", __name__, "--script", "-", "--while-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(script.model_dump_json() + "\n")
        process.stdin.flush()  # and left open: if this process is killed, the server ends too
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def main() -> None:
    """Serve a script until the process is ended."""
    import argparse

    parser = argparse.ArgumentParser(prog="scripted_server", description="an OpenAI-compatible server that follows a script")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed as JSON")
    parser.add_argument("--script", default="", help="a JSON file, or - for a line of stdin; left out: all at once")
    parser.add_argument("--while-stdin", action="store_true", help="end when stdin does")
    asked = parser.parse_args()
    text = sys.stdin.readline() if asked.script == "-" else Path(asked.script).read_text() if asked.script else "{}"
    script, while_open = Script.model_validate_json(text), sys.stdin.fileno() if asked.while_stdin else None

    def announce(url: str) -> None:
        print(json.dumps({"url": url}), flush=True)

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(serve(script, asked.port, announce, while_open=while_open))


if __name__ == "__main__":
    main()
