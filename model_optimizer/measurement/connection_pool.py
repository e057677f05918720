"""Keep-alive connections for a load run: the last one used goes out first, a new one is opened only where none is free."""

import asyncio
from collections import deque
from collections.abc import Callable

from model_optimizer.measurement.http_client import UNANSWERED, Answer, Connection, Endpoint, connect
from model_optimizer.measurement.samples import NEVER_NS, RequestStatus


class ConnectionPool:
    """Sends requests; `ended` is called with every answer that ends, on the loop."""

    def __init__(self, endpoint: Endpoint, max_connections: int):
        self.ended: Callable[[Answer], None] = lambda answer: None
        self.num_waited = 0
        """Requests that found every allowed connection in use."""
        self._endpoint = endpoint
        self._max_connections = max_connections
        self._num_open = 0
        """Connections that exist or are being opened."""
        self._idle: list[Connection] = []
        self._waiting: deque[Answer] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    async def preopen(self, num: int) -> None:
        """Open connections before the run; one that fails will be tried again when it is needed."""
        for _ in range(num):
            self._open()
        await asyncio.gather(*self._opening)

    def send(self, answer: Answer) -> None:
        """Send a request now, or as soon as a connection is there."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.send(answer)
                return
            self._num_open -= 1  # closed by the server while idle
        self._waiting.append(answer)
        if self._num_open < self._max_connections:
            self._open()
        else:
            self.num_waited += 1

    def drop(self, answer: Answer) -> None:
        """Close the connection of an answer that is not waited for any longer."""
        if answer.connection is not None:
            answer.connection.abort()
            self._lost()

    def close(self) -> None:
        """Close what is idle; answers under way must have been dropped."""
        self._waiting.clear()
        for task in self._opening:
            task.cancel()
        while self._idle:
            self._idle.pop().abort()

    def _open(self) -> None:
        self._num_open += 1
        task = asyncio.get_running_loop().create_task(self._connect())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        try:
            connection = await connect(self._endpoint, self._done)
        except (OSError, TimeoutError) as error:
            self._num_open -= 1
            if self._waiting and (answer := self._waiting.popleft()).open:
                answer.fail(f"no connection: {type(error).__name__}")
                self.ended(answer)
            return
        self._free(connection)

    def _done(self, connection: Connection, answer: Answer) -> None:
        if answer.reason == UNANSWERED and connection.num_sent > 1 and not answer.resent:
            # the server closed an idle connection at the moment of sending; HTTP clients send such a request once more
            answer.resent, answer.finished_ns, answer.status, answer.reason = True, NEVER_NS, RequestStatus.CANCELLED, ""
            self._lost()
            self.send(answer)
            return
        if connection.usable:
            self._free(connection)
        else:
            self._lost()
        self.ended(answer)

    def _free(self, connection: Connection) -> None:
        while self._waiting:
            answer = self._waiting.popleft()
            if answer.open:
                connection.send(answer)
                return
        self._idle.append(connection)

    def _lost(self) -> None:
        self._num_open -= 1
        if len(self._waiting) > len(self._opening) and self._num_open < self._max_connections:
            self._open()
