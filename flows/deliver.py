"""Deliver one message: an e-mail by SMTP, or a signed JSON document by POST. Knows nothing of runs."""

import hashlib
import hmac
import smtplib
import socket
import ssl
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SIGNATURE, TIMESTAMP = "X-Model-Optimizer-Signature-256", "X-Model-Optimizer-Timestamp"
EVENT, DELIVERY = "X-Model-Optimizer-Event", "X-Model-Optimizer-Delivery"
FAILURES = (smtplib.SMTPException, OSError, HTTPException, ValueError)
"""Whatever a server that is down, slow, wrong or refusing raises; URLError is an OSError, a malformed address a ValueError."""


@dataclass(frozen=True)
class Mail:
    """A message in plain text."""

    to: tuple[str, ...]
    subject: str
    text: str
    sender: str | None = None


def send_mail(server: str, mail: Mail) -> None:
    """Send one mail through `smtp://[USER:PASSWORD@]HOST[:PORT]` or `smtps://...`; TLS is used wherever the server offers it.

    Raises:
        ValueError: the address of the server is malformed, or a password would go over the network in the clear.
        OSError, SMTPException: it cannot be reached, or refuses.
    """
    parts = urlsplit(server)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ValueError("the SMTP server must be smtp://[USER:PASSWORD@]HOST[:PORT] or smtps://...")
    secure = ssl.create_default_context()
    with _open(parts.scheme, parts.hostname, parts.port, secure) as connection:
        connection.ehlo()
        encrypted = parts.scheme == "smtps"
        if not encrypted and connection.has_extn("starttls"):
            connection.starttls(context=secure)
            connection.ehlo()
            encrypted = True
        if parts.username:
            if not encrypted and parts.hostname not in LOOPBACK:
                raise ValueError(f"{parts.hostname} offers no TLS, and the password would go in the clear; use smtps://")
            connection.login(unquote(parts.username), unquote(parts.password or ""))
        connection.send_message(_message(mail))


def _open(scheme: str, host: str, port: int | None, secure: ssl.SSLContext) -> smtplib.SMTP:
    if scheme == "smtps":
        return smtplib.SMTP_SSL(host, port or smtplib.SMTP_SSL_PORT, timeout=TIMEOUT_S, context=secure)
    return smtplib.SMTP(host, port or smtplib.SMTP_PORT, timeout=TIMEOUT_S)


def _message(mail: Mail) -> EmailMessage:
    message = EmailMessage()
    message["Subject"] = mail.subject
    message["From"] = mail.sender or f"model-optimizer@{socket.gethostname()}"
    message["To"] = ", ".join(mail.to)
    message["Date"] = formatdate()
    message["Message-ID"] = make_msgid(domain="model-optimizer")
    message.set_content(mail.text)
    return message


def post(address: str, body: bytes, event: str, secret: str | None) -> None:
    """POST a JSON body; a redirection is refused, so that nothing is sent where nobody asked for it.

    Raises:
        OSError, HTTPException, ValueError: it cannot be reached, or answers anything but 2xx.
    """
    timestamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "model-optimizer",
        EVENT: event,
        DELIVERY: str(uuid.uuid4()),
        TIMESTAMP: timestamp,
    }
    if secret is not None:
        headers[SIGNATURE] = f"sha256={signature(secret, timestamp, body)}"
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(urllib.request.Request(address, body, headers, method="POST"), timeout=TIMEOUT_S):
        return


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return HMAC-SHA256 over `<timestamp>.<body>` in hexadecimal; the time is signed so that a receiver can refuse old ones."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow nothing; the answer then counts as the error that it is."""
        return
