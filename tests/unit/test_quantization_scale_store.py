"""Where warm input ranges are kept: files, and a real Redis server that may die at any moment."""

import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.scale_store import (
    PREFIX,
    DiskScaleStore,
    RedisScaleStore,
    ScaleIdentity,
    open_scale_store,
)
from model_optimizer.quantization.warm_up import Bounds, ScaleCollector, warm_ranges

SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(SERVER is None, reason="redis-server is not installed (Debian: apt-get install redis-server)")
IDENTITY = ScaleIdentity(model_digest="m", gpu="H200", optimizer_digest="o", data_digest="d")
RANGES = {"a.q_proj": 1.5, "a.down_proj": 20.0}
OFFLINE = {"a.q_proj": 1.0, "a.down_proj": 16.0}


class Server:
    """A Redis server of this test on a free loopback port."""

    def __init__(self, directory: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [SERVER or "", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError(f"redis-server ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.kill()


def requests(*factors: float):
    return [(f"r{number}", {layer: factor * value for layer, value in OFFLINE.items()}) for number, factor in enumerate(factors)]


@pytest.mark.parametrize("field", ["model_digest", "gpu", "optimizer_digest", "data_digest"])
def test_key_changes_with_every_field_of_the_identity(field: str) -> None:
    assert IDENTITY.model_copy(update={field: "other"}).key != IDENTITY.key
    assert ScaleIdentity(**IDENTITY.model_dump()).key == IDENTITY.key


def test_disk_store_gives_back_what_was_written_until_it_expires(tmp_path: Path) -> None:
    now = [1000.0]
    store = DiskScaleStore(tmp_path, ttl_s=60, now_s=lambda: now[0])
    assert store.read(IDENTITY.key) is None
    store.write(IDENTITY.key, RANGES)
    now[0] = 1059.0
    assert store.read(IDENTITY.key) == RANGES
    now[0] = 1060.0
    assert store.read(IDENTITY.key) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"ranges": {}, "expires_at_s": 9e9}', b'{"ranges": {"a": "x"}, "expires_at_s": 9e9}']
)
def test_disk_store_ignores_a_damaged_entry_with_a_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{IDENTITY.key}.json").write_bytes(content)
    assert DiskScaleStore(tmp_path).read(IDENTITY.key) is None
    assert "holds an entry that is none" in caplog.text


def test_disk_store_goes_on_when_it_cannot_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DiskScaleStore(tmp_path / "file")
    store.write(IDENTITY.key, RANGES)
    assert "cannot be written" in caplog.text
    assert store.read(IDENTITY.key) is None


def test_open_scale_store_takes_files_without_a_url_and_refuses_other_schemes(tmp_path: Path) -> None:
    assert isinstance(open_scale_store(None, tmp_path), DiskScaleStore)
    with pytest.raises(ConfigError, match=r"scheme 'https'; allowed: redis, rediss, unix"):
        open_scale_store("https://cache", tmp_path)


@needs_redis
def test_redis_store_shares_ranges_and_lets_them_expire(server: Server) -> None:
    import redis

    first, second = RedisScaleStore(server.url, ttl_s=50), RedisScaleStore(server.url)
    assert second.read(IDENTITY.key) is None
    first.write(IDENTITY.key, RANGES)
    assert second.read(IDENTITY.key) == RANGES
    client = redis.Redis(port=server.port)
    assert 0 < client.ttl(PREFIX + IDENTITY.key) <= 50
    client.set(PREFIX + IDENTITY.key, b"poison")
    assert second.read(IDENTITY.key) is None
    for connection in (first, second, client):
        connection.close()


@needs_redis
def test_warm_up_goes_on_with_a_warning_when_redis_dies_in_between(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisScaleStore(server.url)

    def dying():
        yield from requests(1.0, 1.2)
        os.kill(server.process.pid, 9)
        server.process.wait()
        yield from requests(0.9)

    with caplog.at_level(logging.WARNING):
        found = warm_ranges(store, IDENTITY.key, ScaleCollector(OFFLINE, Bounds(), num_requests=3), dying())
    assert found.origin == "measured" and found.ranges == {"a.q_proj": 1.2, "a.down_proj": pytest.approx(19.2)}
    assert f"the scale store redis://127.0.0.1:{server.port}/0 does not answer" in caplog.text
    again = warm_ranges(store, IDENTITY.key, ScaleCollector(OFFLINE, Bounds(), num_requests=2), requests(1.0, 1.1))
    assert again.origin == "measured" and again.num_accepted == 2
    store.close()


@needs_redis
def test_warm_up_reads_what_another_process_left_in_redis(server: Server) -> None:
    store = RedisScaleStore(server.url)
    first = warm_ranges(store, IDENTITY.key, ScaleCollector(OFFLINE, Bounds(), num_requests=2), requests(1.0, 1.5))
    second = warm_ranges(RedisScaleStore(server.url), IDENTITY.key, ScaleCollector(OFFLINE, Bounds()), iter(()))
    assert (first.origin, second.origin) == ("measured", "cached") and second.ranges == first.ranges
    store.close()


def test_redis_store_does_not_log_the_password(caplog: pytest.LogCaptureFixture) -> None:
    store = RedisScaleStore("redis://user:secret@127.0.0.1:1/0")
    assert store.read(IDENTITY.key) is None
    assert "does not answer" in caplog.text and "secret" not in caplog.text
