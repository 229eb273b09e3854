"""A server that listens: its socket, its words at the start, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from .app import create_app
from .config import Settings
from .connections import Connection
from .hosts import is_loopback, names_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..model import Model


class Server(uvicorn.Server):
    """Tells running requests that it goes before it waits for their answers to end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: Any = self.config.app
        await asyncio.to_thread(app.state.engine.stop)
        await super().shutdown(sockets)


def run(
    model: Model,
    settings: Settings,
    host: str,
    port: int,
    listening: Callable[[str, bool], None],
) -> None:
    """Serve until somebody interrupts it.

    listening: called once the port is bound, with the server's URL and whether others than
    this machine may ask it without a key.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with _listen(host, port) as bound:
        address, port = bound.getsockname()[:2]
        names = names_of(host, settings.api_key, settings.hosts, address)
        app = create_app(model, settings, names)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        listening(url, settings.api_key is None and not is_loopback(address))
        gc.collect()
        gc.freeze()  # what is loaded stays: no request pays for a look at all of it
        Server(config_of(app, settings)).run(sockets=[bound])


def config_of(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn runs the app: with the limits of the settings."""
    connection: Any = partial(Connection, settings)
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        log_level="error",  # what clients do wrong they are told; the log is for our faults
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen at {host}, port {port}: {reason}") from error
