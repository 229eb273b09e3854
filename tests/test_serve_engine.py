"""The engine: who joins, who waits, who leaves, and that one bad sample harms no other."""

import queue
import threading
import time

import pytest
import torch
from serving import slow, tiny, tiny_masked

from psidiff.generate import generate
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Transformer
from psidiff.request import build_request
from psidiff.serve.engine import Engine
from psidiff.serve.errors import ApiError
from psidiff.serve.samples import Update
from psidiff.serve.turns import Finished, Task


class Heard:
    """What one sample was told."""

    def __init__(self):
        self.events = queue.Queue()

    def until_over(self, seconds=30):
        frames = []
        while True:
            event = self.events.get(timeout=seconds)
            if not isinstance(event, Update):
                return frames, event
            frames.append(event)


def task_of(request, index=0, bias=(), **options):
    heard = Heard()
    return Task(request, index, heard.events.put, bias, **options), heard


@pytest.fixture
def started():
    """Engines that are stopped when the test is over."""
    engines = []

    def start(model, **options):
        engines.append(Engine(model, **options))
        engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()
        assert not engine.alive


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"predictor": "confident:margin", "kappa": "ancestral"},
        {"corrector": "1x2"},
        {"labels": 1, "guidance": 2.0, "predictor": "markov"},
        {"length": 20, "overlap": 3},
    ],
    ids=lambda o: next(iter(o), "plain"),
)
def test_every_kind_of_request_gets_what_generate_gives_it(started, options):
    model = tiny(length=9, dtype=torch.float64, num_classes=2)
    engine = started(model, batch=3)
    request = build_request(model, 3, 6, seed=4, **options)
    other = build_request(model, 1, 9, "cap:.1", length=5)
    pairs = [task_of(request, i, drafts=True) for i in range(3)]
    engine.submit([*(task for task, _ in pairs), task_of(other)[0]])
    alone = generate(model, request)
    for i, (_, heard) in enumerate(pairs):
        frames, event = heard.until_over()
        assert torch.equal(event.tokens, alone.tokens[i])
        assert torch.equal(frames[-1].tokens, alone.tokens[i])
        steps = len(request.steps) * len(request.starts)
        assert [frame.number for frame in frames] == list(range(steps))


def test_an_autoregressive_network_is_served_left_to_right(started):
    network = (
        Transformer(13, 16, 1, 2, 8, dropout=0.0, causal=True).eval().requires_grad_(False)
    )
    torch.nn.init.normal_(network.output_layer.linear.weight)
    masked = tiny_masked()
    config = {"network": "transformer", "length": 8, "bos_id": 12}
    model = Model(network, None, masked.schedule, masked.codec, ModelConfig.from_dict(config))
    request = build_request(model, 1, seed=2)
    task, heard = task_of(request, streams=True)
    started(model).submit([task])
    frames, event = heard.until_over()
    assert torch.equal(event.tokens, generate(model, request).tokens[0])
    assert [frame.settled for frame in frames] == list(range(1, 9))


def test_a_sample_joins_while_others_are_under_way(started):
    model = slow()
    engine = started(model, batch=2)
    (first, a), (second, b) = (
        task_of(build_request(model, 1, steps, length=4), drafts=True) for steps in (40, 3)
    )
    engine.submit([first])
    a.events.get(timeout=30)
    engine.submit([second])
    frames, event = b.until_over()
    assert isinstance(event, Finished) and len(frames) == 4
    assert engine.running == 1, "the long one is still running"


def test_the_queue_is_bounded_and_takes_all_or_none(started):
    model = slow()
    engine = started(model, batch=1, queue=2)
    request = build_request(model, 1, 200, length=4)
    running, heard = task_of(request, drafts=True)
    engine.submit([running])
    heard.events.get(timeout=30)  # it runs
    engine.submit([task_of(request)[0]])
    for count in (2, 3):
        with pytest.raises(ApiError, match="the queue has 2 places") as caught:
            engine.submit([task_of(request)[0] for _ in range(count)])
        assert caught.value.status == 429 and engine.waiting == 1
    engine.submit([task_of(request)[0]])
    assert engine.waiting == 2


def test_a_cancelled_sample_makes_no_step_after_the_one_that_runs(started):
    for options in ({}, {"predictor": "confident"}):
        model = slow()
        engine = started(model)
        request = build_request(model, 1, 500, "ancestral", length=6, top_k=2, **options)
        task, heard = task_of(request, drafts=True)
        engine.submit([task])
        for _ in range(3):
            heard.events.get(timeout=30)
        task.cancel()
        shown = model.denoiser.shown
        while engine.running:
            time.sleep(0.001)
        time.sleep(0.1)
        assert model.denoiser.shown <= shown + 1
        assert engine.metrics.value("samples_total", how="cancelled") == 1
    assert not [t for t in threading.enumerate() if t.name == "psidiff-solo" and t.is_alive()]


def test_time_runs_out_in_the_queue_and_in_the_engine(started):
    model = slow()
    engine = started(model, batch=1)
    request = build_request(model, 1, 1000, length=4)
    now = time.monotonic()
    (first, a), (second, b) = (
        task_of(request, deadline=now + 0.3, begun=now, drafts=True) for _ in range(2)
    )
    engine.submit([first, second])
    frames, event = a.until_over()
    assert frames and event.status == 408 and "within its 0.3 seconds" in event.message
    frames, event = b.until_over()
    assert not frames and event.status == 408
    assert engine.running == engine.waiting == 0


class Poisoned(torch.nn.Module):
    """NaN for every batch in which a sequence begins with token 7 at level 1."""

    def __init__(self, denoiser):
        super().__init__()
        self.denoiser = denoiser

    def forward(self, z, alpha, labels=None):
        log_x = self.denoiser(z, alpha, labels)
        return log_x * torch.nan if bool((z[:, 0] == 7).any()) else log_x


def test_a_sample_that_fails_leaves_the_others_alone(started):
    good = tiny(length=6)
    model = Model(Poisoned(good.denoiser), good.prior, good.schedule, good.codec, good.config)
    engine = started(model)
    well = build_request(model, 4, 8, "ancestral", infill=torch.tensor([3, *[-1] * 5]))
    bad = build_request(model, 1, 8, "ancestral", infill=torch.tensor([7, *[-1] * 5]))
    tasks = [task_of(well, i) for i in range(4)] + [task_of(bad)]
    engine.submit([task for task, _ in tasks])
    *fine, failed = (heard.until_over()[1] for _, heard in tasks)
    assert all(isinstance(event, Finished) for event in fine)
    assert failed.status == 400 and "NaN" in failed.message
    assert engine.alive


def test_a_bug_is_an_error_of_the_server_and_says_nothing_of_its_inside(started, caplog):
    good = tiny(length=6)

    def broken(z, alpha, labels=None):
        raise KeyError("secret")

    model = Model(broken, good.prior, good.schedule, good.codec, good.config)
    engine = started(model)
    task, heard = task_of(build_request(model, 1, 4))
    engine.submit([task])
    event = heard.until_over()[1]
    assert event.status == 500 and "secret" not in event.message and "secret" in caplog.text
    assert engine.alive and engine.running == 0


def test_stopping_tells_whoever_waits():
    model = slow()
    engine = Engine(model, batch=1)
    engine.start()
    pairs = [task_of(build_request(model, 1, 500, length=4)) for _ in range(2)]
    engine.submit([task for task, _ in pairs])
    time.sleep(0.05)
    engine.stop()
    assert [heard.until_over()[1].status for _, heard in pairs] == [503, 503]
    with pytest.raises(ApiError, match="not running"):
        engine.submit([pairs[0][0]])
