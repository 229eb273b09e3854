"""How many clients may be connected, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import Settings
from .errors import ApiError, to_json

_LEAST = 2**14  # bytes of an answer that a client reads in the time it has
_PIECES = 1024  # of a body, of whatever size; after these each has
_PIECE = 16  # bytes on the mean
_LINGER = 2.0  # seconds for the rest of a body that is answered already
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Pieces(h11.Connection):
    """Stops at a body that comes in chunks so small that reading them is all the work."""

    flooded: bool = False
    _count = _bytes = 0

    def next_event(self) -> Any:
        if self.flooded:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._count = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._count += 1
            self._bytes += len(event.data)
            self.flooded = self._count > _PIECES + self._bytes // _PIECE
        return event


class Connection(H11Protocol):
    """HTTP/1.1 that is closed where there are too many, or where nothing moves.

    A client has `stall` seconds for the headers of a request, and as long for each 16 KiB of
    an answer that it does not take. For bodies the app has a time of its own; who goes on with
    one after the answer, or sends it in tiny pieces, is cut off.
    """

    def __init__(self, settings: Settings, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most: int = settings.connections
        self.stall: float = settings.stall
        header_bytes = self.config.h11_max_incomplete_event_size or 2**16
        self.pieces: Pieces = Pieces(h11.SERVER, header_bytes)
        self.conn = self.pieces

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._moved = self.loop.time()  # idle; the answer was last taken from
        self._left = 0  # bytes that the client has not taken
        self._heard = False  # of a next request
        if len(self.connections) > self.most:
            transport.write(_full(self.most))
            transport.close()
            return
        _tune(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._underway and not self._heard:
            self._heard, self._since = True, self.loop.time()
        super().data_received(data)
        if self.pieces.flooded:
            self.transport.abort()

    def on_response_complete(self) -> None:
        self._heard, self._since = False, self.loop.time()
        super().on_response_complete()

    @property
    def _underway(self) -> bool:
        """A request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """Again and again: does anything move?"""
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        blocked = left > 0 and (self.flow.write_paused or not self._underway)
        if not blocked or left <= self._left - _LEAST:
            self._left, self._moved = left, now
        idle = not self._underway and (self.cycle is None or self._heard)
        patience = self.stall
        if not self._underway and self.conn.their_state is h11.SEND_BODY:
            idle, patience = True, min(self.stall, _LINGER)
        if now - self._moved > self.stall or (idle and now - self._since > patience):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(min(1.0, self.stall / 4), self._look)


def _full(most: int) -> bytes:
    error = ApiError(
        429, f"this server has {most} connections (--max-connections)", code="too_many"
    )
    body = to_json(error.body())
    head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1"
    return f"{head}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _tune(transport: Any) -> None:
    """Small parts of an answer leave at once, where asyncio does not see to it: the second of
    two would wait 40 ms. And the kernel asks now and then whether a silent client is there."""
    link = transport.get_extra_info("socket")
    if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
