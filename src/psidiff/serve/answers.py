"""From the engine's thread to a client: the samples of one HTTP request as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from .asked import Asked
from .choices import Choice, usage
from .engine import Engine
from .errors import ApiError
from .lanes import Frame
from .task import Event, Finished, Task, Tell

_FRAMES = 512  # that wait for a slow client; older ones make way


class Outbox:
    """Events of all samples of a request, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Event]] = deque()
        self._ready = asyncio.Event()

    def teller(self, number: int) -> Tell:
        """What sample `number` is told with, from another thread."""

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._put, number, event)

        return tell

    async def get(self) -> tuple[int, Event]:
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()

    def _put(self, number: int, event: Event) -> None:
        self._items.append((number, event))
        if len(self._items) > _FRAMES:
            oldest = next((i for i in self._items if isinstance(i[1], Frame)), None)
            if oldest is not None:
                self._items.remove(oldest)
        self._ready.set()


class Answer:
    """The choices of a request in the making. `begin` first; `cancel` in any case last."""

    def __init__(
        self,
        engine: Engine,
        codec: Any,
        asked: Sequence[Asked],
        seconds: float,
        streams: bool = False,
        drafts: bool = False,
    ) -> None:
        self.engine, self.asked = engine, asked
        self.outbox = Outbox()
        self.choices: list[Choice] = []
        self.tasks: list[Task] = []
        self.passes = 0
        self._first: list[tuple[int, Event]] = []
        now = time.monotonic()
        for each in asked:
            for index in range(each.request.num_samples):
                tell = self.outbox.teller(len(self.tasks))
                self.choices.append(Choice(codec, each))
                self.tasks.append(
                    Task(
                        each.request,
                        index,
                        each.shaping,
                        tell,
                        drafts,
                        streams or len(each.request.starts) > 1,
                        now + seconds,
                        begun=now,
                    )
                )

    async def begin(self) -> None:
        """Into the queue, and wait for a first sign: what fails at once is an error still."""
        self.engine.submit(self.tasks)
        number, event = await self.outbox.get()
        if isinstance(event, ApiError):
            raise event
        self._first.append((number, event))

    async def news(self) -> AsyncIterator[tuple[int, Event, str]]:
        """Each event, and what its sample's text gained by it."""
        going = set(range(len(self.tasks)))
        while going:
            number, event = self._first.pop() if self._first else await self.outbox.get()
            if isinstance(event, ApiError):
                raise event
            if number not in going:
                continue
            choice = self.choices[number]
            if isinstance(event, Finished):
                self.passes += event.passes
                new = choice.grow(event.tokens, len(event.tokens), last=True)
            else:
                new = choice.grow(event.tokens, event.settled)
            if choice.reason is not None:  # perhaps before the sample is whole
                self.tasks[number].cancel()
                going.discard(number)
            yield number, event, new

    async def finish(self) -> None:
        async for _ in self.news():
            pass

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def usage(self) -> dict[str, int]:
        return usage(self.asked, self.choices)
