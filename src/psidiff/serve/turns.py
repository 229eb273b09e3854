"""Whose turn it is: requests in the order in which equal shares would have them done.

Each request has a cost, in tokens that the network sees, and a virtual time at which it would
be over if all requests shared the engine equally (weighted fair queueing). Who would be done
first goes first. So a short request overtakes long ones, equal ones stay in their order, and
none waits longer than an equal share would have let it wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request
from .samples import passes_of
from .task import Task, Turn

_TICK = 64  # tokens that cost as much as a pass does beside those in it
_SAMPLE = 8  # and as one more sample in it
_QUICK = 6  # a request so many times cheaper than a tick does not wait for others' steps
_SHARE = 16  # of the time goes to such requests, one part in so many


class Turns:
    """Who moves in the next tick: at most `places` samples, for about `most` tokens."""

    def __init__(self, places: int, most: int) -> None:
        self.places, self.most = places, most
        self.now = 0.0  # what each of equal shares has got so far
        self._spare = float("inf")  # for quick requests

    def share(self, tasks: Sequence[Task], alone: Sequence[bool]) -> None:
        """Samples that come together share a turn. alone: they share no pass with others."""
        together = cost = 0
        for task, by_itself in zip(tasks, alone, strict=True):
            task.cost = step_cost(task.request, by_itself)
            steps = steps_of(task.request)
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
    tokens = min(request.window, request.length) if request.steps else 1
    return passes_of(request.options) * tokens + (_TICK if alone else _SAMPLE)


def steps_of(request: Request) -> int:
    """Of one sample; left to right each token is one."""
    if not request.steps:
        return request.length
    return len(request.steps) * len(request.starts)
