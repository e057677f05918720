"""A bundle's costs and its walls: hashing and signing over writing, verification, rollback, readers and kills during swaps,
and the hostile bundles that are refused.

Run on an otherwise idle machine: hashing runs beside the write on a second core. About two minutes.
"""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import numpy as np

from benchmarks.evidence import Figure, append
from benchmarks.hostile_bundles import GOOD, bless, is_possible, make_good, make_template, refusal, reseal
from benchmarks.hostile_cases import CASES
from model_optimizer.errors import ModelOptimizerError
from model_optimizer.measurement.percentiles import quantile
from model_optimizer.release.bundle import sync_tree
from model_optimizer.release.deploy import Checks, deploy, rollback, status
from model_optimizer.release.deployment_root import CURRENT, Reason
from model_optimizer.release.health import Health
from model_optimizer.release.manifest import METADATA, verify_manifest
from model_optimizer.release.sign import SigningKey, ensure_key, seal
from model_optimizer.release.verify import verify_bundle
from model_optimizer.release.writer import BundleWriter, files_below

SHARD_BYTES, NUM_SHARDS = 128 << 20, 4
NUM_PAIRS, NUM_VERIFIED, NUM_ROLLBACKS = 21, 9, 100
NUM_PROCESSES, NUM_READERS, NUM_SWAPS, NUM_KILLS = 4, 1000, 300, 200
WHO = Reason("benchmark", "swapping")
LIBRARIES = ("model-signing", "cryptography")
STATED = ("config.yaml", METADATA)
"""Two files of a release that both name it: read through one directory, they must agree."""


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="release-", dir=Path.home()))  # a disk; /tmp may be memory
    try:
        key = ensure_key(folder / "key.pem")
        figures = [*writing(folder, key), *verifying(folder, key), *swapping(folder, key), *hostile(folder)]
    finally:
        shutil.rmtree(folder)
    append(__file__, figures, LIBRARIES)


def writing(folder: Path, key: SigningKey) -> Iterator[Figure]:
    """Write one bundle with and without digests and signature, by turns; both durable."""
    source = folder / "source"
    source.mkdir()
    piece = random.Random(0).randbytes(1 << 20)
    for number in range(NUM_SHARDS):
        with (source / f"model-{number}.safetensors").open("wb") as stream:
            for _ in range(SHARD_BYTES >> 20):
                stream.write(piece)
    plain_s, ours_s = [], []
    for pair in range(NUM_PAIRS + 1):
        arms: list[tuple[Callable[[Path, Path, SigningKey], None], list[float]]] = [(_plain, plain_s), (_ours, ours_s)]
        for write, times_s in arms if pair % 2 else arms[::-1]:
            os.sync()
            start = time.perf_counter()
            write(source, folder / "written", key)
            if pair:  # the first pair warms up
                times_s.append(time.perf_counter() - start)
            shutil.rmtree(folder / "written")
    ratios = [ours / plain - 1 for ours, plain in zip(ours_s, plain_s, strict=True)]
    yield _median("hash_sign_over_write_ratio", ratios, "ratio")
    num_bytes = SHARD_BYTES * NUM_SHARDS
    yield Figure("plain", "write_bytes_per_s", num_bytes / statistics.median(plain_s), "bytes_per_s", n=NUM_PAIRS)
    yield Figure("ours", "write_bytes_per_s", num_bytes / statistics.median(ours_s), "bytes_per_s", n=NUM_PAIRS)


def _median(metric: str, values: list[float], unit: str) -> Figure:
    found = quantile(np.array(values), 0.5)
    return Figure("ours", metric, found.value, unit, found.lower, found.upper, len(values))


def _plain(source: Path, target: Path, _key: SigningKey) -> None:
    """Copy inside the kernel and make it durable: what writing costs without any digest."""
    (target / "model").mkdir(parents=True)
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / "model" / path.name)
    sync_tree(target)


def _ours(source: Path, target: Path, key: SigningKey) -> None:
    """Write, hash, list and sign as packaging does, and make it durable."""
    target.mkdir()
    writer = BundleWriter(target)
    writer.copy(files_below("model", source))
    seal(writer, key)
    sync_tree(target)


def verifying(folder: Path, key: SigningKey) -> Iterator[Figure]:
    """Verify a large bundle on one core: every byte read and hashed, signature and content checked."""
    bundle = folder / "large" / "large-v1"
    bundle.mkdir(parents=True)
    num_bytes = SHARD_BYTES * NUM_SHARDS
    writer = BundleWriter(bundle)
    for place, content in GOOD.items():
        writer.write(place, content)
    writer.copy(files_below("model/engine", _as_data(folder / "source")))
    seal(writer, key)
    bless(bundle, key)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        rates = []
        for _ in range(NUM_VERIFIED):
            start = time.perf_counter()
            verify_bundle(bundle, public_key=key.public)
            rates.append(num_bytes / (time.perf_counter() - start))
    finally:
        os.sched_setaffinity(0, cores)
    yield _median("verify_bytes_per_s", rates, "bytes_per_s")


def _as_data(source: Path) -> Path:
    """Rename the shards, which hold no tensors, to what a runtime's own weights are called."""
    for path in list(source.glob("*.safetensors")):
        path.rename(path.with_suffix(".data"))
    return source


def swapping(folder: Path, key: SigningKey) -> Iterator[Figure]:
    """Move `current` between two releases: how long it takes, what readers see, what a kill leaves."""
    root = folder / "root"
    names = ("chat-v1", "chat-v2")
    for name in names:
        bundle = make_good(folder / "bundles", key, name)
        for place in STATED:  # both files name their release
            (bundle / place).write_bytes(_stating(place, name))
        reseal(bundle, key)
        deploy(bundle, root, WHO, public_key=key.public, checks=Checks(_fit, _fit))
    yield from _timed(root, names)
    yield from _read(root, names)
    yield from _killed(root, names)


def _fit(_release: Path) -> Health:
    """Stand for a health check: here the swap itself is looked at."""
    return Health("any", 0, 0.0)


def _stating(place: str, name: str) -> bytes:
    if place == METADATA:
        return json.dumps({**json.loads(GOOD[METADATA]), "bundle": name}).encode()
    return f"name: {name}\n".encode()


def _timed(root: Path, names: tuple[str, str]) -> Iterator[Figure]:
    times_s = []
    for number in range(NUM_ROLLBACKS):
        start = time.perf_counter()
        rollback(root, WHO, names[number % 2])
        times_s.append(time.perf_counter() - start)
    yield _median("rollback_s", times_s, "s")
    yield Figure("ours-worst", "rollback_s", max(times_s), "s", n=NUM_ROLLBACKS)


def _read(root: Path, names: tuple[str, str]) -> Iterator[Figure]:
    """Let a thousand readers follow `current` while it moves."""
    context = get_context("fork")
    stop, ready, results = context.Event(), context.Barrier(NUM_PROCESSES + 1), context.Queue()
    each = NUM_READERS // NUM_PROCESSES
    readers = [context.Process(target=_readers, args=(root, each, stop, ready, results)) for _ in range(NUM_PROCESSES)]
    for process in readers:
        process.start()
    ready.wait()
    for number in range(NUM_SWAPS):
        rollback(root, WHO, names[number % 2])
    stop.set()
    counts = [results.get() for _ in readers]
    for process in readers:
        process.join()
    num_reads, num_torn = (sum(column) for column in zip(*counts, strict=True))
    reason = f"{NUM_READERS} readers, {NUM_SWAPS} swaps, {num_reads} reads"
    yield Figure("ours", "torn_reads_count", num_torn, "count", n=num_reads, reason=reason)


def _readers(root: Path, num_readers: int, stop: Event, ready: Barrier, results: "object") -> None:
    """Read in many threads until told to stop; put (reads, torn reads)."""
    counts: list[tuple[int, int]] = []
    threading.stack_size(256 << 10)

    def read() -> None:
        num_reads = num_torn = 0
        while not stop.is_set():
            num_torn += not _is_whole(root)
            num_reads += 1
        counts.append((num_reads, num_torn))

    threads = [threading.Thread(target=read) for _ in range(num_readers)]
    for thread in threads:
        thread.start()
    ready.wait()
    for thread in threads:
        thread.join()
    results.put(tuple(sum(column) for column in zip(*counts, strict=True)))  # type: ignore[attr-defined]


def _is_whole(root: Path) -> bool:
    """Return whether `current` leads to one release whose files agree, as a server that opens it finds it."""
    try:
        folder = os.open(root / CURRENT, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        found = []
        for place in STATED:
            handle = os.open(place, os.O_RDONLY, dir_fd=folder)
            found.append(os.read(handle, 4096))
            os.close(handle)
    except OSError:
        return False
    finally:
        os.close(folder)
    return found in [[_stating(place, name) for place in STATED] for name in ("chat-v1", "chat-v2")]


def _killed(root: Path, names: tuple[str, str]) -> Iterator[Figure]:
    """Kill a process that moves `current` back and forth, at random moments; then look at every byte of what is current."""
    generator = random.Random(0)
    rollback(root, WHO, names[0])
    start = time.perf_counter()
    rollback(root, WHO, names[1])
    swap_s = time.perf_counter() - start
    num_broken = num_unfinished = 0
    for _ in range(NUM_KILLS):
        child = os.fork()
        if child == 0:
            with _never_returning():
                for number in range(1_000_000):
                    rollback(root, WHO, names[number % 2])
        time.sleep(generator.uniform(0.5, 6) * swap_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        num_unfinished += any(path.name.endswith("pending.json") for path in root.iterdir())
        num_broken += not _is_old_or_new(root, names)
    reason = f"kill -9 at random moments of swaps of {1e3 * swap_s:.1f} ms; {num_unfinished} of them between its steps"
    yield Figure("ours-kill9", "broken_swaps_count", num_broken, "count", n=NUM_KILLS, reason=reason)


@contextmanager
def _never_returning() -> Iterator[None]:
    """End a forked child without running anything of its parent's."""
    try:
        yield
    finally:
        os._exit(1)


def _is_old_or_new(root: Path, names: tuple[str, str]) -> bool:
    """Return whether `current` is one of two complete releases, is what the history says, and can be moved on."""
    try:
        seen = status(root)
        verify_manifest(root / "releases" / (root / CURRENT).readlink().name)
    except (ModelOptimizerError, OSError):
        return False
    return seen.current in names and seen.fault is None and seen.moves[-1].to_bundle == seen.current and _is_whole(root)


def hostile(folder: Path) -> Iterator[Figure]:
    """Count the hostile bundles that are refused in exactly their words."""
    template = make_template(folder / "template")
    cases = [case for case in CASES if is_possible(case)]
    refused = 0
    for number, case in enumerate(cases):
        words = refusal(case, template, folder / "cases" / str(number))
        refused += words == case.reason
        if words != case.reason:
            print(f"{case.name}: {words or 'accepted'}", file=sys.stderr)
        shutil.rmtree(folder / "cases")
    yield Figure("ours", "hostile_refused_count", refused, "count", n=len(cases))


if __name__ == "__main__":
    main()
