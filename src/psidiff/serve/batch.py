"""Sequences of different lengths, at different steps of different plans, all one step on.

The step is that of `sampling.step.psi_step`, with levels, kappa and filters of each sequence's
own. The weights are affine in p_noise, W_predict = a p and W_renoise = b p + c; the three
numbers are made in float64 on the host. Random numbers are those a sequence has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..kernels.counter_rng import Purpose, absorb, uniform
from ..kernels.exponential_race import block_race
from ..process.posterior import superpose
from ..sampling.coin import settle, toss
from ..sampling.kappa import Memory
from ..sampling.network import Where, weights_of
from ..sampling.step import PREDICTED, RENOISED, kappa_at
from .lanes import Lane
from .passes import Passes, guidance_weight


@dataclass(frozen=True)
class Moved:
    """What a step made of one sequence."""

    z: Tensor
    route: Tensor
    confidence: Tensor
    passes: int


@torch.no_grad()
def advance(passes: Passes, lanes: Sequence[Lane]) -> list[Moved]:
    """z_s of each lane, its routes, and what its rule remembers. The lanes stay as they are."""
    coins = _Coins.thrown(passes, lanes)
    out = _Outcome(passes, lanes, coins)
    asked = coins.needed.any(1).tolist()
    for at, logits in passes.rows(lanes, coins.z, coins.needed, asked):
        out.decide(at, logits)
    return out.done(asked)


@dataclass(frozen=True)
class _Coins:
    """What is known before the network is asked, padded to (B, L); columns are (B, 1).

    a, b and c are (B, L) where some kappa differs between tokens.
    """

    z: Tensor
    state: Tensor  # hashes, to which a purpose is added
    u: Tensor
    pi_z: Tensor
    alpha: Tensor
    noise: Tensor  # 1 - alpha
    greedy: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    limit: Tensor  # W_predict + W_renoise at the largest p that is possible
    renoised: Tensor  # for certain
    needed: Tensor  # where the network decides

    @classmethod
    def thrown(cls, passes: Passes, lanes: Sequence[Lane]) -> _Coins:
        prior, dtype = passes.prior, passes.dtype
        z, free = (_padded(lanes, name) for name in ("z", "free"))
        state = _hashes(lanes, z)
        u = uniform(absorb(state, int(Purpose.COIN)), dtype)
        pi_z = prior.probs(like=u)[z]
        alpha = passes.column([lane.step.alpha_t for lane in lanes])
        noise = passes.column([1 - lane.step.alpha_t for lane in lanes])
        greedy = passes.column([float(lane.step.greedy) for lane in lanes]) > 0
        a, b, c = _weights(passes, lanes, z)
        doubtful = (pi_z > 0) & (noise > 0)  # z may be noise
        masked = torch.zeros_like(doubtful) if prior.mask_id is None else z == prior.mask_id
        tossed = toss(u, free, masked, doubtful, a * doubtful, b * doubtful + c)
        return cls(z, state, u, pi_z, alpha, noise, greedy, a, b, c, *tossed)


class _Outcome:
    """z_s in the making."""

    def __init__(self, passes: Passes, lanes: Sequence[Lane], coins: _Coins) -> None:
        self.prior, self.lanes, self.coins = passes.prior, lanes, coins
        self.z, self.renoised = coins.z.clone(), coins.renoised
        self.route = torch.zeros_like(self.z, dtype=torch.int8)
        self.confidence = _padded(lanes, "confidence")
        self.draw = absorb(coins.state, int(Purpose.DRAW))

    def decide(self, at: Where, logits: Tensor) -> None:
        """Predict, renoise or keep the tokens at `at`, by their rows of x_theta."""
        coins, row, u = self.coins, at[0], self.coins.u[at]
        weights, total = weights_of(logits)
        x_z = (weights.gather(-1, coins.z[at][:, None]) / total)[:, 0].to(u)
        noise = coins.noise[row, 0] * coins.pi_z[at]
        p = noise / (coins.alpha[row, 0] * x_z + noise)
        a, b, c = (each.expand_as(coins.z)[at] for each in (coins.a, coins.b, coins.c))
        greedy = coins.greedy[row, 0]
        chosen, self.renoised[at] = settle(u, a * p, b * p + c, coins.limit[at])
        chosen = greedy | chosen
        where = row[chosen], at[1][chosen]
        self._predict(where, weights[chosen], total[chosen], greedy[chosen])

    def _predict(self, at: Where, weights: Tensor, total: Tensor, greedy: Tensor) -> None:
        tokens = block_race(weights, self.draw[at])
        if bool(greedy.any()):
            tokens = torch.where(greedy, weights.argmax(-1), tokens)
        self.z[at], self.route[at] = tokens, PREDICTED
        probability = weights.gather(-1, tokens[:, None]) / total
        self.confidence[at] = probability[:, 0].to(self.confidence)

    def done(self, asked: list[bool]) -> list[Moved]:
        bits = absorb(self.coins.state[self.renoised], int(Purpose.NOISE))
        self.z[self.renoised] = self.prior.from_bits(bits)
        self.route[self.renoised] = RENOISED
        if self.prior.mask_id is not None:
            self.confidence.masked_fill_(self.z == self.prior.mask_id, torch.inf)
        return [
            Moved(
                self.z[i, : len(lane.z)],
                self.route[i, : len(lane.z)],
                self.confidence[i, : len(lane.z)],
                asked[i] * (1 if guidance_weight(lane) in (0, 1) else 2),
            )
            for i, lane in enumerate(self.lanes)
        ]


def _padded(lanes: Sequence[Lane], name: str) -> Tensor:
    return pad_sequence([getattr(lane, name) for lane in lanes], batch_first=True)


def _hashes(lanes: Sequence[Lane], z: Tensor) -> Tensor:
    """What `Stream.at` gives each lane by itself, (B, L)."""
    numbers = torch.tensor([[lane.key, lane.index, lane.i] for lane in lanes], device=z.device)
    state = absorb(absorb(numbers[:, 0].clone(), numbers[:, 1]), numbers[:, 2])
    return absorb(state[:, None], torch.arange(z.shape[1], device=z.device))


def _weights(passes: Passes, lanes: Sequence[Lane], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and c of each lane."""
    each = [_affine(lane) for lane in lanes]
    if not any(isinstance(a, Tensor) for a, _, _ in each):
        a, b, c = (passes.column(values) for values in zip(*each, strict=True))
        return a, b, c
    whole = torch.zeros(3, *z.shape, dtype=passes.dtype, device=z.device)
    for i, abc in enumerate(each):
        for number, value in enumerate(abc):
            whole[number, i, : len(lanes[i].z)] = value
    return whole[0], whole[1], whole[2]


def _affine(lane: Lane) -> tuple[float | Tensor, float | Tensor, float | Tensor]:
    """W_predict = a p, W_renoise = b p + c; all of a greedy step is predicted."""
    step = lane.step
    if step.greedy:
        return 1.0, 0.0, 0.0
    kappa = kappa_at(step, Memory(lane.confidence[None]))
    kappa = kappa[0] if isinstance(kappa, Tensor) else kappa
    none, sure = (
        superpose(lane.predictor, p, step.alpha_s, step.alpha_t, kappa) for p in (0.0, 1.0)
    )
    return sure.predict, sure.renoise - none.renoise, none.renoise
