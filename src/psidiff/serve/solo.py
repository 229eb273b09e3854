"""A sample that cannot share its steps: `generate` in a thread that waits for its turn.

Confident decoders, correctors, guidance on posteriors and autoregressive networks run like
this: one step, then it is somebody else's turn.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.infill import FREE
from ..generate import Made, generate
from ..request import Request
from ..sampling import Step
from ..types import Tokens
from .lanes import Frame
from .shaping import Bias, Biased

if TYPE_CHECKING:
    from ..model import Model


class _Stopped(Exception):
    """Nobody wants the sample any more."""


class Solo:
    """Sample `index` of a request. `advance` makes one step, `close` ends it early."""

    settles = True

    def __init__(self, model: Model, request: Request, index: int, bias: Bias) -> None:
        if bias:
            model = replace(model, denoiser=Biased(model.denoiser, bias))
        self.model, self.request, self.index = model, request, index
        self.done, self.passes = False, 0
        self.whole = torch.full((request.length,), FREE)
        self._frame: Frame | None = None
        self._error: Exception | None = None
        self._closed = False
        self._turn, self._over = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, name="psidiff-solo", daemon=True).start()

    def advance(self) -> None:
        self._turn.release()
        self._over.acquire()
        if self._error is not None:
            raise self._error

    @property
    def number(self) -> int:
        """Of the last step."""
        return self.frame().number

    def frame(self) -> Frame:
        assert self._frame is not None
        return self._frame

    def close(self) -> None:
        if not self.done:
            self._closed = True
            self._turn.release()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._closed:
                self._finish(
                    generate(self.model, self.request, self.index, 1, on_step=self._on_step)
                )
        except _Stopped:
            pass
        except Exception as error:
            self._error = error
        finally:
            self.done = True
            self._over.release()

    def _finish(self, made: Made) -> None:
        self.whole, self.passes = made.tokens[0].cpu(), round(made.nfe)

    def _on_step(self, i: int, step: Step, z: Tokens, route: Tensor) -> None:
        tokens = z[0].to("cpu", torch.int32, copy=True)
        made = self.model.prior is None  # left to right: what is there stays
        settled = int((tokens != FREE).long().cumprod(0).sum()) if made else 0
        self._frame = Frame(i, step, tokens, route[0].cpu(), settled)
        self._over.release()
        self._turn.acquire()
        if self._closed:
            raise _Stopped
