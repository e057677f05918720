"""One request to a managed server: a thread that reads its events until the end, or until nobody wants them any more."""

import contextlib
import http.client
import queue
import socket
import threading
from dataclasses import dataclass

from model_optimizer.protocols import RequestId
from model_optimizer.runtimes.managed.dialect import Dialect, Heard, StreamFault
from model_optimizer.runtimes.managed.process import HOST

_WORDS = 300


@dataclass(frozen=True, slots=True)
class Refused:
    """The server answered with a status of its own."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection ended before the answer did."""

    message: str


News = Heard | Refused | Broken
Inbox = queue.SimpleQueue[tuple[RequestId, News]]


class TokenStream:
    """Reads one answer into an inbox that all share."""

    def __init__(self, identity: RequestId, dialect: Dialect, port: int, inbox: Inbox):
        self._identity = identity
        self._dialect = dialect
        self._inbox = inbox
        self._connection = http.client.HTTPConnection(HOST, port)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = False

    def start(self, body: bytes, key: str) -> None:
        """Send the request and read its answer beside the caller."""
        threading.Thread(target=self._run, args=(body, key), daemon=True).start()

    def cancel(self) -> None:
        """Close the connection, which is how a server hears that nobody reads on."""
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self, body: bytes, key: str) -> None:
        try:
            with self._lock:
                if self._cancelled:
                    return
                self._connection.connect()
                self._socket = self._connection.sock
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            self._connection.request("POST", self._dialect.generate_path, body, headers)
            news = self._read(self._connection.getresponse())
        except StreamFault as fault:
            news = Refused(500, str(fault)[:_WORDS])
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            news = Broken(f"{type(error).__name__}: {error}")
        finally:
            self._connection.close()
        if news is not None and not self._cancelled:
            self._inbox.put((self._identity, news))

    def _read(self, response: http.client.HTTPResponse) -> Refused | Broken | None:
        """Pass events on as they come; return how it ended where that was not an answer's end."""
        if response.status != 200:
            return Refused(response.status, response.read(4096).decode("utf-8", "replace")[:_WORDS])
        for line in response:
            if not line.startswith(b"data:") or (event := line[5:].strip()) == b"[DONE]":
                continue
            heard = self._dialect.hear(event)
            self._inbox.put((self._identity, heard))
            if heard.ended:
                return None
        return Broken("the answer ended in the middle")
