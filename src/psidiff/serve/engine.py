"""The engine: one thread that moves every running sample on by one step, again and again.

A sample joins between two steps, whatever the others are at, and leaves when it is done, when
nobody wants it any more, or when its time is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ..request import Request
from .batch import advance
from .errors import NO_RETRY, ApiError, as_api_error
from .lanes import Frame, Lane, goes_together
from .metrics import Metrics
from .passes import Passes
from .shaping import Shaping
from .solo import Solo

if TYPE_CHECKING:
    from ..model import Model

log = logging.getLogger("psidiff.serve")


@dataclass(frozen=True)
class Finished:
    """A sample is done: its tokens (L,), and how often the network saw it."""

    tokens: Tensor
    passes: int


Event = Frame | Finished | ApiError
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
    shaping: Shaping
    tell: Tell
    drafts: bool = False
    streams: bool = False
    deadline: float = float("inf")
    cancelled: bool = False
    begun: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        """Nobody wants it: it makes no step after the one that may be running now."""
        self.cancelled = True


class Engine:
    """At most `batch` samples run; at most `queue` wait."""

    def __init__(
        self, model: Model, batch: int = 64, queue: int = 256, metrics: Metrics | None = None
    ) -> None:
        self.model, self.batch, self.queue = model, batch, queue
        self.metrics = metrics or Metrics()
        self._passes = None if model.prior is None else Passes(model)
        self._waiting: deque[Task] = deque()
        self._running: dict[Task, Lane | Solo] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="psidiff-engine", daemon=True)
        self.metrics.gauge("samples_running", lambda: len(self._running))
        self.metrics.gauge("samples_waiting", lambda: len(self._waiting))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the step that is running; who still waits is told."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        gone = ApiError(503, "the server is going down", code="shutting_down")
        for task in [*self._running, *self._waiting]:
            self._drop(task, "stopped", gone)

    def submit(self, tasks: Sequence[Task]) -> None:
        """All of them, or none where the queue has no place for all."""
        with self._wake:
            if self._stopping or not self.alive:
                raise ApiError(503, "the engine is not running", code="shutting_down")
            if len(self._waiting) + len(tasks) > self.queue:
                raise ApiError(
                    429,
                    f"{len(self._waiting)} samples are waiting, and the queue has "
                    f"{self.queue} places: try again in a moment",
                    code="queue_full",
                    headers={"retry-after": "1"},
                )
            self._waiting.extend(tasks)
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
            try:
                self._tick()
            except Exception:
                log.exception("a step failed")
                for task in list(self._running):
                    self._drop(task, "failed", as_api_error(RuntimeError()))

    def _tick(self) -> None:
        self._prune()
        self._admit()
        if not self._running:
            return
        lanes = [(task, r) for task, r in self._running.items() if isinstance(r, Lane)]
        solos = [(task, r) for task, r in self._running.items() if isinstance(r, Solo)]
        self.metrics.count("ticks_total")
        self.metrics.count("sample_steps_total", len(lanes) + len(solos))
        if lanes:
            self._together(lanes)
        for task, solo in solos:
            self._alone(task, solo)

    def _prune(self) -> None:
        now = time.monotonic()
        with self._wake:
            tasks = [*self._running, *self._waiting]
        for task in tasks:
            if task.cancelled:
                self._drop(task, "cancelled")
            elif now > task.deadline:
                seconds = task.deadline - task.begun
                late = f"the request did not finish within its {seconds:g} seconds"
                error = ApiError(408, late, code="deadline", headers=NO_RETRY)
                self._drop(task, "expired", error)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.batch:
            with self._wake:
                task = self._waiting.popleft()
            try:
                self._running[task] = self._begin(task)
            except Exception as error:
                self._fail(task, error)
            self.metrics.observe("wait_seconds", time.monotonic() - task.begun)

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
        runner = self._running.pop(task, None)
        if isinstance(runner, Solo):
            runner.close()
        with self._wake:
            if task in self._waiting:
                self._waiting.remove(task)
        self.metrics.count("samples_total", how=how)
        if event is not None:
            task.tell(event)
