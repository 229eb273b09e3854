"""How many bytes of bodies the server holds at a time, over all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import ApiError


class InFlight:
    """Bytes of bodies that are being read or understood: at most so many."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

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
