"""Answers as OpenAI writes them: whole, or as server-sent events.

Text that is final comes as ordinary deltas. Where a client asks for `diffusion_drafts`, every
step comes too: `event: diffusion.start` once, then `event: diffusion.draft`. Their data have an
empty list of choices, so a client that does not look at names of events finds nothing in them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.codec import Codec
from ..html.replay import pieces
from ..sampling import Step
from ..types import FREE
from .choices import Choice, readable
from .errors import ApiError, as_api_error, to_json
from .request_parsing import Asked
from .responses import Answer, beside_loop
from .samples import Frame, windows_of
from .schemas import SamplingBody


@dataclass(frozen=True)
class Form:
    """How an answer is to look, and how long it may take: what is kept of a body."""

    model: str
    stream: bool
    drafts: bool
    usage: bool
    seconds: float

    @classmethod
    def of(cls, body: SamplingBody, deadline: float) -> Form:
        stream = bool(body.stream)
        return cls(
            body.model,
            stream,
            stream and bool(body.diffusion_drafts),
            bool(body.stream_options and body.stream_options.include_usage),
            min(body.diffusion_deadline or deadline, deadline),
        )


Writer = Callable[[int, str, str | None], dict[str, Any]]  # choice, text, reason -> choice


def completion_answer(making: Answer, form: Form) -> dict[str, Any]:
    """Of /v1/completions."""
    choices = [
        {**_completion_choice(i, choice.text, choice.reason), "diffusion": _tokens(choice)}
        for i, choice in enumerate(making.choices)
    ]
    return _whole(making, form, "cmpl", "text_completion", choices)


def chat_answer(making: Answer, form: Form) -> dict[str, Any]:
    """Of /v1/chat/completions."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.reason,
            "diffusion": _tokens(choice),
        }
        for i, choice in enumerate(making.choices)
    ]
    return _whole(making, form, "chatcmpl", "chat.completion", choices)


def completion_stream(making: Answer, form: Form, codec: Codec | None) -> AsyncIterator[bytes]:
    """Of /v1/completions with stream."""
    return _stream(making, form, codec, "cmpl", "text_completion", _completion_choice)


def chat_stream(making: Answer, form: Form, codec: Codec | None) -> AsyncIterator[bytes]:
    """Of /v1/chat/completions with stream."""
    return _stream(making, form, codec, "chatcmpl", "chat.completion.chunk", _chat_choice)


class EventStream:
    """A response of server-sent events; if the client hangs up, `on_end` is called at once.

    seconds: until all of it is sent, however slowly the client reads.
    """

    def __init__(
        self, source: AsyncIterator[bytes], on_end: Callable[[], None], seconds: float
    ) -> None:
        self.source, self.on_end, self.seconds = source, on_end, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait(
                {sending, gone}, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if sending.done():
                sending.result()
        finally:
            self.on_end()
            gone.cancel()
            sending.cancel()

    async def _send(self, send: Any) -> None:
        async for part in self.source:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # it is others' turn, however many parts there are
        await send({"type": "http.response.body", "body": b""})


async def hung_up(receive: Any) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(
    making: Answer,
    form: Form,
    codec: Codec | None,
    prefix: str,
    kind: str,
    choice_of: Writer,
) -> AsyncIterator[bytes]:
    head = _head(form, prefix, kind)
    try:
        if form.drafts:
            start = await asyncio.to_thread(_start, making)
            yield _event({**head, "choices": [], "diffusion": start}, "start")
        drafts = [_Draft(codec, choice.asked) for choice in making.choices]
        async for number, event, new in making.news():
            if isinstance(event, Frame) and form.drafts:
                about = {**head, "choices": [], "index": number}
                drafting = partial(drafts[number].event_after, event, about)
                yield await beside_loop(len(event.tokens), drafting)
            reason = making.choices[number].reason
            if new or reason:
                choices = [choice_of(number, new, reason)]
                if reason:
                    choices[0]["diffusion"] = _tokens(making.choices[number])
                yield _event({**head, "choices": choices})
        if form.usage:
            yield _event({**head, "choices": [], "usage": making.usage()})
    except ApiError as error:
        yield _event(error.body())
    except Exception as error:
        yield _event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


class _Draft:
    """What changed in a sample since the last draft that was sent."""

    def __init__(self, codec: Codec | None, asked: Asked) -> None:
        self.codec, self.asked = codec, asked
        self.tokens: Tensor | None = None

    def event_after(self, frame: Frame, about: dict[str, Any]) -> bytes:
        return _event({**about, **self.after(frame)}, "draft")

    def after(self, frame: Frame) -> dict[str, Any]:
        """The draft as text, and the tokens that were touched: places, ids, pieces, routes."""
        touched = frame.route != 0
        if self.tokens is None:
            touched = torch.ones_like(touched)
        else:
            touched |= frame.tokens != self.tokens
        self.tokens = frame.tokens
        at = touched.nonzero()[:, 0]
        ids = frame.tokens[at].tolist()
        made = frame.tokens[self.asked.start : self.asked.stop]
        return {
            "step": frame.number,
            "text": readable(self.codec, made[made != FREE]),
            "at": at.tolist(),
            "tokens": ids,
            "pieces": pieces(self.codec, ids),
            "routes": frame.route[at].tolist(),
        }


def _start(making: Answer) -> dict[str, Any]:
    """What is known before the first step: the plan, and of each choice what is given.

    The plan is that of one window, once: each window of each choice walks it.
    """
    windows = {id(asked): windows_of(asked.request) for asked in making.asked}
    return {
        "seed": making.asked[0].request.seed,
        "sampler": str(making.asked[0].request.sampler),
        "plan": _plan(making.asked[0]),
        "samples": [
            {
                "length": choice.asked.request.length,
                "answer": [choice.asked.start, choice.asked.stop],
                "given": choice.asked.given.int().tolist(),
                "label": _label(choice.asked, task.index),
                "windows": windows[id(choice.asked)],
            }
            for choice, task in zip(making.choices, making.tasks, strict=True)
        ],
    }


def _plan(asked: Asked) -> list[list[float | None]]:
    """t, alpha_t, alpha_s and kappa of each step; left to right each place is one."""
    n = asked.request.window
    left_to_right: list[list[float | None]] = [
        [1 - i / n, i / n, (i + 1) / n, 1.0] for i in range(n)
    ]
    return [_numbers(step) for step in asked.request.steps] or left_to_right


def _numbers(step: Step) -> list[float | None]:
    return [step.t, step.alpha_t, step.alpha_s, None if callable(step.kappa) else step.kappa]


def _label(asked: Asked, index: int) -> int | None:
    return None if asked.request.labels is None else int(asked.request.labels[index])


def _whole(
    making: Answer, form: Form, prefix: str, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    request = making.asked[0].request
    return {
        **_head(form, prefix, kind),
        "choices": choices,
        "usage": making.usage(),
        "diffusion": {
            "seed": request.seed,
            "sampler": str(request.sampler),
            "passes": making.passes,
        },
    }


def _head(form: Form, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": form.model,
    }


def _completion_choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}


def _chat_choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text}
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}


def _tokens(choice: Choice) -> dict[str, Any]:
    """All tokens of a sample, those that were given among them."""
    return {"tokens": choice.tokens}


def _event(data: dict[str, Any], name: str | None = None) -> bytes:
    title = b"" if name is None else f"event: diffusion.{name}\n".encode()
    return title + b"data: " + to_json(data) + b"\n\n"
