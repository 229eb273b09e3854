"""Steps that many requests share: each gets the tokens it would get alone."""

from itertools import pairwise

import pytest
import torch
from serving import LETTERS, tiny
from toys import JOINT, PRIORS

from psidiff.generate import generate
from psidiff.model import Model
from psidiff.process import LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.request import build_request
from psidiff.sampling import parse_predictor
from psidiff.sampling.state import advance
from psidiff.serve.samples import Biased, Sampling, is_batchable, shared_source, windows_of
from psidiff.types import FREE

K = LETTERS.vocab_size
NETWORK_PRIORS = (Uniform(K), Masked(K + 1, K), Mixed(K + 1, K), Unigram(range(1, K + 1)))
GIVEN = torch.tensor([1, -1, -1, 2, -1, -1, -1, 0, -1, -1, -1])
ASKED = (
    (8, "ancestral", {"length": 5}),
    (3, "cap:.2", {"length": 12, "top_p": 0.8}),
    (20, "confidence:.5", {"length": 9, "temperature": 0.7}),
    (6, "rescale:.3", {"length": 30, "overlap": 4}),
    (10, "auto", {"length": 12, "preset": "remdm-cap"}),
    (5, "constant:0@.1-.6", {"length": 7, "labels": 1, "guidance": 2.0}),
    (9, "fb", {"length": 7, "labels": 2, "top_k": 3}),
    (7, "loop:.05", {"infill": GIVEN}),
    (6, "ancestral", {"length": 4, "predictor": "maximal", "last": "greedy"}),
    (6, "dfm", {"length": 6, "min_p": 0.2, "labels": 0, "guidance": 0.0}),
)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def begun(model, requests, bias=()):
    """Each sample as a state by itself; all may share their passes."""
    source = shared_source(model)
    return [
        Sampling(model, request, bias, source).context.start(i, 1)
        for request in requests
        for i in range(request.num_samples)
    ]


def walk(states, at_first):
    """All states to their ends; a few start, and one joins at every step."""
    states, running, waiting = list(states), list(range(at_first)), list(range(len(states)))
    waiting = waiting[at_first:]
    while running:
        moved = advance([states[i] for i in running])
        for i, (state, _) in zip(running, moved, strict=True):
            states[i] = state
        running = [i for i in running if not states[i].done]
        running += [waiting.pop(0)] if waiting else []
    return states


def tokens_of(states):
    return torch.cat([state.tokens for state in states])


@pytest.mark.parametrize("prior", NETWORK_PRIORS, ids=lambda p: type(p).__name__)
def test_a_request_has_the_same_tokens_in_any_company(prior, float64):
    model = tiny(prior=prior, length=12, dtype=torch.float64, num_classes=3)
    requests = [
        build_request(model, 2, steps, kappa, seed=100 + i, **options)
        for i, (steps, kappa, options) in enumerate(ASKED)
    ]
    states = walk(begun(model, requests), at_first=7)
    for i, request in enumerate(requests):
        alone, pair = generate(model, request), states[2 * i : 2 * i + 2]
        assert torch.equal(tokens_of(pair), alone.tokens), ASKED[i]
        assert sum(state.passes[0] for state in pair) / 2 == alone.nfe


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
def test_the_exact_denoiser_of_a_toy_gives_the_same_tokens_too(prior, float64):
    model = Model(JOINT.denoiser(prior), prior, LogLinear())
    words = ("ancestral", "cap:.3", "rescale:.5", "confidence:.5", "constant:.5@.1-.8")
    requests = [
        build_request(model, 8, 3 + 2 * i, kappa, seed=i, length=JOINT.length)
        for i, kappa in enumerate(words)
    ]
    states = walk(begun(model, requests), at_first=12)
    for i, request in enumerate(requests):
        made = tokens_of(states[8 * i : 8 * i + 8])
        assert torch.equal(made, generate(model, request).tokens)


def test_a_bias_on_logits_acts_as_on_the_denoiser(float64):
    model = tiny(length=12, dtype=torch.float64)
    bias = ((2, 4.0), (5, -100.0))
    request = build_request(model, 4, 12, "cap:.1", temperature=0.8, seed=3)
    states = walk(begun(model, [request], bias) + begun(model, [request]), at_first=3)
    wrapped = Model(Biased(model.denoiser, bias), model.prior, model.schedule, model.codec)
    wrapped.config = model.config
    made = tokens_of(states[:4])
    assert torch.equal(made, generate(wrapped, request).tokens)
    assert not bool((made == 5).any()) and float((made == 2).double().mean()) > 0.5
    assert torch.equal(tokens_of(states[4:]), generate(model, request).tokens)


def test_padding_is_cheap_or_not_done():
    source = shared_source(tiny())
    assert source._fitting([16, 16, 12, 8, 4]) == 5
    assert source._fitting([128, 120, 64, 64]) == 2, "64 tokens of padding cost a pass"
    assert source._fitting([256] * 9) == 4, "1024 tokens a pass"
    assert source._fitting([5000]) == 1
    source.max_padding = 0
    assert source._fitting([16, 16, 12, 8]) == 2


def test_what_is_settled_never_changes():
    for prior, kappa in ((Masked(K + 1, K), "ancestral"), (Masked(K + 1, K), "cap:.2")):
        model = tiny(prior=prior, length=10)
        request = build_request(model, 1, 16, kappa, length=24, overlap=4, seed=5)
        sampling = Sampling(model, request, (), shared_source(model))
        state, frames = sampling.context.start(0, 1), []
        while not state.done:
            ((state, event),) = advance([state])
            frames.append((sampling.frame(state, event, 0), sampling.settles(state)))
        settled = [frame.settled for frame, _ in frames]
        assert settled == sorted(settled) and settled[-1] == 24
        assert len(frames) == len(request.steps) * windows_of(request)
        assert [frame.number for frame, _ in frames] == list(range(len(frames)))
        for frame, _ in frames:
            assert torch.equal(frame.tokens[: frame.settled], state.tokens[0, : frame.settled])
            assert not bool((frame.tokens[: frame.settled] == FREE).any())
        growing = [b > a for a, b in pairwise(settled)]
        news = [settles for _, settles in frames[1:]]
        assert all(told for grew, told in zip(growing, news, strict=True) if grew)
        inside = [s for s in settled if 0 < s < 10]
        assert bool(inside) == (kappa == "ancestral"), (
            "masks that stay filled are final at once"
        )


def test_only_samplers_on_x_go_together():
    model = tiny(num_classes=2)
    for options, together in (
        ({}, True),
        ({"predictor": "maximal"}, True),
        ({"labels": 1, "guidance": 2.0}, True),
        ({"predictor": parse_predictor("confident")}, False),
        ({"corrector": "1x2"}, False),
    ):
        request = build_request(model, 1, 4, "ancestral", **options)
        assert is_batchable(model, request) == together
