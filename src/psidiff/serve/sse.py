"""Answers as OpenAI writes them: whole, or as server-sent events.

Text that is final comes as ordinary deltas. Where a client asks for `diffusion_drafts`, every
step comes too: `event: diffusion.start` once, then `event: diffusion.draft`. Their data have an
empty list of choices, so a client that does not look at names of events finds nothing in them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import torch

from ..data.codec import Codec
from ..html.replay import numbers_of, pieces
from ..types import FREE
from .errors import as_api_error, to_json
from .request_parsing import Prompt
from .responses import ResponseCollector, beside_loop, decode_text
from .samples import Update, windows_of

_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}
_OBJECTS = {  # of completions and of chats: their ids, a whole answer, a part of a stream
    False: ("cmpl", "text_completion", "text_completion"),
    True: ("chatcmpl", "chat.completion", "chat.completion.chunk"),
}


def whole_answer(making: ResponseCollector) -> dict[str, Any]:
    """An answer that is complete."""
    request = making.prompts[0].request
    return {
        **_head(making),
        "choices": [
            _choice(making, i, _said(making, each.text))
            for i, each in enumerate(making.choices)
        ],
        "usage": making.usage(),
        "diffusion": {
            "seed": request.seed,
            "sampler": str(request.sampler),
            "passes": making.passes,
        },
    }


class EventStream:
    """A response of server-sent events; if the client hangs up, `on_end` is called at once.

    seconds: until all of it is sent, however slowly the client reads.
    """

    def __init__(
        self,
        source: AsyncIterator[bytes],
        on_end: Callable[[], None],
        seconds: float,
        headers: dict[str, str],
    ) -> None:
        self.source = source
        self.on_end = on_end
        self.seconds = seconds
        self.headers: dict[str, str] = _HEADERS | headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await unless_gone(receive, self._send(send), self.seconds)
        finally:
            self.on_end()

    async def _send(self, send: Any) -> None:
        async for part in self.source:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # it is others' turn, however many parts there are
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(
    receive: Any, work: Awaitable[None], seconds: float | None = None
) -> bool:
    """Do it, unless the client hangs up or the time is over first; whether it was done."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({doing, gone}, timeout=seconds, return_when="FIRST_COMPLETED")
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        gone.cancel()
        doing.cancel()


async def _hung_up(receive: Any) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def events_of(making: ResponseCollector) -> AsyncIterator[bytes]:
    """An answer as it comes."""
    form, head = making.form, _head(making)
    if form.usage:
        head["usage"] = None  # until the last
    begun: set[int] = set()
    try:
        if form.drafts:
            start = await asyncio.to_thread(_start, making)
            yield _event({**head, "choices": [], "diffusion": start}, "start")
        drafts = [_Draft(making.codec, choice.prompt) for choice in making.choices]
        async for number, event, new in making.news():
            if isinstance(event, Update) and form.drafts:
                about = {**head, "choices": [], "index": number}
                drafting = partial(drafts[number].after, event, about)
                yield await beside_loop(len(event.tokens), drafting)
            if new or making.choices[number].reason:
                part = _part(making, new, first=number not in begun)
                begun.add(number)
                yield _event({**head, "choices": [_choice(making, number, part)]})
        if form.usage:
            yield _event({**head, "choices": [], "usage": making.usage()})
    except Exception as error:
        yield _event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


class _Draft:
    """What changed in a sample since the last draft that was sent."""

    def __init__(self, codec: Codec | None, prompt: Prompt) -> None:
        self.codec, self.row = codec, prompt.row
        self.tokens = torch.full_like(prompt.row.tokens, FREE - 1)  # all of them are new

    def after(self, frame: Update, about: dict[str, Any]) -> bytes:
        """The draft as text, and the tokens that were touched: places, ids, pieces, routes."""
        at = ((frame.route != 0) | (frame.tokens != self.tokens)).nonzero()[:, 0]
        self.tokens = frame.tokens
        ids = frame.tokens[at].tolist()
        made = frame.tokens[self.row.start : self.row.stop]
        draft = {
            "step": frame.number,
            "text": decode_text(self.codec, made[made != FREE]),
            "at": at.tolist(),
            "tokens": ids,
            "pieces": pieces(self.codec, ids),
            "routes": frame.route[at].tolist(),
        }
        return _event({**about, **draft}, "draft")


def _start(making: ResponseCollector) -> dict[str, Any]:
    """What is known before the first step: the plan, and of each choice what is given.

    The plan is that of one window, once: each window of each choice walks it.
    """
    request = making.prompts[0].request
    windows = {id(prompt): windows_of(prompt.request) for prompt in making.prompts}
    samples = []
    for choice, task in zip(making.choices, making.tasks, strict=True):
        row, labels = choice.row, task.request.labels
        samples.append(
            {
                "length": len(row.tokens),
                "answer": [row.start, row.stop],
                "given": row.given.int().tolist(),
                "label": None if labels is None else int(labels[task.index]),
                "windows": windows[id(choice.prompt)],
            }
        )
    about = {"seed": request.seed, "sampler": str(request.sampler)}
    plan = [numbers_of(step) for step in request.plan]
    return {**about, "plan": plan, "samples": samples}


def _head(making: ResponseCollector) -> dict[str, Any]:
    form = making.form
    prefix, *kinds = _OBJECTS[form.chat]
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kinds[form.stream],
        "created": int(time.time()),
        "model": form.model,
    }


def _said(making: ResponseCollector, text: str) -> dict[str, Any]:
    """The text of a choice that is complete."""
    if not making.form.chat:
        return {"text": text}
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _part(making: ResponseCollector, new: str, first: bool) -> dict[str, Any]:
    """What is new in a choice; who speaks is said once, at first."""
    if not making.form.chat:
        return {"text": new}
    if first:
        return {"delta": {"role": "assistant", "content": new, "refusal": None}}
    return {"delta": {"content": new} if new else {}}


def _choice(making: ResponseCollector, number: int, said: dict[str, Any]) -> dict[str, Any]:
    """A choice, or what is new in it; with the tokens, given ones among them, at its end."""
    made = making.choices[number]
    choice = {"index": number, **said, "logprobs": None, "finish_reason": made.reason}
    return choice | ({"diffusion": {"tokens": made.tokens}} if made.reason else {})


def _event(data: dict[str, Any], name: str | None = None) -> bytes:
    title = b"" if name is None else f"event: diffusion.{name}\n".encode()
    return title + b"data: " + to_json(data) + b"\n\n"
