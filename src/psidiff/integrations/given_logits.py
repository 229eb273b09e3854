"""A step from logits that a pipeline has computed already, row by row.

The three weights of a token need one number of its row, and a predicted token one draw from it,
so nothing as wide as the vocabulary is made beyond a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import Stream, draw_key
from ..process.posterior import Predictor, noise_probability, superpose
from ..process.prior import Prior
from ..sampling.filters import RowFilter, chain
from ..sampling.kappa import Memory
from ..sampling.network import Network, Where, weights_of
from ..sampling.plan import Step
from ..sampling.step import PREDICTED, Outcome, Run, kappa_at
from ..types import Tokens, at_least_float32, check_shape

_CHUNK = 2**20  # logits in float32 at a time


@dataclass(frozen=True)
class Answered:
    """A denoiser that has answered: its hidden states say where a row is, its head reads it.

    Its labels are the numbers of the sequences. shift (B, L) is added to the logit of z.
    """

    logits: Tensor  # (B, L, K)
    z: Tokens
    shift: Tensor | None = None

    def hidden(self, z: Tokens, alpha: float, labels: Tensor) -> Tensor:
        place = torch.arange(z.shape[1], device=z.device).expand_as(z)
        return torch.stack((labels[:, None].expand_as(z), place), -1)

    def head(self, rows: Tensor) -> Tensor:
        sequence, place = rows.unbind(-1)
        logits = at_least_float32(self.logits[sequence, place])
        if self.shift is None:
            return logits
        shift = self.shift[sequence, place][:, None].to(logits)
        return logits.scatter_add(-1, self.z[sequence, place][:, None], shift)


@dataclass(frozen=True)
class Shaping:
    """What becomes of logits before tokens are drawn. Temperature 0: only the largest stays."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    nucleus: str = "keep"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature:g}")
        self._chain()

    def drawing(self) -> RowFilter:
        """From a network's rows to those that tokens are drawn from."""
        return _only_the_largest if self.temperature == 0 else self._chain()

    def shown(self) -> RowFilter | None:
        """The same for others to look at; None: nothing changes.

        At temperature 0 that is the rows themselves: a row without doubt would tell a pipeline
        that the network has none.
        """
        truncated = self.top_k, self.top_p, self.min_p
        if self.temperature == 0 or (self.temperature == 1 and truncated == (None,) * 3):
            return None
        return self._chain()

    def _chain(self) -> RowFilter:
        return chain(self.temperature or 1.0, self.top_k, self.top_p, self.min_p, self.nucleus)


def _only_the_largest(logits: Tensor) -> Tensor:
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)


def run_on(
    logits: Tensor,
    z: Tokens,
    prior: Prior,
    shaping: Shaping,
    fixed: Tensor | None,
    shift: Tensor | None,
    generator: Generator | None,
) -> Run:
    """A run of one step; fixed (L,) or (B, L) is True where a token never changes."""
    check_shape("model_output", logits, (*z.shape, prior.vocab_size))
    free = torch.ones_like(z, dtype=torch.bool)
    if fixed is not None:
        free &= ~fixed.to(z.device, torch.bool)
    network = Network(
        Answered(logits, z, shift),
        prior,
        torch.arange(len(z), device=z.device),
        None,
        None,
        shaping.drawing(),
        None,
    )
    stream = Stream(draw_key(generator), (z.shape[0], z.shape[1]), 0, z.device)
    return Run(prior, network, stream, free)


def marginal_step(
    run: Run, predictor: Predictor, i: int, step: Step, z: Tokens, memory: Memory
) -> tuple[Tokens, Tensor, Memory]:
    """x_hat ~ x_theta, then z_s ~ Psi_{s|t}(. | z_t, x_hat), where x_theta is p(x_l | z).

    The mean over x_hat of the posterior, where `psi_step` takes the posterior at the mean. With
    x_theta converted to leave-one-out there, the two are the same law.
    """
    out = Outcome(run, i, z, memory)
    u, kappa, pi_z = out.coin(), kappa_at(step, memory), run.pi[z]
    can_be_noise = run.free & (pi_z > 0) & (step.alpha_t < 1)
    for at, (logits,) in run.network.rows(z, step.t, step.alpha_t, can_be_noise):
        out.predict(at, *weights_of(logits))
    x_hat = out.z
    p_noise = noise_probability(pi_z, (x_hat == z).to(run.dtype), step.alpha_t)
    p_noise = torch.where(can_be_noise, p_noise, 0)
    mixture = superpose(predictor, p_noise, step.alpha_s, step.alpha_t, kappa)
    chosen = can_be_noise & (u < mixture.predict)
    out.z = torch.where(chosen, x_hat, z)
    out.route = chosen.to(torch.int8) * PREDICTED
    out.confidence = torch.where(chosen, out.confidence, memory.confidence)
    out.renoise(run.free & ~chosen & (u < mixture.predict + mixture.renoise))
    return out.done()


def looked_at(logits: Tensor, shaping: Shaping, drawn: Tokens) -> tuple[Tokens, Tensor, Tensor]:
    """Tokens, their probabilities, and the logits as they were shaped, (B, L, K).

    drawn (B, L) is -1 where the most probable token is wanted.
    """
    shown, shape = logits, shaping.shown()
    tokens, probs = drawn.clone(), torch.empty(drawn.shape, device=drawn.device)
    if shape is not None:
        shown = torch.empty_like(logits)
    for at in _chunks(logits):
        rows = at_least_float32(logits[at])
        if shape is not None:
            rows = shape(rows)
            shown[at] = rows.to(shown.dtype)
        tokens[at] = torch.where(drawn[at] < 0, rows.argmax(-1), drawn[at])
        chosen = rows.gather(-1, tokens[at][:, None])[:, 0]
        probs[at] = (chosen - rows.logsumexp(-1)).exp().float()
    return tokens, probs, shown


def _chunks(logits: Tensor) -> Iterator[Where]:
    """All (sequence, position), as many at a time as there is room for."""
    num_samples, length, vocab_size = logits.shape
    places = torch.arange(num_samples * length, device=logits.device)
    for part in places.split(max(_CHUNK // vocab_size, 1)):
        yield part // length, part % length
