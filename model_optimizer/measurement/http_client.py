"""A lean HTTP/1.1 client connection: one request at a time on an asyncio protocol, every read stamped on arrival.

General clients spend hundreds of microseconds a request, which a load generator would add to what it measures.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.events import UNKNOWN, StreamReader, read_whole
from model_optimizer.measurement.samples import NEVER_NS, RequestStatus

_HEAD, _LENGTH, _CHUNKED, _UNTIL_CLOSE = range(4)
_MAX_HEAD_BYTES = 65_536
_REJECTIONS = frozenset({429, 503})
_CONNECT_TIMEOUT_S = 30.0
_KEPT_BODY_BYTES = 1000
"""Of what a server says to a request that fails."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    path: str
    tls: bool
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, path: str = "", headers: tuple[tuple[str, str], ...] = ()) -> "Endpoint":
        """Return the endpoint `path` below a server's address.

        Raises:
            ConfigError: no http(s) URL with a host.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}; give e.g. http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no http or https URL with a host; give e.g. http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/") + path, tls, headers)

    def request(self, body: bytes, *, method: str = "POST") -> bytes:
        """Return the bytes of one request with a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path or '/'} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    @property
    def address(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


class Answer:
    """One request while it runs, and what became of it."""

    __slots__ = (
        "body", "connection", "finished_ns", "http_status", "intended_ns", "reader", "reason", "request", "resent",
        "started_ns", "status", "stopped", "used_prompt", "used_tokens",
    )  # fmt: skip

    def __init__(self, request: bytes, intended_ns: int, reader: StreamReader | None):
        self.request = request
        self.intended_ns = intended_ns
        self.reader = reader
        """Reads the events of a streamed answer; None where the answer shall come in one piece."""
        self.started_ns = NEVER_NS
        self.finished_ns = NEVER_NS
        self.status = RequestStatus.CANCELLED
        self.reason = ""
        """Why it failed; empty where it did not."""
        self.http_status = 0
        self.used_tokens = UNKNOWN
        self.used_prompt = UNKNOWN
        self.stopped = False
        """Whether a stop token ended it, as far as a stream told."""
        self.body = b""
        self.connection: Connection | None = None
        self.resent = False

    @property
    def open(self) -> bool:
        return self.finished_ns == NEVER_NS

    def end(self, status: RequestStatus, reason: str, now_ns: int) -> None:
        self.status, self.reason, self.finished_ns, self.connection = status, reason, now_ns, None
        if self.reader is not None:
            self.reader.forget()
        if status != RequestStatus.OK:
            self.body = self.body[:_KEPT_BODY_BYTES]

    def fail(self, reason: str) -> None:
        """End with an error now; one that was never sent counts as sent now."""
        now_ns = time.perf_counter_ns()
        if self.started_ns == NEVER_NS:
            self.started_ns = now_ns
        self.end(RequestStatus.ERROR, reason, now_ns)

    def complete(self, http_status: int, body: bytes, now_ns: int) -> None:
        """Judge a response that arrived whole."""
        self.http_status, self.body = http_status, body
        if http_status in _REJECTIONS:
            self.end(RequestStatus.REJECTED, f"status {http_status}", now_ns)
        elif not 200 <= http_status < 300:
            self.end(RequestStatus.ERROR, f"status {http_status}", now_ns)
        elif fault := self._fault(body):
            self.end(RequestStatus.ERROR, fault, now_ns)
        else:
            self.end(RequestStatus.OK, "", now_ns)

    def _fault(self, body: bytes) -> str:
        """Return why an answer with a good status is none, or nothing."""
        if self.reader is None:
            self.used_tokens, self.used_prompt, has_text = read_whole(body)
            return "" if has_text else "an answer without text"
        if body:
            return "a stream was asked for, the answer came in one piece"
        end = self.reader.end()
        self.used_tokens, self.used_prompt, self.stopped = end.used_tokens, end.used_prompt, end.stopped
        if end.error:
            self.body = end.error
            return "an error within the stream"
        if not end.ended:
            return "a stream that ended without finish_reason or [DONE]"
        return "" if self.reader.text_times_ns else "a stream without text"


class Connection(asyncio.Protocol):
    """One keep-alive connection. `done` is called with this and the answer whenever an answer ends, well or not."""

    __slots__ = (
        "_answer",
        "_body",
        "_done",
        "_http_status",
        "_is_stream",
        "_left",
        "_mode",
        "_pending",
        "_reusable",
        "_transport",
        "num_sent",
    )

    def __init__(self, done: Callable[["Connection", Answer], None]):
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._pending = b""
        self.num_sent = 0
        self._begin()

    @property
    def usable(self) -> bool:
        """Whether the next request may go over it."""
        return self._answer is None and self._reusable and self._transport is not None and not self._transport.is_closing()

    def send(self, answer: Answer) -> None:
        """Hand a request to the socket."""
        assert self._transport is not None and self._answer is None, "one request at a time, on an open connection"
        self._answer = answer
        answer.connection = self
        self.num_sent += 1
        self._begin()
        if answer.started_ns == NEVER_NS:
            answer.started_ns = time.perf_counter_ns()
        self._transport.write(answer.request)

    def abort(self) -> None:
        """Close at once; an answer under way is left as it is."""
        self._answer, self._reusable = None, False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self._reusable = False
        answer, now_ns = self._answer, time.perf_counter_ns()
        if answer is None:
            return
        if self._mode == _UNTIL_CLOSE:
            self._complete(now_ns)
            return
        nothing = self._mode == _HEAD and not self._pending
        self._answer = None
        answer.end(RequestStatus.ERROR, UNANSWERED if nothing else "the connection broke within the answer", now_ns)
        self._done(self, answer)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if self._answer is None:
            self.abort()  # bytes that nobody asked for, e.g. a notice that the server closes an idle connection
            return
        if self._pending:
            data, self._pending = self._pending + data, b""
        try:
            if self._mode == _HEAD:
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    self._pending = data
                    if len(data) > _MAX_HEAD_BYTES:
                        raise ValueError("a head without end")
                    return
                self._read_head(data[: end + 2])
                data = data[end + 4 :]
            self._read_body(data, now_ns)
        except ValueError:  # no HTTP
            answer = self._answer
            self.abort()
            answer.end(RequestStatus.ERROR, "an answer that is no HTTP/1.1", now_ns)
            self._done(self, answer)

    def _begin(self) -> None:
        self._mode, self._left, self._reusable = _HEAD, 0, True
        self._pending = b""
        self._body: list[bytes] = []
        self._http_status, self._is_stream = 0, False

    def _read_head(self, head: bytes) -> None:
        if not head.startswith(b"HTTP/1."):
            raise ValueError("no status line")
        self._http_status = int(head[9:12])
        lower = head.lower()
        self._reusable = b"\r\nconnection: close" not in lower and not lower.startswith(b"http/1.0")
        self._is_stream = b"\r\ncontent-type: text/event-stream" in lower and self._http_status == 200
        if b"\r\ntransfer-encoding: chunked" in lower:
            self._mode = _CHUNKED
        elif (at := lower.find(b"\r\ncontent-length:")) >= 0:
            self._mode, self._left = _LENGTH, int(lower[at + 17 : lower.index(b"\r\n", at + 2)])
        elif self._http_status in (204, 304):
            self._mode, self._left = _LENGTH, 0
        else:
            self._mode, self._reusable = _UNTIL_CLOSE, False

    def _read_body(self, data: bytes, now_ns: int) -> None:
        if self._mode == _CHUNKED:
            payload, whole = self._unchunk(data)
        else:
            payload, whole = data, False
            if self._mode == _LENGTH:
                self._left -= len(data)
                if self._left < 0:
                    raise ValueError("more bytes than announced")
                whole = self._left == 0
        if payload:
            assert self._answer is not None
            if self._is_stream and self._answer.reader is not None:
                self._answer.reader.feed(payload, now_ns)
            else:
                self._body.append(payload)
        if whole:
            self._complete(now_ns)

    def _unchunk(self, data: bytes) -> tuple[bytes, bool]:
        """Return the content of the whole chunks, and whether the last one was among them; the rest waits."""
        parts, at, size = list[bytes](), 0, len(data)
        known, length = b"", 0
        while True:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            head = data[at:line]
            if head != known:  # events of one stream are often of one size
                known, length = head, int(head.partition(b";")[0], 16)
            start = line + 2
            end = start + length
            if length == 0:
                if data.startswith(b"\r\n", start) or data.find(b"\r\n\r\n", start) >= 0:  # no trailers, or whole ones
                    return b"".join(parts), True
                break
            if end + 2 > size:
                break
            parts.append(data[start:end])
            at = end + 2
        self._pending = data[at:]
        return (parts[0] if len(parts) == 1 else b"".join(parts)), False

    def _complete(self, now_ns: int) -> None:
        answer = self._answer
        assert answer is not None
        self._answer = None
        answer.complete(self._http_status, b"".join(self._body), now_ns)
        if not self._reusable and self._transport is not None:
            self._transport.close()
        self._done(self, answer)


UNANSWERED = "the connection was closed before an answer began"


async def connect(endpoint: Endpoint, done: Callable[[Connection, Answer], None]) -> Connection:
    """Open a connection.

    Raises:
        OSError: refused, unreachable, or not within 30 s.
    """
    loop = asyncio.get_running_loop()
    security = ssl.create_default_context() if endpoint.tls else None
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(lambda: Connection(done), endpoint.host, endpoint.port, ssl=security)
    return connection


async def ask(endpoint: Endpoint, request: bytes, timeout_s: float) -> Answer:
    """Send one request over a connection of its own and return its answer, failed or not.

    Raises:
        OSError: no connection, or no answer in time.
    """
    ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def done(_connection: Connection, answer: Answer) -> None:
        if not ended.done():
            ended.set_result(answer)

    connection = await connect(endpoint, done)
    try:
        connection.send(Answer(request, time.perf_counter_ns(), None))
        async with asyncio.timeout(timeout_s):
            return await ended
    finally:
        connection.abort()
