"""From the engine's thread to a client: the samples of one HTTP request as they come, and their
text as it becomes certain: what was said is never taken back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from ..data.codec import Codec
from ..generate import until_end
from .engine import Engine
from .errors import ApiError
from .request_parsing import Prompt
from .rows import Row
from .samples import Update
from .schemas import ChatBody, SamplingBody
from .turns import Event, Finished, Task

_PARTIAL = "\ufffd"  # the bytes of a character that is not whole yet
_FRAMES = 2**20  # bytes of frames that wait for a slow client; older ones make way
_LONG = 512  # tokens of a sample whose text is made in a thread
_texts = ThreadPoolExecutor(1, "psidiff-text")
T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """How an answer is to look, and how long it may take: what is kept of a body.

    ignored: fields of the body that had no effect.
    """

    model: str
    chat: bool
    stream: bool
    drafts: bool
    usage: bool
    seconds: float
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: SamplingBody, deadline: float) -> Form:
        stream = bool(body.stream)
        return cls(
            body.model,
            isinstance(body, ChatBody),
            stream,
            stream and bool(body.diffusion_drafts),
            bool(body.stream_options and body.stream_options.include_usage),
            min(body.diffusion_deadline or deadline, deadline),
            body._ignored,
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"x-psidiff-ignored": ", ".join(self.ignored)} if self.ignored else {}


async def beside_loop(length: int, work: Callable[[], T]) -> T:
    """Do it here for a short sample, in a thread for a long one: others do not wait for it."""
    if length <= _LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_texts, work)


class EventQueue:
    """Events of all samples of a request, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Event]] = deque()
        self._ready = asyncio.Event()
        self._bytes = 0

    def put(self, number: int, event: Event) -> None:
        """What sample `number` is told, from another thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._put, number, event)

    async def get(self) -> tuple[int, Event]:
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        number, event = self._items.popleft()
        self._bytes -= _size(event)
        return number, event

    def _put(self, number: int, event: Event) -> None:
        self._items.append((number, event))
        self._bytes += _size(event)
        while self._bytes > _FRAMES and len(self._items) > 1:
            oldest = next(i for i, (_, e) in enumerate(self._items) if isinstance(e, Update))
            self._bytes -= _size(self._items[oldest][1])
            del self._items[oldest]
        self._ready.set()


def _size(event: Event) -> int:
    """Bytes of a frame, with what is around its tensors; what is no frame stays anyway."""
    return 2048 + event.tokens.nbytes + event.route.nbytes if isinstance(event, Update) else 0


class ResponseCollector:
    """The choices of a request in the making. `begin` first; `cancel` in any case last."""

    def __init__(
        self, engine: Engine, codec: Codec | None, prompts: Sequence[Prompt], form: Form
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.prompts = prompts
        self.form = form
        self.outbox: EventQueue = EventQueue()
        self.passes: int = 0
        self._first: list[tuple[int, Event]] = []
        now = time.monotonic()
        samples = [(each, i) for each in prompts for i in range(each.request.num_samples)]
        self.choices: list[Choice] = [Choice(codec, prompt) for prompt, _ in samples]
        self.tasks: list[Task] = [
            Task(
                prompt.request,
                index,
                partial(self.outbox.put, number),
                prompt.bias,
                form.drafts,
                form.stream or len(prompt.request.starts) > 1,
                now + form.seconds,
                begun=now,
            )
            for number, (prompt, index) in enumerate(samples)
        ]

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
            choice, last = self.choices[number], isinstance(event, Finished)
            if isinstance(event, Finished):
                self.passes += event.passes
                settled = len(event.tokens)
            else:
                settled = event.settled
            growing = partial(choice.grow, event.tokens, settled, last=last)
            new = await beside_loop(len(event.tokens), growing)
            if choice.reason is not None:  # perhaps before the sample is whole
                self.tasks[number].cancel()
                going.discard(number)
            yield number, event, new

    async def finish(self) -> None:
        """All of it."""
        await self.begin()
        async for _ in self.news():
            pass

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def usage(self) -> dict[str, int]:
        """Tokens that came, tokens that were made."""
        came = sum(int(prompt.row.given.sum()) for prompt in self.prompts)
        made = sum(choice.made for choice in self.choices)
        return {"prompt_tokens": came, "completion_tokens": made, "total_tokens": came + made}


class Choice:
    """One sample of one prompt. `grow` gives what is new; `reason` says why it ended.

    "length" is for an answer that could go on: a puzzle, an image, a text between others is
    whole, "stop".
    """

    def __init__(self, codec: Codec | None, prompt: Prompt) -> None:
        self.codec = codec
        self.prompt = prompt
        self.row: Row = prompt.row
        self.text: str = ""
        self.made: int = 0
        self.reason: str | None = None
        self.tokens: list[int] = []

    @cached_property
    def _front(self) -> str:
        """The text before the answer, which is given."""
        return decode_text(self.codec, self.row.tokens[: self.row.start])

    def grow(self, tokens: Tensor, settled: int, last: bool = False) -> str:
        """The part of the text that is certain since the first `settled` tokens are."""
        if self.reason is not None:
            return ""
        end = self.codec.end_id if self.codec and self.row.open_ended else None
        row = tokens[self.row.start : min(settled, self.row.stop)]
        row, ended = until_end(row, end, prompted=self.row.start > 0)
        front = self._front
        text = decode_text(self.codec, torch.cat((tokens[: self.row.start], row)))
        text = text[len(front) :] if text.startswith(front) else decode_text(self.codec, row)
        text = text.removeprefix(self.row.before)
        stops = [at for stop in self.prompt.stops if (at := text.find(stop)) >= 0]
        cut = text[: min(stops, default=len(text))]
        if not (stops or ended or last):
            cut = self._held_back(cut)
        if stops or ended:
            self.reason = "stop"
        elif last:
            self.reason = "length" if self.row.open_ended else "stop"
        inside = int(self.row.given[self.row.start : self.row.stop].sum())
        self.tokens, self.made = tokens.tolist(), max(len(row) - inside, 0)
        new, self.text = cut[len(self.text) :], self.text + cut[len(self.text) :]
        return new

    def _held_back(self, text: str) -> str:
        """Without an ending that may turn out to be half a character, or open a stop."""
        text = text.rstrip(_PARTIAL)
        opening = 0
        for stop in self.prompt.stops:
            longest = min(len(stop) - 1, len(text))
            fits = (k for k in range(longest, 0, -1) if text.endswith(stop[:k]))
            opening = max(opening, next(fits, 0))
        return text[: len(text) - opening]


def decode_text(codec: Codec | None, tokens: Tensor) -> str:
    """Text where the codec knows it, else the numbers of the tokens."""
    if codec is None or codec.kind == "image":
        return " ".join(map(str, tokens.tolist()))
    if codec.kind == "puzzle":
        return codec.decode(tokens) if len(tokens) == codec.length else ""
    return codec.decode(tokens)
