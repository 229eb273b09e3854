"""The server: OpenAI's paths, health, metrics and the page, around one engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..html import template
from ..html.replay import about_codec
from ..sampling import PRESETS
from .body_reader import read_body
from .config import Settings
from .engine import Engine
from .errors import ApiError, answer, answer_error, as_api_error, errors_for_field
from .hosts import Hosts
from .metrics import Metrics
from .openapi import docs_page, openapi
from .request_ids import RequestIds, with_request_id
from .request_parsing import Prompt, parse_request
from .responses import Form, ResponseCollector
from .schemas import ChatBody, CompletionBody, SamplingBody
from .sse import EventStream, events_of, unless_gone, whole_answer

if TYPE_CHECKING:
    from ..model import Model

_PAGE = {
    "content-security-policy": "default-src 'none'; img-src data: blob:; connect-src 'self'; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def create_app(
    model: Model, settings: Settings, names: Collection[str] | None = None
) -> FastAPI:
    """An ASGI app; its engine lives as long as the app's lifespan.

    names: in a Host header, that it answers to; None for any.
    """
    metrics = Metrics()
    engine = Engine(model, settings.batch, settings.queue, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    handlers: Any = dict.fromkeys((ApiError, HTTPException, Exception), _on_error)
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers)
    app.state.engine, app.state.metrics = engine, metrics
    paths = Routes(model, settings, engine, metrics).join(app)
    if names is not None:
        app.add_middleware(Hosts, names=names)
    app.add_middleware(MetricsMiddleware, metrics=metrics, paths=paths)
    app.add_middleware(RequestIds)
    return app


class Routes:
    """What is answered to whom."""

    def __init__(
        self, model: Model, settings: Settings, engine: Engine, metrics: Metrics
    ) -> None:
        self.model = model
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.created: int = int(time.time())
        self.in_flight: InFlight = InFlight(settings.in_flight)
        self.reader: ThreadPoolExecutor = ThreadPoolExecutor(1, "psidiff-bodies")

    def join(self, app: FastAPI) -> set[str]:
        """All paths, each by hand: bodies are read here, not by the framework."""
        app.add_route("/", partial(self.page, "psidiff.serve", "page.html", "text/html"))
        # the page of a recorded run without its data, for the first one to fill in
        replay = partial(self.page, "psidiff.html", "replay.html", "text/plain")
        app.add_route("/replay.html", replay)
        app.add_route("/openapi.json", self.description)
        app.add_route("/docs", self.documentation)
        app.add_route("/health", self.health)
        app.add_route("/metrics", self.counts)
        app.add_route("/v1/models", self.models)
        app.add_route("/v1/models/{name:path}", self.one_model)
        for path, kind in (("completions", CompletionBody), ("chat/completions", ChatBody)):
            app.add_route(f"/v1/{path}", partial(self.generate, kind), methods=["POST"])
        return {getattr(route, "path", "") for route in app.routes}

    async def page(self, package: str, name: str, kind: str, request: Request) -> Response:
        return Response(template(package, name), media_type=kind, headers=_PAGE)

    async def description(self, request: Request) -> Response:
        return answer(openapi())

    async def documentation(self, request: Request) -> Response:
        return Response(docs_page(), media_type="text/html", headers=_PAGE)

    async def health(self, request: Request) -> Response:
        if self.settings.private_health:
            self._check_key(request)
        well = self.engine.alive
        state = {
            "status": "ok" if well else "the engine has stopped",
            "version": __version__,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
        }
        return answer(state, 200 if well else 503)

    async def counts(self, request: Request) -> Response:
        if self.settings.private_metrics:
            self._check_key(request)
        there = {"samples_running": self.engine.running, "samples_waiting": self.engine.waiting}
        return Response(self.metrics.text(**there), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return answer({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_name(request.path_params["name"])
        return answer(self._card())

    async def generate(self, kind: type[SamplingBody], request: Request) -> Any:
        form, prompts = await self._parse(kind, request)
        making = ResponseCollector(self.engine, self.model.codec, prompts, form)
        try:
            work = making.begin() if form.stream else making.finish()
            if not await unless_gone(request.receive, work):
                raise ApiError(499, "the client hung up", code="client_gone")
        except BaseException:
            making.cancel()
            raise
        if form.stream:
            seconds = form.seconds + self.settings.stall
            return EventStream(events_of(making), making.cancel, seconds, form.headers)
        return answer(whole_answer(making), headers=form.headers)

    async def _parse(
        self, kind: type[SamplingBody], request: Request
    ) -> tuple[Form, list[Prompt]]:
        """What the body asks for. Bodies are read in a thread, one after the other: others are
        answered meanwhile."""
        self._check_key(request)
        if "json" not in request.headers.get("content-type", "").partition(";")[0]:
            raise ApiError(415, "the Content-Type of the body must be application/json")
        with self.in_flight.bytes() as more:
            raw = await self._raw(request, more)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.reader, self._read, kind, raw)

    def _read(self, kind: type[SamplingBody], raw: bytes) -> tuple[Form, list[Prompt]]:
        body = read_body(kind, raw, self.settings)
        self._check_name(body.model)
        with errors_for_field(None):
            prompts = parse_request(self.model, body, self.settings)
        return Form.of(body, self.settings.deadline), prompts

    async def _raw(self, request: Request, more: Callable[[int], None]) -> bytes:
        """All of the body, unless it is too large or too slow. more: is told of each part."""
        most, raw = self.settings.body, bytearray()
        said = request.headers.get("content-length", "0")
        too_large = ApiError(413, f"a request may have {most} bytes (--max-body)")
        if said.isdecimal() and (len(said) > 15 or int(said) > most):
            raise too_large
        try:
            async with asyncio.timeout(self.settings.stall):
                async for part in request.stream():
                    if len(raw) + len(part) > most:
                        raise too_large
                    more(len(part))
                    raw += part
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time (--stall)") from None
        except ClientDisconnect:
            raise ApiError(499, "the client hung up", code="client_gone") from None
        return bytes(raw)

    def _check_key(self, request: Request) -> None:
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
        **about_codec(codec),
        "length": model.length,
        "classes": names if classes else [],
        "prior": None if model.prior is None else type(model.prior).__name__.lower(),
        "kappa": model.config.recommended_kappa,
        "presets": list(PRESETS),
        "steps": settings.steps,
        "chat": bool(model.config.chat_template),
        "limits": {
            "steps": settings.most_steps,
            "length": settings.length,
            "samples": settings.samples,
            "windows": settings.windows,
            "work": settings.work,
        },
    }


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        words = {404: f"there is no {request.url.path[:99]} here"}
        words[405] = f"{request.url.path[:99]} is not for {request.method}"
        said = words.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, said, headers=dict(error.headers or {}))
    if not isinstance(error, ApiError):  # its traceback is in the log
        error = as_api_error(RuntimeError())
    return with_request_id(request.scope, answer_error(error))


class InFlight:
    """Bytes of bodies that are being read or understood: at most so many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: int = 0

    @contextmanager
    def bytes(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes as they come; all are given back at the end."""
        taken = 0

        def more(count: int) -> None:
            nonlocal taken
            if self.held + count > self.most:
                raise ApiError(
                    429,
                    f"the requests that are being read have {self.most:,} bytes together "
                    "(--max-in-flight): try again in a moment",
                    code="too_many_bytes",
                    headers={"retry-after": "1"},
                )
            self.held += count
            taken += count

        try:
            yield more
        finally:
            self.held -= taken


class MetricsMiddleware:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.count("requests_total", path=path, status=str(message["status"]))
            await send(message)

        await self.app(scope, receive, counting if scope["type"] == "http" else send)
