"""Servers that keep what they are sent: one for e-mail, one for webhooks."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session


@dataclass
class Call:
    """One POST."""

    headers: dict[str, str]
    body: bytes

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document


@dataclass
class Hook:
    """What came to a webhook; `status` is what it answers."""

    url: str = ""
    status: int = 204
    calls: list[Call] = field(default_factory=list)


@contextmanager
def webhook(status: int = 204) -> Iterator[Hook]:
    """Serve a webhook on a free port."""
    hook = Hook(status=status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.calls.append(Call(dict(self.headers), body))
            self.send_response(hook.status)
            if 300 <= hook.status < 400:
                self.send_header("Location", hook.url)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Mailbox:
    """An SMTP server's mail and the logins that it saw."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.recipients: list[list[str]] = []
        self.logins: list[tuple[bytes, bytes]] = []

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        self.mails.append(message_from_bytes(envelope.content, policy=policy.default))  # type: ignore[arg-type]
        self.recipients.append(list(envelope.rcpt_tos))
        return "250 OK"

    def check(self, _server: SMTP, _session: Session, _envelope: Envelope, _mechanism: str, data: object) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.logins.append((data.login, data.password))
        return AuthResult(success=True)


@contextmanager
def mail_server(host: str = "127.0.0.1") -> Iterator[tuple[Mailbox, str]]:
    """Serve SMTP without TLS on a free port; yields the box and `host:port`."""
    box = Mailbox()
    controller = _AnyPort(box, hostname=host, port=0, authenticator=box.check, auth_require_tls=False)
    controller.start()
    try:
        yield box, f"{host}:{controller.bound_port}"
    finally:
        controller.stop()


class _AnyPort(Controller):
    """A controller that may be given port 0."""

    @property
    def bound_port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    def _trigger_server(self) -> None:
        """The first connection, by which the controller learns that it works; to the port that the system chose."""
        self.port = self.bound_port
        super()._trigger_server()
