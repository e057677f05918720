"""Input ranges that one process measured and others may use: a file per key, or a Redis server.

What a store returns was written by someone else: it is checked for form here, and for sense by `warm_up.py` against offline
ranges. A store that fails, is gone or holds damage is as good as an empty one, with a warning.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError, StorageError, UnsupportedError
from model_optimizer.protocols import ScaleStore
from model_optimizer.store import canonical_json, write_atomically

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
PREFIX = "model-optimizer:input-ranges:"
TTL_S = 7 * 24 * 3600
TIMEOUT_S = 1.0
"""Longest that a dead server holds up one read or write."""


class ScaleIdentity(Frozen):
    """What input ranges depend on; another value of any field is another entry."""

    model_digest: str
    gpu: str
    optimizer_digest: str
    """Of the code and the recipe that made the checkpoint."""
    data_digest: str
    """Of the calibration text that the offline ranges come from."""

    @property
    def key(self) -> str:
        return hashlib.sha256(canonical_json(self)).hexdigest()


class _Entry(Frozen):
    ranges: dict[str, float] = Field(min_length=1)
    expires_at_s: float
    """Seconds since 1970."""


def open_scale_store(url: str | None, directory: Path, ttl_s: int = TTL_S) -> ScaleStore:
    """Return the Redis server at `url`, or files in `directory` where there is none; nothing is connected to yet.

    Raises:
        ConfigError: the URL has another scheme.
        UnsupportedError: the Redis client is not installed.
    """
    return DiskScaleStore(directory, ttl_s) if url is None else RedisScaleStore(url, ttl_s)


class DiskScaleStore:
    """One JSON file per key, written so that a reader sees all of it or none."""

    def __init__(self, directory: Path, ttl_s: int = TTL_S, now_s: Callable[[], float] = time.time):
        self._directory, self._ttl_s, self._now_s = directory, ttl_s, now_s

    def read(self, key: str) -> dict[str, float] | None:
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the scale store %s cannot be read (%s); going on without it", path, error)
            return None
        return _parsed(content, str(path), self._now_s())

    def write(self, key: str, ranges: Mapping[str, float]) -> None:
        entry = _Entry(ranges=dict(ranges), expires_at_s=self._now_s() + self._ttl_s)
        try:
            write_atomically(self._path(key), entry.model_dump_json(indent=1).encode())
        except StorageError as error:
            log.warning("the scale store %s cannot be written (%s); going on without it", self._path(key), error)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"


class RedisScaleStore:
    """One string per key with the server's own expiry."""

    def __init__(self, url: str, ttl_s: int = TTL_S):
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(f"cache.url has the scheme {parts.scheme!r}; allowed: {', '.join(SCHEMES)}")
        self._client = _connect(url)
        self._ttl_s = ttl_s
        self._shown = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def read(self, key: str) -> dict[str, float] | None:
        import redis

        try:
            content = self._client.get(PREFIX + key)
        except redis.RedisError as error:
            log.warning("the scale store %s does not answer (%s); going on without it", self._shown, type(error).__name__)
            return None
        return None if not isinstance(content, bytes) else _parsed(content, self._shown, time.time())

    def write(self, key: str, ranges: Mapping[str, float]) -> None:
        import redis

        entry = _Entry(ranges=dict(ranges), expires_at_s=time.time() + self._ttl_s)
        try:
            self._client.set(PREFIX + key, entry.model_dump_json(), ex=self._ttl_s)
        except redis.RedisError as error:
            log.warning("the scale store %s does not answer (%s); going on without it", self._shown, type(error).__name__)

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()


def _connect(url: str) -> "redis.Redis":
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise UnsupportedError("cache.url needs the Redis client; run `pip install model-optimizer-pipeline[redis]`") from error
    return redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0))


def _parsed(content: bytes, where: str, now_s: float) -> dict[str, float] | None:
    try:
        entry = _Entry.model_validate_json(content)
    except ValidationError as error:
        log.warning("the scale store %s holds an entry that is none (%d faults); it is ignored", where, error.error_count())
        return None
    return dict(entry.ranges) if entry.expires_at_s > now_s else None
