"""One step of a Psi-sampler: a coin for each token, the network only where the coin asks.

One u a token decides between predict (u < W_x), renoise (u < W_x + W_pi) and keep, in this
order. 1 - W_keep grows with the chance that z_t is noise, which is at most 1, so a token whose
u exceeds the value there is kept whatever the network would say: its head is never evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, Stream, absorb, uniform
from ..kernels.exponential_race import block_race
from ..process.posterior import Mixture, Predictor, markov, noise_probability, superpose
from ..process.prior import Prior
from ..types import Tokens, check_shape, check_unit, working_dtype
from .coin import settle, toss
from .guidance import guided_posterior
from .kappa import Memory
from .network import Network, Where, weights_of
from .plan import Step

KEPT, PREDICTED, RENOISED = 0, 1, 2


@dataclass(frozen=True)
class Run:
    """What stays the same over the loop."""

    prior: Prior
    network: Network
    stream: Stream
    free: Tensor  # (B, L), False where the token is given
    lazy: bool = True
    start: float = 0.0  # alpha where the plan begins, at noise

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.stream.device)

    @property
    def pi(self) -> Tensor:
        return self.prior.probs(like=torch.zeros((), dtype=self.dtype, device=self.free.device))

    def masked(self, z: Tokens) -> Tensor:
        """Where z is the mask: noise for certain."""
        if self.prior.mask_id is None:
            return torch.zeros_like(self.free)
        return z == self.prior.mask_id


class Outcome:
    """z_s in the making: tokens, routes and, for rules that ask, confidence."""

    def __init__(self, run: Run, i: int, z: Tokens, memory: Memory) -> None:
        self.run, self.state = run, run.stream.at(i)
        self.z = z.clone()
        self.route = torch.zeros_like(z, dtype=torch.int8)
        self.confidence = memory.confidence.clone()

    def coin(self) -> Tensor:
        return uniform(absorb(self.state, int(Purpose.COIN)), self.run.dtype)

    def predict(self, at: Where, weights: Tensor, total: Tensor, greedy: bool = False) -> None:
        """Draw the tokens at `at` from their rows of x_theta."""
        bits = absorb(self.state[at], int(Purpose.DRAW))
        tokens = weights.argmax(-1) if greedy else block_race(weights, bits)
        self.z[at] = tokens
        self.route[at] = PREDICTED
        probability = weights.gather(-1, tokens[:, None]) / total
        self.confidence[at] = probability[:, 0].to(self.confidence)

    def renoise(self, where: Tensor) -> None:
        """Draw the tokens at True from the prior."""
        bits = absorb(self.state[where], int(Purpose.NOISE))
        self.z[where] = self.run.prior.from_bits(bits)
        self.route[where] = RENOISED

    def done(self) -> tuple[Tokens, Tensor, Memory]:
        confidence = self.confidence.masked_fill(self.run.masked(self.z), torch.inf)
        return self.z, self.route, Memory(confidence)


def kappa_at(step: Step, memory: Memory) -> float | Tensor:
    """The step's kappa, for all tokens or one for each."""
    if not callable(step.kappa):
        return step.kappa
    kappa = step.kappa(memory)
    check_shape("the kappa of a rule with memory", kappa, tuple(memory.confidence.shape))
    check_unit("the kappa of a rule with memory", kappa)
    return kappa.to(memory.confidence)


def psi_step(
    run: Run, predictor: Predictor, i: int, step: Step, z: Tokens, memory: Memory
) -> tuple[Tokens, Tensor, Memory]:
    """z_s ~ Psi_{s|t}(. | z_t) (Eq. 12), its routes, and what the rule will remember."""
    out = Outcome(run, i, z, memory)
    u, kappa, pi_z = out.coin(), kappa_at(step, memory), run.pi[z]
    can_be_noise = (pi_z > 0) & (step.alpha_t < 1)
    bound = superpose(predictor, can_be_noise.to(run.dtype), step.alpha_s, step.alpha_t, kappa)
    limit, renoised, needed = toss(
        u, run.free, run.masked(z), can_be_noise, bound.predict, bound.renoise
    )
    if not run.lazy:
        needed = run.free & can_be_noise
    for at, (logits,) in run.network.rows(z, step.t, step.alpha_t, needed):
        weights, total = weights_of(logits)
        x_z = (weights.gather(-1, z[at][:, None]) / total)[:, 0].to(run.dtype)
        p_noise = noise_probability(pi_z[at], x_z, step.alpha_t)
        kappa_here = kappa[at] if isinstance(kappa, Tensor) else kappa
        mixture = superpose(predictor, p_noise, step.alpha_s, step.alpha_t, kappa_here)
        chosen, renoised[at] = settle(u[at], mixture.predict, mixture.renoise, limit[at])
        hit = chosen.nonzero()[:, 0]  # once: a GPU's host waits for it
        out.predict((at[0][hit], at[1][hit]), weights[hit], total[hit])
    out.renoise(renoised)
    return out.done()


def greedy_step(
    run: Run, i: int, step: Step, z: Tokens, memory: Memory
) -> tuple[Tokens, Tensor, Memory]:
    """The most probable token of x_theta wherever z_t can be noise."""
    out = Outcome(run, i, z, memory)
    needed = run.free & (run.pi[z] > 0) & (step.alpha_t < 1)
    for at, (logits,) in run.network.rows(z, step.t, step.alpha_t, needed):
        out.predict(at, *weights_of(logits), greedy=True)
    return out.done()


def guided_step(
    run: Run, i: int, step: Step, z: Tokens, memory: Memory, weight: float
) -> tuple[Tokens, Tensor, Memory]:
    """Psi with guidance on posteriors: every product of two q is normalised by itself.

    With probability (1-kappa)(1-alpha_s) the unguided pi, with kappa the product of the two
    q_{s|t}, else that of the two q_{0|t}. Not a small mixture, so each row is a full draw, and
    what a product changes counts as predicted.
    """
    out = Outcome(run, i, z, memory)
    u = out.coin()
    kappa = kappa_at(step, memory)
    pi, pi_z = run.pi, run.pi[z]
    noise = (1 - kappa) * (1 - step.alpha_s)
    renoised = run.free & (u < noise)
    needed = run.free & ~renoised & (pi_z > 0) & (step.alpha_t < 1)
    for at, logits in run.network.rows(z, step.t, step.alpha_t, needed, pair=True):
        through = (u < noise + kappa)[at]  # by q_{s|t}, else by q_{0|t}
        xs, mixtures = [], []
        for each in logits:
            weights, total = weights_of(each)
            xs.append((weights / total).to(run.dtype))
            x_z = xs[-1].gather(-1, z[at][:, None])[:, 0]
            p_noise = noise_probability(pi_z[at], x_z, step.alpha_t)
            forth = markov(p_noise, step.alpha_s, step.alpha_t)
            keep = torch.where(through, forth.keep, 1 - p_noise)
            predict = torch.where(through, forth.predict, p_noise)
            mixtures.append(Mixture(keep, predict, torch.where(through, forth.renoise, 0)))
        probs = guided_posterior(mixtures, xs, pi, z[at], weight)
        out.predict(at, probs, probs.sum(-1, keepdim=True))
        changed = out.z[at] != z[at]
        out.route[at] = changed.to(torch.int8) * PREDICTED
        sure = xs[0].gather(-1, out.z[at][:, None])[:, 0]  # of x_theta, not of the product
        out.confidence[at] = torch.where(changed, sure, memory.confidence[at])
    out.renoise(renoised)
    return out.done()
