"""Psi steps of fixed shapes, which a GPU can replay: no step waits for the host.

The same law and the same random numbers as `step.psi_step`, which is written a second time here
because no shape may depend on values: there are not as many rows of the head as the coins ask
for, but a capacity that they exceed with a chance below 1e-14. Should they, the steps are made
again by `psi_step`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, absorb, uniform
from ..process.posterior import Predictor, superpose
from ..types import Tokens, traits
from .filters import Chain, head_of, hidden_of
from .logit_sources import LEAST_LEVEL, LazyLogits, checked
from .plan import Step
from .routes import PREDICTED, RENOISED, bound_routes, choose_routes
from .step import LogitSource, StepOutput, psi_step
from .step_batch import StepBatch, is_mask, rng_state

_LEAST_ROWS = 64
_CHUNK = 2**24  # logits in memory at a time
_LEAST_USES = 24  # of a graph; to record one costs as much as some steps


class Overflowed(Exception):
    """More rows were asked for than there was room for."""


@dataclass(frozen=True)
class Numbers:
    """All that steps do not share, (T,) each: the step's chances are lines in p_noise."""

    alpha: Tensor
    ratio: Tensor  # alpha_t / (1 - alpha_t)
    predict: tuple[Tensor, Tensor]  # at p_noise = 0 and 1
    renoise: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, steps: tuple[Step, ...], predictor: Predictor, pi: Tensor) -> Numbers:
        """Made in float64, then rounded once."""
        ends = [
            [superpose(predictor, p, s.alpha_s, s.alpha_t, _kappa(s)) for p in (0.0, 1.0)]
            for s in steps
        ]

        def there(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(pi)

        return cls(
            there([max(s.alpha_t, LEAST_LEVEL) for s in steps]),
            there([s.alpha_t / (1 - s.alpha_t) if s.alpha_t < 1 else 0.0 for s in steps]),
            (there([a.predict for a, _ in ends]), there([b.predict for _, b in ends])),
            (there([a.renoise for a, _ in ends]), there([b.renoise for _, b in ends])),
        )


class Static:
    """A stepper for the plan of a batch, whose steps are made without looking at them.

    watched: every step is looked at all the same, and made again where it had no room.
    """

    def __init__(
        self,
        batch: StepBatch,
        source: LazyLogits,
        predictor: Predictor,
        steps: tuple[Step, ...],
        replay: bool = True,
    ) -> None:
        self.batch, self.source, self.replay = batch, source, replay
        self.watched = False
        plain = [s if _plain(s) else Step(1.0, 0.0, 1.0) for s in steps]  # never walked here
        self.numbers = Numbers.of(tuple(plain), predictor, batch.pi)
        count, unmasked = int(batch.free.sum()), _unmasked(batch)
        rooms = [
            _room(count, batch.free.numel(), predictor, unmasked, s) if _plain(s) else None
            for s in steps
        ]
        self.rooms = shared_rooms(rooms) if replay else rooms
        self.uses = Counter(self.rooms)
        device = batch.free.device
        self.asked = torch.zeros((), dtype=torch.int64, device=device)  # rows of the head
        self.wrong = torch.zeros(2, dtype=torch.bool, device=device)  # overflow, no number
        self.graphs: dict[int, _Recorded] = {}
        self.pool: Any = None  # the memory that all graphs share: one runs at a time
        self.aside: Any = None  # where they are rehearsed

    def has(self, i: int) -> bool:
        """Whether step i is made here; others are better made the other way."""
        return self.rooms[i] is not None

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        """z_s and its routes; the rows of the head are counted until `finish`."""
        before = self.asked.clone() if self.watched else None
        z, route = self._made(batch.segments[0].index, batch.z)
        if before is not None and bool(self.wrong[0]):
            self.wrong[0] = False  # that a denoiser gave no number is still said at the end
            self.asked.copy_(before)
            return psi_step(batch, source)
        return StepOutput(z, route, None, [1] * len(z), 0)

    def _made(self, i: int, z: Tokens) -> tuple[Tokens, Tensor]:
        room = self.rooms[i]
        assert room is not None
        step = torch.full((), i, dtype=torch.int64, device=z.device)
        if not self.replay or self.uses[room] < _LEAST_USES:
            return self.step(step, z, room)
        with torch.cuda.device(z.device):
            if room not in self.graphs:
                self.graphs[room] = self._recorded(step, z, room)
            return self.graphs[room](step, z)

    def _recorded(self, step: Tensor, z: Tokens, room: int) -> _Recorded:
        before = self.asked.clone(), self.wrong.clone()
        self.aside = self.aside or torch.cuda.Stream()
        made = _Recorded(partial(self.step, room=room), step, z, self.aside, self.pool)
        self.pool = made.graph.pool()
        for held, value in zip((self.asked, self.wrong), before, strict=True):
            held.copy_(value)  # the rehearsals do not count
        return made

    def finish(self) -> int:
        """How many rows of the head there were, if there was room for all of them."""
        overflow, no_number = self.wrong.tolist()
        if overflow:
            raise Overflowed
        if no_number:
            raise ValueError(
                "the denoiser returned NaN, or a row in which no token is possible"
            )
        return int(self.asked)

    def step(self, i: Tensor, z: Tokens, room: int) -> tuple[Tokens, Tensor]:
        """`psi_step` over whole tensors; rows of the head have `room` places."""
        batch, numbers, pi = self.batch, self.numbers, self.batch.pi
        assert batch.prior is not None
        state = rng_state(batch.sample_hash, i, z.shape[1])
        u = uniform(absorb(state, int(Purpose.COIN)), pi.dtype)
        (p0, p1), (r0, r1) = (
            [v.take(i) for v in ends] for ends in (numbers.predict, numbers.renoise)
        )  # not v[i], which would ask the host
        pi_z = pi[z]
        noise = pi_z > 0
        most = torch.where(noise, p1, p0), torch.where(noise, r1, r0)
        masked = is_mask(batch.prior, z)
        limit, renoised, needed = bound_routes(u, batch.free, masked, noise, *most)

        at, used = _first(needed.flatten(), room)
        here = at.clamp(max=z.numel() - 1)  # unused places repeat the last token
        z_here, u_here, pi_here = (v.flatten()[here] for v in (z, u, pi_z))
        bits = absorb(state.flatten()[here], int(Purpose.DRAW))
        x_z, drawn = self._rows(z, numbers.alpha.take(i), here, z_here, bits)
        p_noise = pi_here / (numbers.ratio.take(i) * x_z + pi_here)
        chance, noised = (a + (b - a) * p_noise for a, b in ((p0, p1), (r0, r1)))
        chosen, changed = choose_routes(u_here, chance, noised, limit.flatten()[here])

        fresh = batch.prior.from_bits(absorb(state, int(Purpose.NOISE)))
        renoised = _put(renoised, at, changed)
        predicted = _put(torch.zeros_like(renoised), at, chosen)
        z_s = torch.where(renoised, fresh, _put(z, at, torch.where(chosen, drawn, z_here)))
        route = predicted.to(torch.int8) * PREDICTED + renoised.to(torch.int8) * RENOISED
        self.asked += used.sum()
        no_number = ~torch.where(used, x_z, 1).isfinite().all()
        self.wrong |= torch.stack((needed.sum() > room, no_number))
        return z_s, route

    def _rows(
        self, z: Tokens, alpha: Tensor, here: Tensor, z_here: Tensor, bits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the rows at `here`: x_theta at z, and a draw; chunk by chunk."""
        batch, source = self.batch, self.source
        level: Any = alpha.to(torch.get_default_dtype()).view(1, 1, 1)
        if batch.given is not None:
            level = source.level(level, batch.given)
        hidden = hidden_of(source.denoiser, z, level, batch.labels)
        rows = hidden.flatten(0, 1)[here]
        size = max(_CHUNK // source.prior.vocab_size, 1)
        filtered = batch.segments[0].logits_processor
        assert isinstance(filtered, Chain)
        found = []
        for part, own, word in zip(*(v.split(size) for v in (rows, z_here, bits)), strict=True):
            logits = checked(source.prior, head_of(source.denoiser, part))
            x_z, drawn = filtered.then_draw(logits, own, word)
            found.append((x_z.to(batch.pi), drawn))
        x_z, drawn = (torch.cat(parts) for parts in zip(*found, strict=True))
        return x_z, drawn


class _Recorded:
    """A function of (i, z) as a CUDA graph."""

    def __init__(
        self,
        work: Callable[[Tensor, Tokens], Any],
        i: Tensor,
        z: Tokens,
        aside: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        self.i, self.z = i.clone(), z.clone()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # what is compiled or tuned on the way is done here
                work(self.i, self.z)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.made = work(self.i, self.z)

    def __call__(self, i: Tensor, z: Tokens) -> tuple[Tokens, Tensor]:
        self.i.copy_(i)
        self.z.copy_(z)
        self.graph.replay()
        z_s, route = self.made
        return z_s.clone(), route.clone()


def chosen(asked: bool | None, denoiser: Any, needs: dict[str, bool]) -> bool:
    """Whether steps are walked this way. None: if all needs are there, and the denoiser's
    traits say (`recordable`) that its pass is work on tensors of the GPU and nothing else."""
    lack = next((need for need, there in needs.items() if not there), None)
    if asked and lack is not None:
        raise ValueError(f"graph=True needs {lack}")
    return lack is None and (traits(denoiser).recordable if asked is None else asked)


def _kappa(step: Step) -> float:
    assert not callable(step.kappa)  # `_plain` says so
    return step.kappa


def _plain(step: Step) -> bool:
    return not (callable(step.kappa) or step.greedy or step.alpha_t >= 1)


def _room(count: int, most: int, predictor: Predictor, unmasked: bool, step: Step) -> int:
    """Places for the rows that `count` coins ask for: the mean and eight deviations, rounded up
    to a power of two."""
    bound = superpose(predictor, 1.0, step.alpha_s, step.alpha_t, _kappa(step))
    chance = bound.predict + (bound.renoise if unmasked else 0.0)
    mean = count * min(chance, 1.0)
    wanted = max(mean + 8 * math.sqrt(mean) + 32, _LEAST_ROWS)
    return min(2 ** math.ceil(math.log2(wanted)), most)


def shared_rooms(rooms: list[int | None]) -> list[int | None]:
    """Rooms of steps, where those too rare for a graph of their own share that of twice their
    size."""
    uses, waiting = Counter(rooms), list[int]()
    shared: dict[int | None, int] = {}
    for size in sorted(room for room in uses if room is not None):
        waiting = [room for room in (*waiting, size) if 2 * room >= size]
        if sum(uses[room] for room in waiting) >= _LEAST_USES:
            shared |= dict.fromkeys(waiting, size)
            waiting = []
    return [shared.get(room, room) for room in rooms]


def _unmasked(batch: StepBatch) -> bool:
    """Whether a token other than the mask can be noise."""
    pi = batch.pi.clone()
    if batch.prior is not None and batch.prior.mask_id is not None:
        pi[batch.prior.mask_id] = 0
    return bool((pi > 0).any())


def _first(wanted: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The places (room,) of the first True in a flat mask, and which of them are in use; those
    that are not name a place behind the end."""
    count = len(wanted)
    rank = wanted.cumsum(0) - 1
    slot = torch.where(wanted & (rank < room), rank, room)
    at = torch.full((room + 1,), count, device=wanted.device)
    at.scatter_(0, slot, torch.arange(count, device=wanted.device))
    used = torch.arange(room, device=wanted.device) < wanted.sum()
    return torch.where(used, at[:room], count), used


def _put(into: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """`into` (B, L) with values at flat places; the place behind the end takes the rest."""
    longer = torch.cat((into.flatten(), into.new_zeros(1)))
    return longer.scatter(0, at, values.to(into.dtype))[:-1].view_as(into)
