"""Raw samples of one load run: when every request was due, began, gave each chunk of tokens and ended.

Latencies count from the INTENDED start, so that a request which had to wait for the generator or for its turn is as
late as its user would say. Only requests that ended well have latencies; errors, rejections and time-outs are counted
beside them and are never fast answers.

Shapes: N requests, C chunks that carried text (a server may put several tokens into one).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.store import write_atomically

NS_PER_MS, NS_PER_S = 1e6, 1e9
NEVER_NS = -1
"""Stands for a time that did not come: never sent, no token, no end."""
FORMAT = "load-samples-1"
_PER_CHUNK = ("token_times_ns", "chunk_tokens")


class RequestStatus(IntEnum):
    """How a request ended; anything but OK is a failure."""

    OK = 0
    ERROR = 1
    """Refused connection, a status of 400 or above other than a rejection, a broken or malformed answer."""
    REJECTED = 2
    """The server declined for load (429, 503)."""
    TIMEOUT = 3
    CANCELLED = 4
    """Given up by the generator, e.g. at the end of the run."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What one request must keep, in ms; None does not bind."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    end_to_end_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that ended well within the service level."""

    num_good: int
    ratio: float
    """Of all requests, failures included."""
    requests_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadSamples:
    """What one load run saw; times are ns of one monotonic clock, -1 where they never came.

    Request i owns the chunks `offsets[i]:offsets[i + 1]`. Chunks without text (a role, a usage record) are left out. A
    generator that keeps no chunk times leaves C = 0; `first_token_ns` and `num_tokens` stand on their own.

    Raises:
        ConfigError: arrays of other shapes or integer kinds, offsets that do not fit, a request that is OK without an end.
    """

    intended_ns: NDArray[np.int64]
    """[N] when the schedule wanted the request sent; equal to `started_ns` in a closed loop."""
    started_ns: NDArray[np.int64]
    """[N] when its first byte was handed to the socket."""
    first_token_ns: NDArray[np.int64]
    """[N] the first chunk with text; -1 where the answer was not streamed."""
    finished_ns: NDArray[np.int64]
    """[N] the end of the answer or the moment of failure."""
    num_tokens: NDArray[np.int64]
    """[N] generated tokens by the tokenizer's count (or the server's usage record), never the number of chunks."""
    offsets: NDArray[np.int64]
    """[N + 1]"""
    token_times_ns: NDArray[np.int64]
    """[C] arrival of every chunk that carried text."""
    chunk_tokens: NDArray[np.int64]
    """[C] tokens in it; 0 where a chunk completed no token (part of a character)."""
    status: NDArray[np.int8]
    """[N] `RequestStatus`."""

    def __post_init__(self) -> None:
        if fault := self._fault():
            raise ConfigError(f"load samples are inconsistent: {fault}")

    @property
    def num_requests(self) -> int:
        return self.intended_ns.size

    @property
    def ok(self) -> NDArray[np.bool_]:
        """[N]"""
        return np.asarray(self.status == RequestStatus.OK)

    def count(self, status: RequestStatus) -> int:
        """Count the requests that ended so."""
        return int((self.status == status).sum())

    def dispatch_delay_ms(self) -> NDArray[np.float64]:
        """Return actual minus intended start of every request that was sent: the generator's own lateness."""
        sent = self.started_ns != NEVER_NS
        return _ms(self.started_ns[sent] - self.intended_ns[sent])

    def end_to_end_ms(self, *, failures_infinite: bool = False) -> NDArray[np.float64]:
        """Return intended start to end: of the requests that ended well, or of all with failures as infinity."""
        if not failures_infinite:
            return _ms(self.finished_ns[self.ok] - self.intended_ns[self.ok])
        return np.where(self.ok, _ms(self.finished_ns - self.intended_ns), np.inf)

    def ttft_ms(self) -> NDArray[np.float64]:
        """Return intended start to first token of the requests that streamed and ended well."""
        streamed = self.ok & (self.first_token_ns != NEVER_NS)
        return _ms(self.first_token_ns[streamed] - self.intended_ns[streamed])

    def tpot_ms(self) -> NDArray[np.float64]:
        """Return the mean time per output token after the first chunk, of the requests that ended well and have one.

        (last chunk - first chunk) / (tokens - tokens of the first chunk); a request whose tokens all came at once has
        none and is left out of every statistic.
        """
        return self._tpot_ms()[self._has_tpot()]

    def chunk_gap_ms(self) -> NDArray[np.float64]:
        """Return every gap between neighbouring chunks of one request that ended well: what the reader's eye sees."""
        return self._gaps()[0]

    def itl_ms(self) -> NDArray[np.float64]:
        """Return inter-token latencies: a chunk of k tokens after a gap g counts as k tokens, g / k apart."""
        gaps_ms, tokens = self._gaps()
        carrying = tokens > 0
        return np.repeat(gaps_ms[carrying] / tokens[carrying], tokens[carrying])

    def wall_s(self) -> float:
        """Return the time from the first intended start to the last end; 0 where nothing ended."""
        ended = self.finished_ns != NEVER_NS
        return float(self.finished_ns[ended].max() - self.intended_ns.min()) / NS_PER_S if ended.any() else 0.0

    def requests_per_s(self) -> float:
        """Return requests that ended well over the whole run."""
        return _per_s(int(self.ok.sum()), self.wall_s())

    def output_tok_per_s(self) -> float:
        """Return generated tokens of requests that ended well over the whole run."""
        return _per_s(int(self.num_tokens[self.ok].sum()), self.wall_s())

    def goodput(self, level: ServiceLevel) -> Goodput:
        """Return the requests that kept every stated limit; one that has no such figure (e.g. one token) keeps it.

        Raises:
            ConfigError: a limit on the first token, and an answer that was not streamed.
        """
        if level.ttft_ms is not None and (self.ok & (self.first_token_ns == NEVER_NS) & (self.num_tokens > 0)).any():
            raise ConfigError("goodput with a limit on TTFT needs streamed answers; seen: answers without a first-token time")
        good = self.ok.copy()
        if level.end_to_end_ms is not None:
            good &= _ms(self.finished_ns - self.intended_ns) <= level.end_to_end_ms
        if level.ttft_ms is not None:
            good &= _ms(self.first_token_ns - self.intended_ns) <= level.ttft_ms
        if level.tpot_ms is not None:
            good &= ~self._has_tpot() | (self._tpot_ms() <= level.tpot_ms)
        num_good = int(good.sum())
        return Goodput(num_good, num_good / self.num_requests if self.num_requests else 0.0, _per_s(num_good, self.wall_s()))

    def select(self, chosen_N: NDArray[np.bool_]) -> "LoadSamples":
        """Return the samples of the chosen requests, in the same order."""
        chunks = np.repeat(chosen_N, np.diff(self.offsets))
        return LoadSamples(
            intended_ns=self.intended_ns[chosen_N],
            started_ns=self.started_ns[chosen_N],
            first_token_ns=self.first_token_ns[chosen_N],
            finished_ns=self.finished_ns[chosen_N],
            num_tokens=self.num_tokens[chosen_N],
            offsets=_offsets(np.diff(self.offsets)[chosen_N]),
            token_times_ns=self.token_times_ns[chunks],
            chunk_tokens=self.chunk_tokens[chunks],
            status=self.status[chosen_N],
        )

    def save(self, path: Path) -> None:
        """Write one parquet table, a row per request; same samples, same bytes. Law: load(save(x)) == x.

        Raises:
            StorageError: the disk is full or the folder cannot be written.
        """
        import pyarrow as pa
        from pyarrow import parquet

        chunk_offsets = pa.array(self.offsets)
        columns = {
            "intended_ns": pa.array(self.intended_ns),
            "started_ns": pa.array(self.started_ns),
            "first_token_ns": pa.array(self.first_token_ns),
            "finished_ns": pa.array(self.finished_ns),
            "num_tokens": pa.array(self.num_tokens),
            "status": pa.array(self.status),
            "token_times_ns": pa.LargeListArray.from_arrays(chunk_offsets, pa.array(self.token_times_ns)),
            "chunk_tokens": pa.LargeListArray.from_arrays(chunk_offsets, pa.array(self.chunk_tokens)),
        }
        names = ", ".join(f"{status.value} {status.name.lower()}" for status in RequestStatus)
        notes = {"format": FORMAT, "clock": "monotonic, ns; -1: never", "status": names}
        stream = io.BytesIO()
        parquet.write_table(pa.table(columns).replace_schema_metadata(notes), stream, compression="zstd")
        write_atomically(path, stream.getvalue())

    @classmethod
    def load(cls, path: Path) -> "LoadSamples":
        """Read what `save` wrote.

        Raises:
            IntegrityError: no such file, no such format, or content that does not fit together.
        """
        import pyarrow as pa
        from pyarrow import parquet

        try:
            table = parquet.read_table(path)
            found = (table.schema.metadata or {}).get(b"format", b"none").decode(errors="replace")
            if found != FORMAT:
                raise IntegrityError(f"{path} holds no load samples: format {found!r}, wanted {FORMAT!r}")
            whole = {name: table[name].combine_chunks() for name in table.column_names}
            lists = [whole[name] for name in _PER_CHUNK]
            scalars = {
                name: whole[name].to_numpy(zero_copy_only=False) for name in whole if not pa.types.is_nested(whole[name].type)
            }
            return cls(
                intended_ns=scalars["intended_ns"],
                started_ns=scalars["started_ns"],
                first_token_ns=scalars["first_token_ns"],
                finished_ns=scalars["finished_ns"],
                num_tokens=scalars["num_tokens"],
                offsets=_offsets(lists[0].value_lengths().to_numpy(zero_copy_only=False)),
                token_times_ns=lists[0].flatten().to_numpy(zero_copy_only=False),
                chunk_tokens=lists[1].flatten().to_numpy(zero_copy_only=False),
                status=scalars["status"],
            )
        except (OSError, KeyError, AttributeError, pa.ArrowException, ConfigError) as error:
            raise IntegrityError(f"{path} cannot be read as load samples: {error}; measure again") from error

    def _has_tpot(self) -> NDArray[np.bool_]:
        """[N] requests that ended well and have tokens after their first chunk."""
        return self.ok & (np.diff(self.offsets) > 1) & (self.num_tokens > self._first_chunk_tokens())

    def _first_chunk_tokens(self) -> NDArray[np.int64]:
        """[N] tokens of the first chunk with text, at least 1; 0 where no chunk was kept."""
        first = np.zeros(self.num_requests, dtype=np.int64)
        some = np.diff(self.offsets) > 0
        first[some] = np.maximum(1, self.chunk_tokens[self.offsets[:-1][some]])
        return first

    def _tpot_ms(self) -> NDArray[np.float64]:
        """[N] NaN where there is none."""
        has, per_token = self._has_tpot(), np.full(self.num_requests, np.nan)
        span = self.token_times_ns[self.offsets[1:][has] - 1] - self.token_times_ns[self.offsets[:-1][has]]
        per_token[has] = _ms(span) / (self.num_tokens - self._first_chunk_tokens())[has]
        return per_token

    def _gaps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return every gap within a request that ended well, in ms, and the tokens of the chunk that ends it."""
        lengths = np.diff(self.offsets)
        kept = np.repeat(self.ok, lengths)
        starts = np.zeros(self.token_times_ns.size, dtype=bool)
        starts[self.offsets[:-1][lengths > 0]] = True
        ends_gap = (kept & ~starts)[1:]
        return _ms(np.diff(self.token_times_ns)[ends_gap]), self.chunk_tokens[1:][ends_gap]

    def _fault(self) -> str | None:
        """Return what does not fit together, or None."""
        num = self.intended_ns.shape
        per_request: dict[str, NDArray[np.int64] | NDArray[np.int8]] = {
            "started_ns": self.started_ns,
            "first_token_ns": self.first_token_ns,
            "finished_ns": self.finished_ns,
            "num_tokens": self.num_tokens,
            "status": self.status,
        }
        others: dict[str, NDArray[np.int64] | NDArray[np.int8]] = {
            "intended_ns": self.intended_ns,
            "offsets": self.offsets,
            "token_times_ns": self.token_times_ns,
            "chunk_tokens": self.chunk_tokens,
        }
        for name, array in (per_request | others).items():
            wanted = np.int8 if name == "status" else np.int64
            if array.ndim != 1 or array.dtype != wanted:
                return f"{name} is {array.dtype} of shape {array.shape}, wanted {wanted.__name__} of one axis"
        for name, array in per_request.items():
            if array.shape != num:
                return f"{name} has {array.size} entries for {num[0]} requests"
        if self.offsets.size != num[0] + 1 or self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            return f"offsets must be {num[0] + 1} rising numbers from 0"
        if not self.offsets[-1] == self.token_times_ns.size == self.chunk_tokens.size:
            return f"offsets end at {self.offsets[-1]}; chunk arrays hold {self.token_times_ns.size} and {self.chunk_tokens.size}"
        if (self.ok & (self.finished_ns == NEVER_NS)).any():
            return "a request is OK without an end"
        return None


def join(parts: Sequence[LoadSamples]) -> LoadSamples:
    """Return the samples of several runs in a row, all on one clock; rates over them would count the pauses between.

    Raises:
        ConfigError: no parts.
    """
    if not parts:
        raise ConfigError("joining load samples takes at least one part; seen: none")
    return LoadSamples(
        intended_ns=np.concatenate([part.intended_ns for part in parts]),
        started_ns=np.concatenate([part.started_ns for part in parts]),
        first_token_ns=np.concatenate([part.first_token_ns for part in parts]),
        finished_ns=np.concatenate([part.finished_ns for part in parts]),
        num_tokens=np.concatenate([part.num_tokens for part in parts]),
        offsets=_offsets(np.concatenate([np.diff(part.offsets) for part in parts])),
        token_times_ns=np.concatenate([part.token_times_ns for part in parts]),
        chunk_tokens=np.concatenate([part.chunk_tokens for part in parts]),
        status=np.concatenate([part.status for part in parts]),
    )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ms(duration_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(duration_ns / NS_PER_MS, dtype=np.float64)


def _per_s(count: int, wall_s: float) -> float:
    return count / wall_s if wall_s > 0 else 0.0
