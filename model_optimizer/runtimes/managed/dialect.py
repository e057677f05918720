"""What differs between servers of other projects: how they are started, asked and understood."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.options import ManagedOptions

Json = Mapping[str, object]
END_OF_TEXT = -1
_FAULT_BEGINS = 64
"""Bytes of an event among which an error object says that it is one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start."""

    program: Path
    model: Path
    """What the server loads: a checkpoint's directory or a file."""
    plan: KvPlan
    options: ManagedOptions
    port: int
    key: str
    """Secret of this start, which keeps other users of the machine out."""


class StreamFault(Exception):
    """A server says in the middle of an answer that there will be no more of it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One token; log-probabilities in nats, of the model's own distribution."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Heard:
    """What one event of a stream says."""

    tokens: tuple[Scored, ...]
    ended: bool = False
    stopped_at: int | None = None
    """The stop token, where it ended the answer and is not among `tokens`; `END_OF_TEXT` where it is not told which."""
    num_generated: int | None = None
    """Tokens of the answer so far by the server's count, these included, where it holds some back and says so."""
    spelled: bytes = b""
    """What the tokens that were held back and those told here spell."""


class Dialect(Protocol):
    """How one kind of server is spoken to; all methods are pure."""

    @property
    def name(self) -> str: ...
    @property
    def program(self) -> str:
        """Return the program's name in PATH."""

    @property
    def install(self) -> str:
        """Say how it is had."""

    @property
    def generate_path(self) -> str: ...
    @property
    def version_path(self) -> str: ...
    def find_model(self, directory: Path) -> Path:
        """Return what the server loads of a directory.

        Raises:
            ConfigError: it holds nothing that the server loads.
        """

    def command(self, launch: Launch) -> tuple[str, ...]:
        """Return the command line.

        Raises:
            UnsupportedError: the plan asks for what the server cannot do.
        """

    def environment(self, launch: Launch) -> dict[str, str]: ...
    def body(self, request: GenerationRequest) -> Json:
        """Return what is sent for one request."""

    def hear(self, event: bytes) -> Heard:
        """Return what an event of a stream says.

        Raises:
            ValueError: it is not understood.
            StreamFault: it says that the answer failed.
        """

    def version(self, answer: bytes) -> str:
        """Return the version that the answer to `version_path` states."""


_JSON: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


class _Fault(BaseModel):
    message: str = "no reason given"


class _FaultEvent(BaseModel):
    error: _Fault


def refuse_fault(event: bytes) -> None:
    """Raise StreamFault where an event is OpenAI's error object."""
    if b'"error"' in event[:_FAULT_BEGINS]:
        try:
            fault = _FaultEvent.model_validate_json(event)
        except ValidationError:
            return
        raise StreamFault(fault.error.message)


def encode(body: Json) -> bytes:
    return json.dumps(body, allow_nan=False).encode()


def decode(answer: bytes) -> Json:
    """Return a JSON object.

    Raises:
        ValueError: it is none.
    """
    return _JSON.validate_json(answer)
