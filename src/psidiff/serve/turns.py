"""Samples that wait for the engine, and whose turn it is: requests in the order in which equal
shares would have them done.

Each request has a cost, in tokens that the network sees, and a virtual time at which it would
be over if all requests shared the engine equally (weighted fair queueing). Who would be done
first goes first. So a short request overtakes long ones, equal ones stay in their order, and
none waits longer than an equal share would have let it wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..request import Request
from .errors import ApiError
from .samples import Bias, Sampling, Update, passes_of

_TICK = 64  # tokens that cost as much as a pass does beside those in it
_SAMPLE = 8  # and as one more sample in it
_QUICK = 6  # a request so many times cheaper than a tick does not wait for others' steps
_SHARE = 16  # of the time goes to such requests, one part in so many


@dataclass(eq=False)
class Turn:
    """What all samples of a request share: its cost, and when it would be over."""

    cost: int
    finish: float
    quick: bool = False  # its steps are made without those of others
    samplings: dict[int, Sampling] = field(default_factory=dict)  # by the id of their request


@dataclass(frozen=True)
class Finished:
    """A sample is done: its tokens (L,), and how often the network saw it."""

    tokens: Tensor
    passes: int


Event = Update | Finished | ApiError
Tell = Callable[[Event], None]


@dataclass(eq=False)
class Task:
    """Sample `index` of a request. `tell` is called in the engine's thread.

    drafts    it hears of every step; streams: of the first, and of those that may have made
              tokens final
    deadline  on time.monotonic's clock
    """

    request: Request
    index: int
    tell: Tell
    bias: Bias = ()
    drafts: bool = False
    streams: bool = False
    deadline: float = float("inf")
    cancelled: bool = False
    started: bool = field(default=False, init=False)  # its first step was or is being made
    begun: float = field(default_factory=time.monotonic)
    turn: Turn = field(default_factory=lambda: Turn(0, 0.0), init=False)
    cost: int = field(default=0, init=False)  # of a step

    def cancel(self) -> None:
        """Nobody wants it: it makes no step after the one that may be running now."""
        self.cancelled = True


class Turns:
    """Who moves in the next tick: at most `places` samples, for about `most` tokens."""

    def __init__(self, places: int, most: int) -> None:
        self.places = places
        self.most = most
        self.now: float = 0.0  # what each of equal shares has got so far
        self._spare = float("inf")  # for quick requests

    def share(self, tasks: Sequence[Task], alone: Sequence[bool]) -> None:
        """Samples that come together share a turn. alone: they share no pass with others."""
        together = cost = 0
        for task, by_itself in zip(tasks, alone, strict=True):
            task.cost = step_cost(task.request, by_itself)
            steps = task.request.total_steps
            cost += steps * task.cost
            together = together if by_itself else max(together, steps)
        turn = Turn(cost + together * _TICK, 0.0)
        turn.finish = self.now + turn.cost
        for task in tasks:
            task.turn = turn

    def choose(self, waiting: Sequence[Task]) -> list[Task]:
        """The samples of the next tick, out of all in their order.

        Those that have begun are paused where others come first, however many pause: what they
        keep is a few numbers a token, and the queue bounds how many there are.
        """
        chosen: list[Task] = []
        cost = 0
        for each in waiting:
            if len(chosen) == self.places:
                break
            cost += each.cost
            if chosen and cost > self.most:
                break
            chosen.append(each)
        self._find_quick(chosen)
        return [each for each in chosen if each.turn.quick] or chosen

    def spend(self, moved: Sequence[Task], sharing: int) -> None:
        """A tick was made, while so many requests were there."""
        cost = cost_of(moved)
        self.now += cost / max(sharing, 1)
        if not moved[0].turn.quick:
            self._spare += cost / _SHARE

    def _find_quick(self, chosen: Sequence[Task]) -> None:
        """Requests that are over before the others would miss it go ahead by themselves."""
        total = cost_of(chosen)
        self._spare = min(self._spare, total)
        own: dict[Turn, int] = {}
        for each in chosen:
            own[each.turn] = own.get(each.turn, 0) + each.cost
        for turn, cost in own.items():
            cheap = turn.cost * _QUICK <= total - cost and turn.cost <= self._spare
            if cheap and not turn.quick:
                turn.quick = True
                self._spare -= turn.cost


def cost_of(tick: Sequence[Task]) -> int:
    """Of a step of all of them, in tokens."""
    return _TICK + sum(each.cost for each in tick)


def step_cost(request: Request, alone: bool) -> int:
    """Of one step of one sample, in tokens. alone: it shares no pass with others."""
    tokens = request.window if request.steps else 1
    return passes_of(request.sampler.options()) * tokens + (_TICK if alone else _SAMPLE)
