"""What a client is told when a request is not answered: an HTTP status and OpenAI's error object."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from model_optimizer.errors import ModelOptimizerError

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class Refusal(ModelOptimizerError):
    """A request that gets no answer, and why; `param` is the field at fault."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Return OpenAI's error object as JSON."""
        return ErrorBody(error=_Error(message=self.message, type=self._type, param=self.param, code=self.code)).json_bytes()

    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    @property
    def _type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """What every refused request is answered with."""

    model_config = ConfigDict(frozen=True)
    error: _Error

    def json_bytes(self) -> bytes:
        return self.model_dump_json().encode()


def engine_is_down(retry_after_s: int) -> Refusal:
    """Return what a client is told while no engine runs."""
    message = "the engine is not running; it is being started again: send the request again later"
    return Refusal(503, message, "engine_down", retry_after_s=retry_after_s)


def request_is_lost(message: str) -> Refusal:
    """Return what a client is told whose request an engine failed that goes on."""
    return Refusal(503, f"the engine failed this request: {message}; send it again", "engine_failed", retry_after_s=1)
