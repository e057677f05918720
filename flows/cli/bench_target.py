"""What `bench` sends to: a server somewhere, or one that is started for a bundle and ended with the command."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flows.cli.bench_options import Asked
from model_optimizer.errors import ConfigError, IntegrityError, UnsupportedError
from model_optimizer.measurement.http_client import Endpoint, ask

_MODELS_TIMEOUT_S = 30.0
_ERRORS = {2: ConfigError, 4: UnsupportedError, 6: IntegrityError}
"""What `serve` ended with, and what that is here."""
_PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


def endpoint_of(url: str, asked: Asked) -> Endpoint:
    """Return where requests go; a URL may name the server, its /v1, or the endpoint itself."""
    headers: tuple[tuple[str, str], ...] = ()
    if asked.key_variable is not None:
        key = os.environ.get(asked.key_variable, "").strip()
        if not key:
            raise ConfigError(f"--api-key-variable: the environment has no {asked.key_variable}; set it to the key")
        headers = (("Authorization", f"Bearer {key}"),)
    base = url.rstrip("/")
    for path in _PATHS.values():
        base = base.removesuffix(path)
    return Endpoint.of(base.removesuffix("/v1"), _PATHS[asked.chat], headers)


def first_model(url: str, endpoint: Endpoint) -> str:
    """Ask the server which model it serves."""
    place = replace(endpoint, path=endpoint.path.partition("/v1/")[0] + "/v1/models")
    try:
        answer = asyncio.run(ask(place, place.request(b"", method="GET"), _MODELS_TIMEOUT_S))
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"no server answers at {url}: {error or type(error).__name__}; start one, or mend the address"
        ) from error
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{place.address} names no model (status {answer.http_status}); say which with --model") from error


@contextlib.contextmanager
def served(asked: Asked) -> Iterator[tuple[str, str | None]]:
    """Give the target's address, and the name of its model where a server was started for it."""
    if asked.target.startswith(("http://", "https://")):
        yield asked.target, None
        return
    if not Path(asked.target).exists():
        raise ConfigError(f"{asked.target} is neither an http(s) URL nor a bundle or model directory that exists")
    command = [sys.executable, "-m", "flows.cli", "serve", "--model-path", asked.target, "--port", "0", "--json"]
    command += ["--config", str(asked.config)] if asked.config else []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            log.seek(0)
            told = (log.read().strip().splitlines() or [f"ended with {code}"])[-1].removeprefix("model-optimizer: ")
            raise _ERRORS.get(code, UnsupportedError)(f"{asked.target} could not be served: {told}")
        card = json.loads(line)
        try:
            yield card["url"], card["model"]
        finally:
            process.send_signal(signal.SIGTERM)
