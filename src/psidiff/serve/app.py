"""The server: OpenAI's paths, health, metrics and the page, around one engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..html import template
from ..html.replay import size_of
from ..sampling import PRESETS
from .bodies import InFlight
from .chat_template import has_template
from .config import Settings
from .engine import Engine
from .errors import ApiError, answer, answer_error, as_api_error
from .hosts import Hosts
from .metrics import Metrics
from .request_parsing import Asked, asked_of
from .responses import Answer
from .schemas import ChatBody, CompletionBody, SamplingBody, read_body
from .sse import (
    EventStream,
    Form,
    chat_answer,
    chat_stream,
    completion_answer,
    completion_stream,
    hung_up,
)

if TYPE_CHECKING:
    from ..model import Model

_PATHS = ("/", "/replay.html", "/health", "/metrics", "/v1/models")
_POSTS = ("/v1/completions", "/v1/chat/completions")
_PAGE = {
    "content-security-policy": "default-src 'none'; img-src data: blob:; connect-src 'self'; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def create_app(
    model: Model, settings: Settings | None = None, names: Collection[str] | None = None
) -> FastAPI:
    """An ASGI app; its engine lives as long as the app's lifespan.

    names: in a Host header, that it answers to; None for any.
    """
    settings = settings or Settings(model.config.name or "model")
    metrics = Metrics()
    engine = Engine(model, settings.batch, settings.queue, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.state.engine, app.state.metrics = engine, metrics
    if names is not None:
        app.add_middleware(Hosts, names=names)
    app.add_middleware(Counted, metrics=metrics)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    Routes(model, settings, engine, metrics).join(app)
    return app


class Routes:
    """What is answered to whom."""

    def __init__(
        self, model: Model, settings: Settings, engine: Engine, metrics: Metrics
    ) -> None:
        self.model, self.settings = model, settings
        self.engine, self.metrics = engine, metrics
        self.created = int(time.time())
        self.in_flight = InFlight(settings.in_flight)
        self.reader = ThreadPoolExecutor(1, "psidiff-bodies")

    def join(self, app: FastAPI) -> None:
        """Each path by hand: bodies are read here, not by the framework."""
        gets: dict[str, Callable[..., Awaitable[Response]]] = {
            "/": self.page,
            "/replay.html": self.replay,
            "/health": self.health,
            "/metrics": self.numbers,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.one_model,
        }
        for path, endpoint in gets.items():
            app.add_route(path, endpoint, methods=["GET"])
        app.add_route("/v1/completions", self.complete, methods=["POST"])
        app.add_route("/v1/chat/completions", self.chat, methods=["POST"])

    async def page(self, request: Request) -> Response:
        text = template("psidiff.serve", "page.html")
        return Response(text, media_type="text/html", headers=_PAGE)

    async def replay(self, request: Request) -> Response:
        """The page of a recorded run without its data, for the page to fill in."""
        text = template("psidiff.html", "replay.html")
        return Response(text, media_type="text/plain", headers=_PAGE)

    async def health(self, request: Request) -> Response:
        if self.settings.private_health:
            self._let_in(request)
        well = self.engine.alive
        state: dict[str, Any] = {
            "status": "ok" if well else "the engine has stopped",
            "version": __version__,
        }
        state |= {"running": self.engine.running, "waiting": self.engine.waiting}
        return answer(state, 200 if well else 503)

    async def numbers(self, request: Request) -> Response:
        if self.settings.private_metrics:
            self._let_in(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self._let_in(request)
        return answer({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        self._let_in(request)
        self._check_name(request.path_params["name"])
        return answer(self._card())

    async def complete(self, request: Request) -> Any:
        form, asked = await self._asked(CompletionBody, request)
        return await self._answer(request, form, asked, completion_answer, completion_stream)

    async def chat(self, request: Request) -> Any:
        form, asked = await self._asked(ChatBody, request)
        return await self._answer(request, form, asked, chat_answer, chat_stream)

    async def _answer(
        self, request: Request, form: Form, asked: list[Asked], as_whole: Any, as_stream: Any
    ) -> Any:
        making = Answer(
            self.engine, self.model.codec, asked, form.seconds, form.stream, form.drafts
        )
        try:
            if form.stream:
                await unless_gone(request, making.begin())
                source = as_stream(making, form, self.model.codec)
                return EventStream(source, making.cancel, form.seconds + self.settings.stall)
            await unless_gone(request, _all_of(making))
            return answer(as_whole(making, form))
        except BaseException:
            making.cancel()
            raise

    async def _asked(
        self, kind: type[SamplingBody], request: Request
    ) -> tuple[Form, list[Asked]]:
        """What the body asks for. Bodies are read in a thread, one after the other: others are
        answered meanwhile."""
        self._let_in(request)
        if "json" not in request.headers.get("content-type", "").partition(";")[0]:
            raise ApiError(415, "the Content-Type of the body must be application/json")
        with self.in_flight.bytes() as more:
            raw = await self._raw(request, more)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.reader, self._read, kind, raw)

    def _read(self, kind: type[SamplingBody], raw: bytes) -> tuple[Form, list[Asked]]:
        body = read_body(kind, raw, self.settings)
        self._check_name(body.model)
        try:
            return Form.of(body, self.settings.deadline), asked_of(
                self.model, body, self.settings
            )
        except ValueError as error:
            raise as_api_error(error) from error

    async def _raw(self, request: Request, more: Callable[[int], None]) -> bytes:
        """All of the body, unless it is too large or too slow. more: is told of each part."""
        most, parts = self.settings.body, []
        size, said = 0, request.headers.get("content-length", "0")
        if said.isdecimal() and (len(said) > 15 or int(said) > most):
            raise ApiError(413, f"a request may have {most} bytes (--max-body)")
        try:
            async with asyncio.timeout(self.settings.stall):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise ApiError(413, f"a request may have {most} bytes (--max-body)")
                    more(len(part))
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time (--stall)") from None
        except ClientDisconnect:
            raise ApiError(499, "the client hung up", code="client_gone") from None
        return b"".join(parts)

    def _let_in(self, request: Request) -> None:
        key = self.settings.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        fits = secrets.compare_digest(given.strip().encode(), (key or "").encode())
        if key is not None and not (fits and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "this server wants its API key: Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    def _check_name(self, name: str) -> None:
        if name != self.settings.name:
            raise ApiError(
                404,
                f"there is no model {name[:99]!r} here; this server has {self.settings.name!r}",
                "model",
                "model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self.created,
            "owned_by": "psidiff",
            "diffusion": about_model(self.model, self.settings),
        }


def about_model(model: Model, settings: Settings) -> dict[str, Any]:
    """What the page, or a curious client, wants to know of a model."""
    codec, classes = model.codec, model.num_classes
    names = [] if codec is None else list(codec.classes)
    names = names or [str(i) for i in range(classes or 0)]
    return {
        "kind": "numbers" if codec is None else codec.kind,
        "length": model.length,
        "vocabulary": None if codec is None else codec.vocab_size,
        "size": size_of(codec),
        "classes": names if classes else [],
        "prior": None if model.prior is None else type(model.prior).__name__.lower(),
        "kappa": model.config.recommended_kappa,
        "presets": list(PRESETS),
        "steps": settings.steps,
        "chat": has_template(model),
        "limits": {
            "steps": settings.most_steps,
            "length": settings.length,
            "samples": settings.samples,
            "windows": settings.windows,
            "work": settings.work,
        },
    }


async def _all_of(making: Answer) -> None:
    await making.begin()
    await making.finish()


async def unless_gone(request: Request, work: Any) -> None:
    """Do it, unless the client hangs up first."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client hung up", code="client_gone")
        doing.result()
    finally:
        gone.cancel()
        doing.cancel()


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        words = {404: f"there is no {request.url.path[:99]} here"}
        words[405] = f"{request.url.path[:99]} is not for {request.method}"
        said = words.get(error.status_code, str(error.detail))
        return answer_error(
            ApiError(error.status_code, said, headers=dict(error.headers or {}))
        )
    if isinstance(error, ApiError):
        return answer_error(error)
    return answer_error(as_api_error(RuntimeError()))  # its traceback is in the log


class Counted:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in (*_PATHS, *_POSTS) else "other"
                self.metrics.count("requests_total", path=path, status=str(message["status"]))
            await send(message)

        await self.app(scope, receive, counting if scope["type"] == "http" else send)
