"""Correction at a fixed level: redraw a few tokens from what all the others say of them.

p_s(z^l | z without l) = alpha_s x_theta + (1 - alpha_s) pi for a leave-one-out denoiser. One
token at a time, chosen without looking at it, leaves p_s as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose
from ..types import as_count, check_choice
from .step import LogitSource, OutputBuilder, StepOutput
from .step_batch import StepBatch


@dataclass(frozen=True)
class Corrector:
    """Redraw tokens at a fixed level, after every step but the last.

    Args:
        sweeps: passes after each step.
        size: about how many tokens a pass redraws.
        select: "random" takes `size` free positions at random; "uncertain" takes each with
            chance
            size/n times (1 - max x_theta) K/(K-1), which depends on the other tokens only.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.sampling import Constant, Corrector, plan, sample
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> steps = plan(4, LogLinear(), Constant(1.0))
        >>> sample(denoiser, Uniform(5), steps, (1, 6), corrector=Corrector(2, 3)).tokens.shape
        torch.Size([1, 6])
    """

    sweeps: int = 1
    size: int = 1
    select: str = "random"

    def __post_init__(self) -> None:
        as_count("sweeps", self.sweeps)
        as_count("size", self.size)
        check_choice("select", self.select, ("random", "uncertain"))

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        """One sweep at the level alpha_s that the step before reached."""
        out, free, numbers = OutputBuilder(batch), batch.free, batch.numbers
        ticket = batch.uniform(Purpose.SELECT)
        share = self.size / free.sum(-1, keepdim=True).clamp(min=self.size)
        chosen = self._random(free, ticket)
        if self.select == "uncertain":
            chosen = free & (ticket < share)  # the most that any certainty allows
        clean = chosen & (batch.uniform() < numbers.alpha_s)
        renoised = chosen & ~clean
        vocab_size = batch.pi.shape[0]
        needed = clean if self.select == "random" else chosen
        for (rows,) in source.rows(out, needed):
            at = rows.at
            drawn = torch.ones_like(at, dtype=torch.bool)
            if self.select == "uncertain":
                surest = 1 / rows.total[:, 0]  # its weight is 1
                doubt = (1 - surest) * vocab_size / (vocab_size - 1)
                accepted = ticket.view(-1)[at] < batch.at(share, at) * doubt
                renoised.view(-1)[at] &= accepted
                drawn = accepted & clean.view(-1)[at]
            out.predict(rows.select(drawn))
        out.renoise(renoised)
        return out.done()

    def _random(self, free: Tensor, ticket: Tensor) -> Tensor:
        """`size` free positions of each sequence."""
        order = ticket.masked_fill(~free, 2).argsort(-1)
        first = torch.arange(free.shape[1], device=free.device).expand_as(free) < self.size
        return torch.zeros_like(free).scatter(-1, order, first) & free


def parse_corrector(text: str) -> Corrector:
    """A corrector from words.

    Args:
        text: sweeps x size, 2x12, or 2x12:uncertain.

    Returns:
        The `Corrector`.

    Raises:
        ValueError: the words are no corrector.

    Example:
        >>> from psidiff.sampling import parse_corrector
        >>> parse_corrector("2x12")
        Corrector(sweeps=2, size=12, select='random')
    """
    text = str(text).strip()
    match = re.fullmatch(r"([0-9]{1,18})x([0-9]{1,18})(?::(random|uncertain))?", text)
    if match is None:
        raise ValueError(
            f"{text!r} is no corrector; these are: 2x12 (sweeps x size), 2x12:uncertain"
        )
    return Corrector(int(match[1]), int(match[2]), match[3] or "random")


def format_corrector(corrector: Corrector) -> str:
    """The words that `parse_corrector` reads."""
    select = "" if corrector.select == "random" else f":{corrector.select}"
    return f"{corrector.sweeps}x{corrector.size}{select}"
