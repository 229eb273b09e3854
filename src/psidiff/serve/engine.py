"""The engine: one thread that moves samples on by one step, again and again.

A sample joins between two steps, whatever the others are at, and leaves when it is done, when
nobody wants it any more, or when its time is over. Between two steps it may pause, so that
others have their turn.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..sampling.state import SampleState, StepEvent, advance
from .errors import NO_RETRY, ApiError, as_api_error
from .metrics import Metrics
from .samples import Sampling, is_batchable, shared_graphs, shared_source
from .turns import Event, Finished, Task, Turn, Turns

if TYPE_CHECKING:
    from ..model import Model

log = logging.getLogger("psidiff.serve")

_TOKENS = {"cpu": 2**14}  # of a tick, so that it does not last forever
_MANY = 2**18


def _full(why: str) -> ApiError:
    said = f"{why} places: try again in a moment"
    return ApiError(429, said, code="queue_full", headers={"retry-after": "1"})


@dataclass(frozen=True, eq=False)
class _Group:
    """Tasks of a request whose samples are the rows of one state."""

    sampling: Sampling
    state: SampleState
    tasks: list[Task]

    def select(self, rows: Sequence[int]) -> _Group:
        return _Group(self.sampling, self.state.select(rows), [self.tasks[i] for i in rows])


def _halves(groups: list[_Group]) -> list[list[_Group]]:
    """Half of the states each, or of the samples of one; none of one sample."""
    middle = len(groups) // 2
    if middle:
        return [groups[:middle], groups[middle:]]
    (group,) = groups
    count = len(group.tasks)
    rows = range(count // 2), range(count // 2, count)
    return [[group.select(half)] for half in rows] if count > 1 else []


class Engine:
    """At most `batch` samples make a step together; at most `queue` more wait or pause."""

    def __init__(
        self, model: Model, batch: int = 64, queue: int = 256, metrics: Metrics | None = None
    ) -> None:
        self.model, self.batch, self.queue = model, batch, queue
        self.metrics = metrics or Metrics()
        self._source = shared_source(model)
        self._graphs = shared_graphs(model, self._source, log.warning)
        self._tasks: list[Task] = []  # in the order of their turns
        self._begun: dict[Task, tuple[_Group, int]] = {}  # and the row there
        self._turns = Turns(batch, _TOKENS.get(model.device.type, _MANY))
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="psidiff-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Samples that have places; others may have begun and pause."""
        return min(len(self._begun), self.batch)

    @property
    def waiting(self) -> int:
        return max(len(self._tasks) - self.running, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the step that is running; who still waits is told."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        gone = ApiError(503, "the server is going down", code="shutting_down")
        for task in list(self._tasks):
            self._drop(task, "stopped", gone)

    def submit(self, tasks: Sequence[Task]) -> None:
        """All of them, or none where the queue has no place for all. They share a turn."""
        alone = [not is_batchable(self.model, task.request) for task in tasks]
        with self._wake:
            if self._stopping or not self.alive:
                raise ApiError(503, "the engine is not running", code="shutting_down")
            self._turns.share(tasks, alone)
            self._make_room(tasks)
            for task in tasks:
                insort(self._tasks, task, key=lambda each: each.turn.finish)
            self._wake.notify()

    def _make_room(self, tasks: Sequence[Task]) -> None:
        """The queue takes these tasks, perhaps in the place of requests that would be done
        after them and have not begun: a few long requests lock nobody out."""
        missing = self.waiting + len(tasks) - self.queue
        later: dict[Turn, list[Task]] = {}
        for task in reversed(self._tasks):
            if task.turn.finish > tasks[0].turn.finish:
                later.setdefault(task.turn, []).append(task)
        gone: list[Task] = []
        for members in later.values():
            if len(gone) < missing and not any(task.started for task in members):
                gone += members
        if len(gone) < missing:
            raise _full(f"{self.waiting} samples are waiting, and the queue has {self.queue}")
        for task in gone:
            error = _full(f"the queue is full, {self.queue}, and shorter requests came")
            self._drop(task, "displaced", error)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._tasks or self._stopping)
                if self._stopping:
                    return
            try:
                self._tick()
            except Exception:
                log.exception("a step failed")
                for task in list(self._begun):
                    self._drop(task, "failed", as_api_error(RuntimeError()))

    def _tick(self) -> None:
        self._prune()
        moved = self._admit()
        if not moved:
            return
        groups = self._groups(moved)
        shared = [group for group in groups if group.sampling.shared]
        self.metrics.count("ticks_total")
        self.metrics.count("sample_steps_total", len(moved))
        alone = [[group] for group in groups if not group.sampling.shared]
        for together in ([shared] if shared else []) + alone:
            self._move(together)

    def _prune(self) -> None:
        now = time.monotonic()
        with self._wake:
            tasks = list(self._tasks)
        for task in tasks:
            if task.cancelled:
                self._drop(task, "cancelled")
            elif now > task.deadline:
                seconds = task.deadline - task.begun
                late = f"the request did not finish within its {seconds:g} seconds"
                error = ApiError(408, late, code="deadline", headers=NO_RETRY)
                self._drop(task, "expired", error)

    def _admit(self) -> list[Task]:
        """Whose turn it is; each of them has begun."""
        with self._wake:
            tasks = list(self._tasks)
            chosen = self._turns.choose(tasks)
            for task in chosen:
                task.started = True
        begun = [task for task in chosen if task not in self._begun]
        self._begin(begun)
        for task in begun:
            self.metrics.observe("wait_seconds", time.monotonic() - task.begun)
        moved = [task for task in chosen if task in self._begun]
        if moved:
            self._turns.spend(moved, len({id(task.turn) for task in tasks}))
        return moved

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Samples of a request that begin together are one state, so long as they stay so."""
        runs: list[list[Task]] = []
        for task in tasks:
            try:
                divided = self._sampling(task).divided
            except Exception as error:
                self._fail(task, error)
                continue
            last = runs[-1][-1] if runs else None
            follows = last is not None and (id(last.request), last.index + 1)
            if not divided and follows == (id(task.request), task.index):
                runs[-1].append(task)
            else:
                runs.append([task])
        for run in runs:
            sampling = self._sampling(run[0])
            group = _Group(sampling, sampling.context.start(run[0].index, len(run)), run)
            self._begun |= {task: (group, row) for row, task in enumerate(run)}

    def _sampling(self, task: Task) -> Sampling:
        samplings, key = task.turn.samplings, id(task.request)
        if key not in samplings:
            shared = self._source, self._graphs
            samplings[key] = Sampling(self.model, task.request, task.bias, *shared)
        return samplings[key]

    def _groups(self, tasks: Sequence[Task]) -> list[_Group]:
        """A state for the tasks that share one and all move now."""
        rows: dict[_Group, list[int]] = {}
        for task in tasks:
            group, row = self._begun[task]
            rows.setdefault(group, []).append(row)
        return [group.select(sorted(some)) for group, some in rows.items()]

    def _move(self, groups: list[_Group]) -> None:
        """One step of all. If it fails, of each half: what is to blame ends up alone."""
        try:
            moved = advance([group.state for group in groups])
        except Exception as error:
            halves = _halves(groups)
            if not halves:
                self._fail(groups[0].tasks[0], error)
            for half in halves:
                self._move(half)
            return
        for group, (state, event) in zip(groups, moved, strict=True):
            after = replace(group, state=state)
            for row, task in enumerate(group.tasks):
                self._begun[task] = after, row
                self._report(task, event)

    def _report(self, task: Task, event: StepEvent) -> None:
        group, row = self._begun[task]
        sampling, state = group.sampling, group.state
        news = sampling.settles(state) or event.number == 0
        if task.drafts or (task.streams and news):
            task.tell(sampling.frame(state, event, row))
        if state.done:
            tokens, passes = state.tokens[row], state.passes[row]
            self.metrics.count("tokens_total", len(tokens))
            self.metrics.count("passes_total", passes)
            self.metrics.observe("sample_seconds", time.monotonic() - task.begun)
            self._drop(task, "finished", Finished(tokens, passes))

    def _fail(self, task: Task, error: Exception) -> None:
        if not isinstance(error, ValueError):
            log.error("a sample failed", exc_info=error)
        self._drop(task, "failed", as_api_error(error))

    def _drop(self, task: Task, how: str, event: Event | None = None) -> None:
        """It leaves; whoever asked for it is told why."""
        self._begun.pop(task, None)
        with self._wake:
            if task in self._tasks:
                self._tasks.remove(task)
        self.metrics.count("samples_total", how=how)
        if event is not None:
            task.tell(event)
