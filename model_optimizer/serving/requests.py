"""The bodies that clients send. What is not served is refused by its name, never ignored."""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from model_optimizer.serving.faults import Refusal

MAX_TOP = 20
_MAX_STOPS = 4
_MAX_STOP_LENGTH = 256

Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]
Stops = Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)]


def _no_flag(value: object) -> object:
    """Refuse true for 1, which a Literal takes for the same."""
    if isinstance(value, bool):
        raise ValueError("give a number")
    return value


def _flag(value: object) -> object:
    if value is not None and not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


One = Annotated[Literal[1], BeforeValidator(_no_flag)]
No = Annotated[Literal[False], BeforeValidator(_flag)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: No = False


class TextFormat(_Body):
    type: Literal["text"] = "text"


class _Asked(_Body):
    """What both endpoints take. Fields with one allowed value are there so that a client may state the default."""

    model: str = Field(max_length=300)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stops | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: One | None = None
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = Field(default=None, max_length=1000)

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


A = TypeVar("A", bound=_Asked)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = Field(default=None, max_length=200)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    response_format: TextFormat | None = None
    store: No | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    @model_validator(mode="after")
    def _tops_belong_to_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Return how many likeliest tokens are asked for; None where no log-probabilities are."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Asked):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=1)]
    ) = Field(description="one text, or the tokens of one")
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: No | None = None
    best_of: One | None = None
    suffix: Literal[""] | None = None

    @property
    def one_prompt(self) -> str | tuple[int, ...]:
        """Return the one prompt as text or tokens."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        if isinstance(first, str):
            return first
        return tuple(first) if isinstance(first, list) else tuple(it for it in self.prompt if isinstance(it, int))

    @property
    def limit(self) -> int:
        return self.max_tokens or 16

    @property
    def num_top(self) -> int | None:
        return self.logprobs


def parse(model: type[A], body: bytes) -> A:
    """Return a body as a request.

    Raises:
        Refusal: 400 names the first field at fault.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


_BODIES = (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions, TextFormat)
_FIELDS = frozenset(name for body in _BODIES for name in body.model_fields)


def _refusal(error: ValidationError) -> Refusal:
    """Name the first field at fault; of several forms that it may have, the one that was nearest."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    field = faults[0]["loc"][:1]
    first = max((fault for fault in faults if fault["loc"][:1] == field), key=lambda fault: len(fault["loc"]))
    message = str(first["msg"]).removeprefix("Value error, ").encode("utf-8", "replace").decode()
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {message}", "invalid_json")
    if first["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in first["loc"])[:200]
        return Refusal(400, f"{where}: not served here; leave it out", "unsupported_parameter", where)
    # pydantic also puts the names of forms into the path, which no client knows
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in _FIELDS)
    return Refusal(400, f"{where}: {message}" if where else message, "invalid_value", where or None)
