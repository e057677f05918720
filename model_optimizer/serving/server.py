"""One server's life: bind, load, announce, answer, follow the deployment root, drain, end."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from model_optimizer.errors import ConfigError
from model_optimizer.serving.app import build_app
from model_optimizer.serving.card import LaunchCard, launch_card
from model_optimizer.serving.config import ApiKeyConfig, ServeConfig
from model_optimizer.serving.metrics import Metrics
from model_optimizer.serving.service import Service, load_model
from model_optimizer.serving.source import deployment_root
from model_optimizer.serving.swap import follow_root

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15
_CLOSING_S = 5
"""For connections to close once every request is answered."""


class Stop(Protocol):
    """Ends a running server from any thread; `now` does not wait for running requests."""

    def __call__(self, *, now: bool = False) -> None: ...


Announce = Callable[[LaunchCard, Stop], None]


def run_server(path: Path, config: ServeConfig, port: int, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT, which drains; a second one ends at once. `announce` is called when requests are taken.

    Raises:
        ConfigError: the address is taken, an API key cannot be read, or there is nothing to serve.
        IntegrityError: the bundle does not verify.
        UnsupportedError: it cannot run here.
    """
    if not find_framework():
        raise ConfigError("serving needs fastapi and uvicorn; run `pip install fastapi uvicorn`")
    asyncio.run(_serve(path, config, port, announce))


def find_framework() -> bool:
    """Return whether the web framework is installed, without importing it."""
    from importlib.util import find_spec

    return find_spec("fastapi") is not None and find_spec("uvicorn") is not None


async def _serve(path: Path, config: ServeConfig, port: int, announce: Announce) -> None:
    keys = read_api_keys(config.api_key)
    listener = _bind(config.host, port)
    try:
        root = deployment_root(path)
        service = Service(await load_model(path, config), config, Metrics())
        host, bound = listener.getsockname()[:2]
        url = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        server = _draining_server(build_app(service, keys), service)
        loop = asyncio.get_running_loop()

        def stop(*, now: bool = False) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(server.begin_exit, now)

        listener.listen(2048)  # from here on a connection waits, and is not refused
        announce(launch_card(service.active, url), stop)
        following = asyncio.create_task(follow_root(service, root)) if root is not None else None
        try:
            await server.serve(sockets=[listener])
        finally:
            if following is not None:
                following.cancel()
            await service.close()
    finally:
        listener.close()


def read_api_keys(config: ApiKeyConfig) -> frozenset[bytes]:
    """Return the keys that clients may show; none where none is asked for.

    Raises:
        ConfigError: a file or variable that was named gives no key.
    """
    keys: list[str] = []
    if config.file is not None:
        try:
            keys += config.file.expanduser().read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key.file {config.file} cannot be read: {error}") from error
    if config.environment is not None:
        keys += os.environ.get(config.environment, "").split()
    if not keys and (config.file or config.environment):
        raise ConfigError(f"api_key: {config.file or config.environment} holds no key; write one, or leave api_key out")
    return frozenset(key.encode() for key in keys)


def _bind(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded: a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named because asyncio switches Nagle's delay off only where it is
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be bound ({error}); choose another --port, or 0 for a free one") from error
    return listener


def _draining_server(app: "FastAPI", service: Service) -> "_Exits":
    import uvicorn

    class DrainingServer(uvicorn.Server):
        """Refuses new requests and finishes the running ones before it closes anything."""

        _draining: asyncio.Task[None] | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.servers[0].get_loop().call_soon_threadsafe(self.begin_exit, False)

        def begin_exit(self, now: bool) -> None:
            if now or self._draining is not None:
                self.should_exit = self.force_exit = True
            else:
                self._draining = asyncio.get_running_loop().create_task(self._drain())

        async def _drain(self) -> None:
            log.info("draining: new requests are refused, running ones are finished")
            if not await service.drain():
                log.warning("requests still ran after limits.drain_timeout_s; they are ended")
            self.should_exit = True

    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
    )
    return DrainingServer(settings)


class _Exits(Protocol):
    def begin_exit(self, now: bool) -> None: ...
    async def serve(self, sockets: list[socket.socket] | None = None) -> None: ...
