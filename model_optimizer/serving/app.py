"""The endpoints. FastAPI is imported when an app is built, so that the engine can be read without it."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from model_optimizer.release.version import package_version
from model_optimizer.serving.answers import AnswerForm, ChatCompletion, ChatForm, Piece, TextCompletion, TextForm
from model_optimizer.serving.faults import ErrorBody, Refusal
from model_optimizer.serving.requests import ChatRequest, CompletionRequest, parse
from model_optimizer.serving.service import Ask, Service
from model_optimizer.serving.streams import ClientLeft, EventStream, unless_client_leaves
from model_optimizer.serving.text import Turn

if TYPE_CHECKING:
    from fastapi import FastAPI

_CLIENT_LEFT = 499
"""What logs and metrics call a request whose client did not wait. Source: nginx's custom."""
_SEND_TIMEOUT_S = 30.0
"""For a client to take one piece of a stream."""
_ROLES = {"developer": "system"}
"""Roles under the names that chat templates know."""
_REFUSALS = (400, 401, 404, 408, 413, 415, 429, 503, 504)
_REFS = "#/components/schemas/{model}"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service, api_keys: frozenset[bytes]) -> "FastAPI":
    """Return the ASGI application; `api_keys` is empty where none is asked for."""
    from fastapi import FastAPI
    from fastapi.openapi.utils import get_openapi

    app = FastAPI(title="model-optimizer", version=package_version(), openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    _add_probes(app, service)
    _add_api(app, Endpoints(service, api_keys))

    async def openapi(request: Request) -> Response:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in (ChatRequest, CompletionRequest)]
            + [(model, "serialization") for model in (ChatCompletion, TextCompletion, ErrorBody)],
            ref_template=_REFS,
        )
        document["components"] = {"schemas": definitions["$defs"]}
        return JSONResponse(document)

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _routing_fault)
    app.add_exception_handler(Exception, _bug)
    return app


def _add_probes(app: "FastAPI", service: Service) -> None:
    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        if service.ready:
            return JSONResponse({"ready": True, "model": service.name})
        headers = {"Retry-After": str(service.active.keeper.retry_after_s)}
        return JSONResponse({"ready": False, "draining": service.draining}, 503, headers)

    async def metrics(request: Request) -> Response:
        service.observe()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, endpoint in {"/health": ready, "/v2/health/ready": ready, "/v2/health/live": live, "/metrics": metrics}.items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)


def _add_api(app: "FastAPI", endpoints: "Endpoints") -> None:
    for path, endpoint, asked, answered in (
        ("/v1/chat/completions", endpoints.chat, ChatRequest, ChatCompletion),
        ("/v1/completions", endpoints.complete, CompletionRequest, TextCompletion),
    ):
        app.add_api_route(
            path,
            endpoints.guarded(path, endpoint),
            methods=["POST"],
            response_model=None,
            operation_id=asked.__name__,
            responses={200: _content(answered.__name__), **{status: _content("ErrorBody") for status in _REFUSALS}},
            openapi_extra={"requestBody": {"required": True, **_content(asked.__name__)}},
        )
    for path, endpoint in (("/v1/models", endpoints.models), ("/v1/models/{model}", endpoints.model)):
        responses: dict[int | str, dict[str, object]] = {status: _content("ErrorBody") for status in (401, 404)}
        app.add_api_route(path, endpoints.guarded(path, endpoint), methods=["GET"], response_model=None, responses=responses)


def _content(schema: str) -> dict[str, object]:
    return {
        "description": schema,
        "content": {"application/json": {"schema": {"$ref": _REFS.format(model=schema)}}},
    }


class Endpoints:
    """The /v1 endpoints of one service."""

    def __init__(self, service: Service, api_keys: frozenset[bytes]):
        self._service = service
        self._api_keys = api_keys

    def guarded(self, path: str, endpoint: Handler) -> Handler:
        """Return an endpoint that asks for the key, counts its answers, and turns refusals into error objects."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await endpoint(request)
            except Refusal as refusal:
                response = _refused(refusal)
            except (ClientLeft, ClientDisconnect):
                response = Response(status_code=_CLIENT_LEFT)
            self._service.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return handle

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await self._body(request))
        turns = tuple(Turn(_ROLES.get(message.role, message.role), message.text) for message in asked.messages)
        ask = Ask(asked.model, turns, asked.limit, asked.stops, asked.temperature, asked.top_p, asked.seed, asked.num_top)
        form = ChatForm(self._service.name, self._fingerprint, asked.num_top is not None)
        return await self._answer(request, ask, form, stream=bool(asked.stream), usage=asked.wants_usage)

    async def complete(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await self._body(request))
        ask = Ask(
            asked.model, asked.one_prompt, asked.limit, asked.stops, asked.temperature, asked.top_p, asked.seed, asked.num_top
        )
        form = TextForm(self._service.name, self._fingerprint, asked.num_top is not None, asked.num_top or 0)
        return await self._answer(request, ask, form, stream=bool(asked.stream), usage=asked.wants_usage)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = str(request.path_params["model"])
        if not self._service.answers_to(name):
            raise Refusal(404, f"the model {name[:200]!r} is not served here; it is {self._service.name!r}", "model_not_found")
        return JSONResponse(self._card())

    @property
    def _fingerprint(self) -> str:
        source = self._service.active.source
        return f"{source.name}-{source.optimizer_hash[:12]}"

    def _card(self) -> dict[str, str | int]:
        active = self._service.active
        return {
            "id": self._service.name,
            "object": "model",
            "created": active.created,
            "owned_by": "model-optimizer",
            "root": active.source.name,
            "max_model_len": active.ready.max_model_len,
        }

    def _check_key(self, request: Request) -> None:
        if not self._api_keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        shown = key.strip().encode()
        # every key is compared, so that the time taken tells nothing
        matches = [hmac.compare_digest(shown, known) for known in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Refusal(401, "a valid API key is needed: send `Authorization: Bearer KEY`", "invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """Return a request's body; too large, too slow or of another type is refused."""
        limits = self._service.config.limits
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, f"the content type is {kind[:80]!r}; send application/json", "unsupported_media_type")
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.max_body_bytes:
                        message = f"the body is larger than {limits.max_body_bytes} bytes; send less"
                        raise Refusal(413, message, "body_too_large")
        except TimeoutError as error:
            raise Refusal(408, "the body did not arrive in time", "body_timeout") from error
        return bytes(body)

    async def _answer(self, request: Request, ask: Ask, form: AnswerForm, *, stream: bool, usage: bool) -> Response:
        pieces = self._service.answer(ask)
        if not stream:
            whole = await unless_client_leaves(request.receive, _collected(pieces))
            return Response(form.whole(whole), media_type="application/json")
        first = await unless_client_leaves(request.receive, _first(pieces))  # a refusal still gets its own status
        return EventStream(_events(first, pieces, form, usage=usage), _SEND_TIMEOUT_S)


async def _collected(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


async def _first(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], form: AnswerForm, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield one answer as server-sent events; a fault on the way is told as one and ends the stream."""
    async with aclosing(pieces):
        if (opening := form.opening()) is not None:
            yield _event(opening)
        piece = first
        yield _event(form.chunk(piece))
        try:
            async for piece in pieces:
                if piece.text or piece.scores or piece.finish:
                    yield _event(form.chunk(piece))
        except Refusal as refusal:
            yield _event(refusal.body())
            return
        if usage:
            yield _event(form.usage_chunk(piece))
        yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.body(), refusal.status, refusal.headers(), "application/json")


async def _routing_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"
    refusal = Refusal(error.status_code, f"{error.detail}: {request.method} is not served here; there are {known}", "not_found")
    return Response(refusal.body(), error.status_code, {**(error.headers or {}), **refusal.headers()}, "application/json")


async def _bug(request: Request, error: Exception) -> Response:
    return _refused(Refusal(500, "the server met a fault of its own; it was logged and other requests go on", "internal_error"))
