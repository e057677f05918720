"""What the server and its engine's process say to each other: one JSON object a line, either way.

No pickle, and nothing of the engine's frameworks: the server never imports them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.runtimes.options import RuntimeOptions


class Message(BaseModel):
    """Base of every message; log-probabilities may be infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Open(Message):
    """The first order: which engine to load."""

    what: Literal["open"] = "open"
    engine: Engine
    directory: str
    kv: KvPlan
    options: RuntimeOptions = RuntimeOptions()

    def line(self) -> bytes:
        """Return it without what was not stated, which a runtime may decide by its device."""
        return self.model_dump_json(exclude_unset=True).encode() + b"\n"


class Submit(Message):
    """Start a request under a number of the server's choosing."""

    what: Literal["submit"] = "submit"
    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    num_top: int
    shares_prefix: bool


class Cancel(Message):
    what: Literal["cancel"] = "cancel"
    number: int


class Ready(Message):
    """The engine is loaded; what it is."""

    what: Literal["ready"] = "ready"
    runtime: str
    version: str
    device: str
    precision: str
    max_batch: int
    max_model_len: int
    notes: tuple[str, ...]
    load_s: float
    weight_bytes: int
    pool_bytes: int = 0
    """Set aside for keys and values already."""


class Failed(Message):
    """The engine could not be opened; `error` is the class, as in errors.py."""

    what: Literal["failed"] = "failed"
    error: str
    message: str


class Refused(Message):
    """One request gets no answer; the others are none the wiser."""

    what: Literal["refused"] = "refused"
    number: int
    message: str
    lost: bool = False
    """Whether the engine failed it; else the request itself is at fault."""


class Token(Message):
    """One generated token."""

    number: int
    token: int
    log_prob: float
    finished: bool
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Message):
    """All tokens of one step."""

    what: Literal["tokens"] = "tokens"
    tokens: tuple[Token, ...]


class Reading(Message):
    """Bytes now."""

    what: Literal["reading"] = "reading"
    kv_bytes: int
    pool_bytes: int
    process_bytes: int


Order = Annotated[Submit | Cancel, Field(discriminator="what")]
Report = Annotated[Ready | Failed | Refused | Tokens | Reading, Field(discriminator="what")]
ORDER: TypeAdapter[Submit | Cancel] = TypeAdapter(Order)
REPORT: TypeAdapter[Ready | Failed | Refused | Tokens | Reading] = TypeAdapter(Report)
