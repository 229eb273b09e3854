"""Being asked to stop: the first SIGTERM or Ctrl-C is a question, a second one is not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class StopRequested(Exception):
    """Work was left undone because a signal asked to stop."""


class StopSignal:
    """While it is entered, the first signal sets `asked` and calls `on_ask`; after it signals
    do what they did before. `signal` is the one that asked, SIGTERM if it was another
    process's."""

    def __init__(self, on_ask: Callable[[], None] | None = None) -> None:
        self.asked: bool = False
        self.on_ask = on_ask
        self.signal: int = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # no other may listen
            for name in (signal.SIGTERM, signal.SIGINT):
                self._before[name] = signal.signal(name, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def check(self) -> None:
        """For work that may be left undone: go on, or leave it."""
        if self.asked:
            raise StopRequested

    def _on_signal(self, number: int, frame: Any) -> None:
        self.asked = True
        self.signal = number
        self._restore()
        if self.on_ask is not None:
            self.on_ask()

    def _restore(self) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
