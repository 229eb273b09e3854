"""Steps of fixed shapes that requests share give the tokens of lazy ones."""

import threading
from dataclasses import replace

import pytest
import torch
from serving import LETTERS, tiny

from psidiff.process import Masked, Mixed, Uniform, Unigram
from psidiff.request import build_request
from psidiff.sampling import cuda_graph
from psidiff.sampling.cuda_graph import CudaGraphStepper
from psidiff.sampling.state import advance, batch_of
from psidiff.sampling.step_batch import StepBatch
from psidiff.serve.engine import Engine
from psidiff.serve.samples import Sampling, shared_source
from psidiff.serve.turns import Task

K = LETTERS.vocab_size
PRIORS = (Uniform(K), Masked(K + 1, K), Mixed(K + 1, K), Unigram(range(1, K + 1)))
GIVEN = torch.tensor([1, -1, -1, 2, -1, -1, -1, 0, -1, -1, -1])
BY_GRAPHS = (
    (8, "ancestral", {"length": 5}),
    (3, "cap:.2", {"length": 12, "top_p": 0.8}),
    (6, "rescale:.3", {"length": 30, "overlap": 4, "top_k": 3, "min_p": 0.1}),
    (10, "auto", {"length": 12, "preset": "remdm-cap"}),
    (9, "fb", {"length": 7, "labels": 2, "top_k": 5, "temperature": 0.7}),
    (7, "loop:.05", {"infill": GIVEN, "temperature": 1.3, "top_p": 0.9, "min_p": 0.05}),
    (6, "ancestral", {"length": 4, "predictor": "maximal", "last": "greedy"}),
)
LAZY = (
    (5, "confidence:.5", {"length": 9, "temperature": 0.7}),
    (5, "constant:0@.1-.6", {"length": 7, "labels": 1, "guidance": 2.0}),
    (4, "cap:.1", {"length": 9, "top_p": 0.7, "nucleus": "drop"}),
    (4, "cap:.1", {"length": 9, "processor": torch.positive}),
)


@pytest.fixture(params=(torch.float64, torch.float32), ids=("float64", "float32"))
def dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


class Unrecorded(CudaGraphStepper):
    """As on a GPU, unrecorded; keeps the sizes of the batches that it makes."""

    def __init__(self, model):
        super().__init__(shared_source(model), model.device, True, 12, replay=False)
        self.sizes = []

    def step(self, table, size, z, *rest):
        self.sizes.append((size, z.shape))
        return super().step(table, size, z, *rest)


def begun(model, asked, graphs=None, bias=()):
    """Two samples of each request as states by themselves."""
    source = shared_source(model) if graphs is None else graphs.source
    requests = [
        build_request(model, 2, steps, kappa, seed=100 + i, **options)
        for i, (steps, kappa, options) in enumerate(asked)
    ]
    return [
        Sampling(model, request, bias, source, graphs).context.start(i, 1)
        for request in requests
        for i in range(2)
    ]


def walked(states):
    """All to their ends; one joins at every step. Tokens, and the events of each."""
    states, running, events = list(states), [], [[] for _ in states]
    waiting = list(range(len(states)))
    while running or waiting:
        running = [i for i in running if not states[i].done] + waiting[:1]
        waiting = waiting[1:]
        for i, (state, event) in zip(
            running, advance([states[i] for i in running]), strict=True
        ):
            states[i] = state
            events[i].append(event)
        running = [i for i in running if not states[i].done]
    return [state.tokens for state in states], events


def same(made, want):
    assert all(map(torch.equal, made[0], want[0]))
    for ours, theirs in zip(made[1], want[1], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.z, b.z) and torch.equal(a.route, b.route)


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
def test_a_mixed_batch_has_the_tokens_and_routes_of_lazy_steps(prior, dtype):
    model = tiny(prior=prior, length=12, dtype=dtype, num_classes=3)
    graphs, asked = Unrecorded(model), BY_GRAPHS + LAZY
    same(walked(begun(model, asked, graphs)), walked(begun(model, asked)))
    kinds = [size for size, _ in graphs.sizes]
    assert any(size.ragged and size.most_k and size.top_p and size.min_p for size in kinds)
    shapes = {tuple(shape) for _, shape in graphs.sizes}
    assert {count for count, _ in shapes} <= {1, 2, 4, 8, 16}
    assert {length for _, length in shapes} <= {4, 8, 12}


def test_steps_without_room_are_made_again(monkeypatch):
    model = tiny(length=12, dtype=torch.float64)
    monkeypatch.setattr(cuda_graph, "capacity_for", lambda *_: 2)
    asked = ((8, "cap:.1", {"length": 12}), (6, "ancestral", {"length": 9, "top_p": 0.9}))
    made, want = walked(begun(model, asked, Unrecorded(model))), walked(begun(model, asked))
    same(made, want)
    for ours, theirs in zip(made[1], want[1], strict=True):
        assert len(ours) == len(theirs), "each step is told once"


def test_without_memory_for_graphs_steps_are_lazy_and_it_is_said_once():
    model, said = tiny(length=12, dtype=torch.float64), []
    graphs, calls = Unrecorded(model), []

    def out_of_memory(*inputs):
        calls.append(inputs)
        raise torch.OutOfMemoryError("no")

    graphs.run, graphs.notify = out_of_memory, said.append
    asked = BY_GRAPHS[:2]
    same(walked(begun(model, asked, graphs)), walked(begun(model, asked)))
    assert len(calls) == len(said) == 1 and "no GPU memory is left to record" in said[0]
    graphs.run, graphs.notify = out_of_memory, None
    with pytest.raises(torch.OutOfMemoryError):
        walked(begun(model, asked, graphs))


def test_large_batches_and_lengths_without_padding_are_made_lazily():
    model = tiny(length=12, dtype=torch.float64)
    asked = ((4, "cap:.1", {"length": 12}), (4, "cap:.1", {"length": 5}))
    batch = StepBatch.join([batch_of(state) for state in begun(model, asked)])
    graphs = Unrecorded(model)
    graphs.source.max_tokens = 48
    table, _, z, *_ = graphs.inputs(batch)
    assert len(table) == 4 and z.shape == (4, 12)
    graphs.source.max_tokens = 47
    assert graphs.inputs(batch) is None
    graphs.source.max_tokens = None
    graphs.traits = replace(graphs.traits, padding=False)
    assert graphs.inputs(batch) is None
    alike = StepBatch.join([batch_of(state) for state in begun(model, asked[1:])])
    assert graphs.inputs(alike)[2].shape == (2, 5)


def by_engine(model, graphs):
    """One sample of each request, by an engine: tokens."""
    engine, answers, left = Engine(model), {}, threading.Semaphore(0)
    assert engine._graphs is None, "this is no GPU"
    engine._graphs = graphs
    engine.start()
    for i, (steps, kappa, options) in enumerate(BY_GRAPHS + LAZY):
        request = build_request(model, 1, steps, kappa, seed=i, **options)

        def tell(event, i=i):
            answers[i] = event.tokens
            left.release()

        engine.submit([Task(request, 0, tell)])
    for _ in BY_GRAPHS + LAZY:
        assert left.acquire(timeout=60)
    engine.stop()
    return answers


def test_an_engine_with_graphs_answers_what_one_without_does():
    model = tiny(length=12, dtype=torch.float64, num_classes=3)
    made, want = by_engine(model, Unrecorded(model)), by_engine(model, None)
    assert len(made) == len(want) == len(BY_GRAPHS + LAZY)
    assert all(torch.equal(made[i], want[i]) for i in want)
