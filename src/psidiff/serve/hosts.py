"""By which names a server may be called.

A page of a stranger can point a name of its own at 127.0.0.1 and then ask a server there as if
it were its own (DNS rebinding). The Host header tells: it has the stranger's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, answer_error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen at."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(
    host: str, api_key: str | None, allowed: Collection[str], address: str | None = None
) -> frozenset[str] | None:
    """The names that are answered; None where any is.

    Without a key a server on loopback trusts whoever reaches it, so it answers to its own
    names alone. Elsewhere names are checked where somebody gave some.

    address: what `host` turned out to be: 127.1 and many a name of this machine are loopback.
    """
    if not allowed and (api_key is not None or not is_loopback(address or host)):
        return None
    return frozenset(name.lower().rstrip(".") for name in ("localhost", host, *allowed))


class Hosts:
    """Refuses requests for other names. An address in digits is nobody's name, and passes."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            said = next((v for k, v in scope["headers"] if k == b"host"), b"").decode("latin1")
            if not self._answers(said):
                error = ApiError(
                    403,
                    f"this server is not called {said[:99]!r}: ask localhost or its address, "
                    "or start it with --allow-host",
                    code="host_not_allowed",
                )
                await answer_error(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _answers(self, said: str) -> bool:
        name = _without_port(said).lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True


def _without_port(said: str) -> str:
    if said.startswith("["):
        return said[1:].partition("]")[0]
    name, _, port = said.rpartition(":")
    return name if name and port.isdecimal() else said
