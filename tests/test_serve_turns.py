"""Turns: a short request overtakes long ones, equal ones stay in order, none is forgotten."""

import threading
import time

import pytest
import torch
from serving import tiny

from psidiff.generate import generate
from psidiff.model import Model
from psidiff.request import build_request
from psidiff.serve.engine import Engine
from psidiff.serve.errors import ApiError
from psidiff.serve.turns import Finished, Task, Turns, cost_of

LONG, SHORT = {"length": 24}, {"length": 16}
ALONE = {"predictor": "confident", "kappa": "ancestral"}  # a sampler that shares no pass


class Counting:
    """A denoiser that counts the tokens it is shown."""

    def __init__(self, denoiser, seconds):
        self.denoiser, self.seconds, self.tokens = denoiser, seconds, 0

    def __call__(self, z, alpha, labels=None):
        self.tokens += z.numel()
        time.sleep(self.seconds)
        return self.denoiser(z, alpha, labels)


def counting(seconds=0.0):
    model = tiny(dtype=torch.float64)
    denoiser = Counting(model.denoiser, seconds)
    return Model(denoiser, model.prior, model.schedule, model.codec, model.config)


def tasks_of(request, tell):
    return [Task(request, i, tell) for i in range(request.num_samples)]


@pytest.mark.parametrize("short", [{}, ALONE], ids=("together", "alone"))
@pytest.mark.parametrize("long", [{}, ALONE], ids=("together", "alone"))
def test_beside_64_long_samples_a_short_request_hardly_waits(long, short):
    model = counting()
    engine = Engine(model, batch=64)
    engine.start()
    try:
        alone = model.denoiser.tokens
        request = build_request(model, 1, 2, seed=1, **SHORT, **short)
        ticks = answered(engine, request)
        alone = model.denoiser.tokens - alone

        for seed in range(4):
            many = build_request(model, 16, 300, seed=seed, **LONG, **long)
            engine.submit(tasks_of(many, lambda event: None))
        after_ticks(engine, 2)
        assert engine.running == 64
        for _ in range(3):
            before = model.denoiser.tokens
            assert answered(engine, request) <= 2 + ticks
            tick = 64 * LONG["length"]
            # a tick may be half done when the count begins: it counts its passes one by one
            assert model.denoiser.tokens - before <= 3 * alone + 3 * tick
        assert engine.running == 64
    finally:
        engine.stop()


def answered(engine, request):
    """How many ticks a request takes."""
    over = threading.Event()
    found = []

    def tell(event):
        assert isinstance(event, Finished), event
        found.append(engine.metrics.value("ticks_total"))
        over.set()

    before = engine.metrics.value("ticks_total")
    engine.submit(tasks_of(request, tell))
    assert over.wait(30)
    return found[0] - before


def after_ticks(engine, count):
    end = engine.metrics.value("ticks_total") + count
    while engine.metrics.value("ticks_total") < end:
        time.sleep(0.001)


def test_a_sample_that_paused_has_the_tokens_it_has_alone():
    model = counting(0.002)
    engine = Engine(model, batch=2)
    long = build_request(model, 2, 30, seed=3, length=20)
    solo = build_request(model, 1, 20, seed=4, length=12, **ALONE)
    short = build_request(model, 2, 3, seed=5, length=8)
    found, over = {}, threading.Semaphore(0)
    engine.start()
    for name, request in (("long", long), ("solo", solo), ("short", short)):

        def tell(event, name=name):
            found.setdefault(name, []).append(event)
            over.release()

        engine.submit(tasks_of(request, tell))
        after_ticks(engine, 2)
    for _ in range(5):
        assert over.acquire(timeout=30)
    engine.stop()
    assert next(iter(found)) == "short"
    for name, request in (("long", long), ("solo", solo), ("short", short)):
        made = generate(model, request).tokens
        got = sorted(event.tokens.tolist() for event in found[name])
        assert got == sorted(made.tolist())


# --- the order by itself, without an engine ---


class Line:
    """Tasks that wait, and how many steps each has left."""

    def __init__(self, places, most=10**9):
        self.turns, self.left = Turns(places, most), {}

    def add(self, request):
        added = tasks_of(request, lambda event: None)
        self.turns.share(added, [False] * len(added))
        self.left |= dict.fromkeys(added, len(request.steps))
        return added

    def tick(self):
        waiting = sorted(self.left, key=lambda task: task.turn.finish)
        moved = self.turns.choose(waiting)
        self.turns.spend(moved, len({task.turn for task in waiting}))
        for task in moved:
            self.left[task] -= 1
            if not self.left[task]:
                del self.left[task]
        return moved


@pytest.fixture(scope="module")
def model():
    return tiny()


def test_equal_requests_are_answered_in_their_order(model):
    line = Line(places=1)
    tasks = [line.add(build_request(model, 1, 5, length=8))[0] for _ in range(3)]
    order = [line.tick()[0] for _ in range(18)]
    assert order == [task for task in tasks for _ in range(6)]


def test_a_flood_of_short_requests_does_not_starve_a_long_one(model):
    line, spent = Line(places=4), 0
    (long,) = line.add(build_request(model, 1, 200, length=24))
    whole = long.turn.cost
    while long in line.left:
        while len(line.left) < 5:  # four short ones are always there
            line.add(build_request(model, 1, 2, length=24))
        spent += cost_of(line.tick())
    assert spent <= 7 * whole  # five equal shares, and its last steps together with others


def test_quick_requests_take_a_sixteenth_of_the_time_from_others(model):
    line, spent = Line(places=64), {True: 0, False: 0}
    line.add(build_request(model, 64, 400, length=24))
    short = build_request(model, 1, 2, length=8)
    for _ in range(300):
        line.add(short)
        moved = line.tick()
        spent[moved[0].turn.quick] += cost_of(moved)
    assert spent[True] <= spent[False] / 16 + 64 * 32 + 500  # and a tick's worth at the start


def test_a_tick_has_a_bound_on_its_tokens_but_for_one_sample(model):
    line = Line(places=8, most=100)
    line.add(build_request(model, 8, 3, length=24))
    assert len(line.tick()) == 3  # of 24 and 8 each
    line = Line(places=8, most=10)
    line.add(build_request(model, 8, 3, length=24))
    assert len(line.tick()) == 1


def test_however_many_have_begun_and_pause_a_short_request_has_its_turn():
    model = counting()
    engine = Engine(model, batch=4, queue=16)
    engine.start()
    try:
        request = build_request(model, 1, 2, seed=1, **SHORT)
        for seed in range(3):  # each overtakes those before, so all of them begin
            many = build_request(model, 4, 4000 - 500 * seed, seed=seed, **LONG)
            engine.submit(tasks_of(many, lambda event: None))
            after_ticks(engine, 2)
        assert len(engine._begun) == 12
        for _ in range(3):
            assert answered(engine, request) <= 6
    finally:
        engine.stop()


def test_long_requests_that_fill_the_queue_make_way_for_shorter_ones():
    model = counting(0.001)
    engine = Engine(model, batch=2, queue=4)
    told = []
    long = build_request(model, 2, 4000, seed=0, **LONG)
    engine.start()
    try:
        for _ in range(3):  # one runs, two wait and fill the queue
            engine.submit(tasks_of(long, told.append))
            after_ticks(engine, 2)
        with pytest.raises(ApiError, match="the queue has 4") as caught:
            engine.submit(tasks_of(long, told.append))  # it would be done last
        assert caught.value.status == 429
        assert answered(engine, build_request(model, 1, 2, seed=1, **SHORT)) <= 8
        assert [(type(each), each.code) for each in told] == [(ApiError, "queue_full")] * 2
        assert engine.metrics.value("samples_total", how="displaced") == 2
        assert engine.running == 2 and engine.waiting == 2  # the others are still there
    finally:
        engine.stop()


def test_equal_plans_are_made_once():
    model = counting()
    first, second = (build_request(model, 1, 50, "cap:.01", seed=i, **SHORT) for i in (1, 2))
    assert first.steps is second.steps
    assert build_request(model, 1, 51, "cap:.01", **SHORT).steps is not first.steps
