"""Steps of fixed shapes that requests share give the tokens of lazy ones."""

from dataclasses import replace

import pytest
import torch
from serving import LETTERS, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from psidiff.kernels import truncation
from psidiff.process import Masked, Mixed, Uniform, Unigram
from psidiff.request import build_request
from psidiff.sampling import cuda_graph
from psidiff.sampling.cuda_graph import CudaGraphStepper
from psidiff.sampling.filters import SequenceFilters, chain
from psidiff.sampling.state import advance, batch_of
from psidiff.serve.samples import Sampling, shared_graphs, shared_source

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
    """As on a GPU, unrecorded; counts the batches that it makes, and those made again."""

    def __init__(self, model):
        super().__init__(shared_source(model), model.device, True, 12, replay=False)
        self.sizes, work = [], self.run
        self.run = lambda *inputs: self.sizes.append((inputs[1], inputs[2].shape)) or work(*inputs)


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
        for i, (state, event) in zip(running, advance([states[i] for i in running]), strict=True):
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
