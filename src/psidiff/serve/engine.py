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
from typing import TYPE_CHECKING

from .batch import advance
from .errors import NO_RETRY, ApiError, as_api_error
from .lanes import Lane, goes_together
from .metrics import Metrics
from .passes import Passes
from .solo import Solo
from .task import Event, Finished, Task, Turn
from .turns import Turns

if TYPE_CHECKING:
    from ..model import Model

log = logging.getLogger("psidiff.serve")

_TOKENS = {"cpu": 2**14}  # of a tick, so that it does not last forever
_MANY = 2**18


def _full(why: str) -> ApiError:
    said = f"{why} places: try again in a moment"
    return ApiError(429, said, code="queue_full", headers={"retry-after": "1"})


class Engine:
    """At most `batch` samples make a step together; at most `queue` more wait or pause."""

    def __init__(
        self, model: Model, batch: int = 64, queue: int = 256, metrics: Metrics | None = None
    ) -> None:
        self.model, self.batch, self.queue = model, batch, queue
        self.metrics = metrics or Metrics()
        self._passes = None if model.prior is None else Passes(model)
        self._tasks: list[Task] = []  # in the order of their turns
        self._begun: dict[Task, Lane | Solo] = {}
        self._turns = Turns(batch, _TOKENS.get(model.device.type, _MANY))
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="psidiff-engine", daemon=True)
        self.metrics.gauge("samples_running", lambda: self.running)
        self.metrics.gauge("samples_waiting", lambda: self.waiting)

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
        alone = [not goes_together(self.model, task.request) for task in tasks]
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
                while not (self._tasks or self._stopping):
                    self._wake.wait()
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
        runners = [(task, self._begun[task]) for task in moved]
        lanes = [(task, r) for task, r in runners if isinstance(r, Lane)]
        solos = [(task, r) for task, r in runners if isinstance(r, Solo)]
        self.metrics.count("ticks_total")
        self.metrics.count("sample_steps_total", len(lanes) + len(solos))
        if lanes:
            self._together(lanes)
        for task, solo in solos:
            self._alone(task, solo)

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
        for task in chosen:
            if task not in self._begun:
                try:
                    self._begun[task] = self._begin(task)
                except Exception as error:
                    self._fail(task, error)
                self.metrics.observe("wait_seconds", time.monotonic() - task.begun)
        moved = [task for task in chosen if task in self._begun]
        if moved:
            self._turns.spend(moved, len({id(task.turn) for task in tasks}))
        return moved

    def _begin(self, task: Task) -> Lane | Solo:
        if goes_together(self.model, task.request):
            return Lane(self.model, task.request, task.index, task.shaping)
        return Solo(self.model, task.request, task.index, task.shaping.bias)

    def _together(self, lanes: list[tuple[Task, Lane]]) -> None:
        """One step of all. If it fails, of each half: what is to blame ends up alone."""
        assert self._passes is not None
        try:
            moved = advance(self._passes, [lane for _, lane in lanes])
        except Exception as error:
            if len(lanes) == 1:
                self._fail(lanes[0][0], error)
                return
            middle = len(lanes) // 2
            self._together(lanes[:middle])
            self._together(lanes[middle:])
            return
        for (task, lane), each in zip(lanes, moved, strict=True):
            lane.take(each.z, each.route, each.confidence, each.passes)
            self._report(task, lane)

    def _alone(self, task: Task, solo: Solo) -> None:
        try:
            solo.advance()
        except Exception as error:
            self._fail(task, error)
            return
        self._report(task, solo)

    def _report(self, task: Task, runner: Lane | Solo) -> None:
        over = isinstance(runner, Solo) and runner.done  # its last frame was told before
        news = runner.settles or runner.number == 0
        if not over and (task.drafts or (task.streams and news)):
            task.tell(runner.frame())
        if runner.done:
            self.metrics.count("tokens_total", len(runner.whole))
            self.metrics.count("passes_total", runner.passes)
            self.metrics.observe("sample_seconds", time.monotonic() - task.begun)
            self._drop(task, "finished", Finished(runner.whole, runner.passes))

    def _fail(self, task: Task, error: Exception) -> None:
        if not isinstance(error, ValueError):
            log.error("a sample failed", exc_info=error)
        self._drop(task, "failed", as_api_error(error))

    def _drop(self, task: Task, how: str, event: Event | None = None) -> None:
        """It leaves; whoever asked for it is told why."""
        runner = self._begun.pop(task, None)
        if isinstance(runner, Solo):
            runner.close()
        with self._wake:
            if task in self._tasks:
                self._tasks.remove(task)
        self.metrics.count("samples_total", how=how)
        if event is not None:
            task.tell(event)
