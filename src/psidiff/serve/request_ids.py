"""An id for each request, by which a client, a proxy and a log speak of the same one."""

from __future__ import annotations

import re
import uuid

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_OWN = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)


class RequestIds:
    """Answers each request with its id: the client's own, if it sent a plain one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = scope[HEADER]
            await send(message)

        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        own = Headers(scope=scope).get(HEADER, "")
        scope[HEADER] = own if _OWN.fullmatch(own) else f"req_{uuid.uuid4().hex}"
        await self.app(scope, receive, naming)


def with_request_id(scope: Scope, answer: Response) -> Response:
    """An answer to a failure, which is sent around the middleware."""
    if HEADER in scope:
        answer.headers[HEADER] = scope[HEADER]
    return answer
