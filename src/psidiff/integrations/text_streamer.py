"""Samples in the making, told to a streamer of transformers: put, put_draft, end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..sampling.plan import Step
from ..types import FREE

LogitsOf = Callable[[Tensor, Step], Tensor]


class Streaming:
    """An `on_step` of `Model.sample`.

    The prompt is put first, then every window when it is done. In between go drafts of the
    window as it is: as `value`, or as `logits` to streamers that take those; `logits_of` makes
    them. given (B, L) holds -1 where free.
    """

    def __init__(self, streamer: Any, given: Tensor, logits_of: LogitsOf) -> None:
        self.streamer, self.logits_of = streamer, logits_of
        self.drafts = hasattr(streamer, "put_draft")
        self.takes_logits = bool(getattr(streamer, "_takes_logits", False))
        self.begin = self.end = _made(given)
        streamer.put(given[:, : self.begin].cpu())

    def __call__(self, i: int, step: Step, tokens: Tensor, routes: Tensor) -> None:
        end = _made(tokens)
        if end > self.end > self.begin:  # another window: the one before is done
            self._commit(tokens)
        self.end = end
        if self.drafts and self.takes_logits:
            logits = self.logits_of(tokens[:, :end], step)
            self.streamer.put_draft(logits=logits[:, self.begin - end :].cpu())
        elif self.drafts:
            self.streamer.put_draft(value=tokens[:, self.begin : end].cpu())

    def finish(self, tokens: Tensor) -> None:
        self.end = tokens.shape[1]
        self._commit(tokens)
        self.streamer.end()

    def _commit(self, tokens: Tensor) -> None:
        self.streamer.put(tokens[:, self.begin : self.end].cpu())
        self.begin = self.end


def _made(tokens: Tensor) -> int:
    """How many positions from the left have a token in every sample."""
    free = torch.as_tensor(tokens == FREE).any(0).nonzero()[:, 0]
    return int(free[0]) if len(free) else tokens.shape[1]
