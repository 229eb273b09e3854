"""A server that listens: its socket, its words at the start, its end."""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console

from .app import create_app
from .settings import Settings

if TYPE_CHECKING:
    from ..model import Model


def run(console: Console, model: Model, settings: Settings, host: str, port: int) -> None:
    """Until somebody interrupts it."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    app = create_app(model, settings)
    with _listen(host, port) as listening:
        here = _address(host, listening.getsockname()[1])
        console.print(f"{settings.name}: [bold]{here}/[/] (a page)", highlight=False)
        console.print(f"OpenAI's API: [bold]{here}/v1[/]; Ctrl-C ends it", highlight=False)
        if settings.api_key is None and not _is_loopback(host):
            console.print("anybody who reaches this address may ask: --api-key sets a key")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen at {host}, port {port}: {reason}") from error


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
