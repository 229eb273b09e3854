"""Mistakes in the shape OpenAI's clients know: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Response

NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat a 408 unless told so
_LONGEST = 500  # characters of a message, whatever it repeats
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200: its status, one sentence, and the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """A wrong value is the client's; all else is ours, and the client need not see it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says how")


@contextmanager
def errors_for_field(param: str | None) -> Iterator[None]:
    """A wrong value that is found meanwhile is this field's."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param) from error


def to_json(data: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair becomes a question mark."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def answer_error(error: ApiError) -> Response:
    return answer(error.body(), error.status, error.headers)
