"""Being asked to stop: the first SIGTERM or Ctrl-C is a question, a second one is not."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Stopping:
    """While it is entered, the first signal sets `asked`; after it signals do what they did
    before. `signal` is the one that asked, SIGTERM if it was another process's."""

    def __init__(self) -> None:
        self.asked = False
        self.signal: int = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # no other may listen
            for name in (signal.SIGTERM, signal.SIGINT):
                self._before[name] = signal.signal(name, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _hear(self, number: int, frame: Any) -> None:
        self.asked, self.signal = True, number
        self._restore()

    def _restore(self) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
