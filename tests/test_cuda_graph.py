"""Steps of fixed shapes give the tokens of steps that look at each coin."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from toys import generator

from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.process.posterior import markov
from psidiff.sampling import (
    Cap,
    Confidence,
    Constant,
    Corrector,
    Sampler,
    cuda_graph,
    loop,
    plan,
    sample,
)
from psidiff.sampling.state import SampleLayout, batch_of
from psidiff.sampling.step import psi_step
from psidiff.types import traits

K = 7
PRIORS = {
    "uniform": Uniform(K),
    "masked": Masked(K, 3),
    "mixed": Mixed(K, 3, 0.3),
    "unigram": Unigram((1, 2, 3, 0, 5, 6, 7)),
}
TABLE = torch.randn(K, K, generator=torch.Generator().manual_seed(5)).double()


def denoiser(prior):
    def log_x(z, alpha, labels=None):
        """Each token by its left neighbour and the level."""
        logits = TABLE[z.roll(1, 1)] * (0.5 + torch.as_tensor(alpha).double())
        logits = prior.without_mask(logits).log_softmax(-1)
        carried = (prior.probs(like=logits)[z] == 0)[..., None]
        itself = torch.nn.functional.one_hot(z, K).to(logits).log()
        return torch.where(carried, itself, logits)

    return log_x


def unrecorded(monkeypatch):
    """Steps as on a GPU, without recording."""
    monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
    stepper = partial(cuda_graph.CudaGraphStepper, replay=False)
    monkeypatch.setattr(loop, "CudaGraphStepper", stepper)


def walked(monkeypatch, prior, replayed, **options):
    """`sample` as on a GPU, without recording; or as ever."""
    if replayed:
        unrecorded(monkeypatch)
    steps = plan(40, LogLinear(), options.pop("kappa"), last=options.pop("last", "sample"))
    seen = []
    made = sample(
        denoiser(prior),
        prior,
        steps,
        (5, 12),
        generator(0),
        on_step=lambda i, step, z, route: seen.append((z.clone(), route.clone())),
        graph=replayed,
        **options,
    )
    monkeypatch.undo()
    return made, seen


@pytest.mark.parametrize("predictor", ("markov", "maximal"))
@pytest.mark.parametrize("kappa", (Constant(1.0), Cap(0.05), Constant(0.0, 0.6, 0.05)))
@pytest.mark.parametrize("name", PRIORS)
def test_the_same_tokens_routes_and_rows(monkeypatch, name, kappa, predictor):
    prior = PRIORS[name]
    made, seen = walked(monkeypatch, prior, True, kappa=kappa, predictor=predictor)
    want, wanted = walked(monkeypatch, prior, False, kappa=kappa, predictor=predictor)
    for (z, route), (z_want, route_want) in zip(seen, wanted, strict=True):
        assert torch.equal(z, z_want) and torch.equal(route, route_want)
    assert torch.equal(made.tokens, want.tokens)
    assert made.head_rows == want.head_rows
    assert made.nfe >= want.nfe  # sequences without an active position are passed all the same


@pytest.mark.parametrize("options", ({"top_p": 0.8}, {"temperature": 0.5}, {"last": "greedy"}))
def test_filters_given_tokens_and_greedy_ends(monkeypatch, options):
    given = torch.full((5, 12), -1)
    given[:, ::4] = 2
    options = options | {"kappa": Cap(0.05), "given": given}
    made, _ = walked(monkeypatch, Uniform(K), True, **options)
    want, _ = walked(monkeypatch, Uniform(K), False, **options)
    assert torch.equal(made.tokens, want.tokens) and (made.tokens[:, ::4] == 2).all()


def test_too_many_rows_begin_again_and_give_the_same(monkeypatch):
    monkeypatch.setattr(cuda_graph, "capacity_for", lambda *_: 3)
    made, _ = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    want, _ = walked(monkeypatch, Uniform(K), False, kappa=Cap(0.05))
    assert torch.equal(made.tokens, want.tokens) and made.head_rows == want.head_rows


def test_who_listens_hears_of_a_step_without_room_once(monkeypatch):
    monkeypatch.setattr(cuda_graph, "capacity_for", lambda *_: 3)
    made, seen = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    want, wanted = walked(monkeypatch, Uniform(K), False, kappa=Cap(0.05))
    assert len(seen) == len(wanted) == 41 and made.head_rows == want.head_rows
    for (z, route), (z_want, route_want) in zip(seen, wanted, strict=True):
        assert torch.equal(z, z_want) and torch.equal(route, route_want)


def test_where_nobody_listens_the_plan_is_walked_again(monkeypatch):
    monkeypatch.setattr(cuda_graph, "capacity_for", lambda *_: 3)
    unrecorded(monkeypatch)
    steps, prior = plan(40, LogLinear(), Cap(0.05)), Uniform(K)
    made = sample(denoiser(prior), prior, steps, (5, 12), generator(0), graph=True)
    monkeypatch.undo()
    want = sample(denoiser(prior), prior, steps, (5, 12), generator(0))
    assert torch.equal(made.tokens, want.tokens) and made.head_rows == want.head_rows
    assert made.nfe == want.nfe


def test_a_denoiser_without_numbers_is_named(monkeypatch):
    unrecorded(monkeypatch)
    broken = lambda z, alpha, labels=None: torch.full((*z.shape, K), torch.nan)  # noqa: E731
    steps = plan(30, LogLinear(), Cap(0.05))
    with pytest.raises(ValueError, match="returned NaN"):
        sample(broken, Uniform(K), steps[:-1], (2, 4), generator(0), graph=True)


def test_a_denoiser_without_numbers_is_named_though_a_later_step_has_no_room(monkeypatch):
    monkeypatch.setattr(cuda_graph, "capacity_for", lambda *a: 60 if len(calls) < 20 else 1)
    unrecorded(monkeypatch)
    calls = []

    def broken_once(z, alpha, labels=None):
        calls.append(alpha)
        found = denoiser(Uniform(K))(z, alpha)
        return torch.full_like(found, torch.nan) if len(calls) == 2 else found

    steps = plan(40, LogLinear(), Cap(0.05))
    with pytest.raises(ValueError, match="returned NaN"):
        sample(
            broken_once,
            Uniform(K),
            steps,
            (5, 12),
            generator(0),
            graph=True,
            on_step=lambda *_: None,
        )


def test_room_is_made_for_eight_deviations_and_never_beyond_the_tokens(monkeypatch):
    capacities, original = [], cuda_graph.capacity_for

    def noted(*a):
        capacities.append(original(*a))
        return capacities[-1]

    unrecorded(monkeypatch)
    monkeypatch.setattr(cuda_graph, "capacity_for", noted)
    steps = plan(64, LogLinear(), Constant(1.0), last="greedy")
    sample(denoiser(Uniform(K)), Uniform(K), steps, (40, 100), generator(0), graph=True)
    assert len(capacities) == len(steps) - 1, "the greedy step is made the other way"
    assert all(64 <= capacity <= 4000 for capacity in capacities)
    # 244 of 4,000 coins ask at t = 1/2, most at t = 1
    assert capacities[32] <= 512 < capacities[0]


def test_given_tokens_need_no_room(monkeypatch):
    sizes, original = [], cuda_graph.CudaGraphStepper.inputs
    given = torch.full((40, 100), 2)
    given[:, :10] = -1

    def noted(self, batch):
        found = original(self, batch)
        sizes.append(found[1].capacity)
        return found

    unrecorded(monkeypatch)
    monkeypatch.setattr(cuda_graph.CudaGraphStepper, "inputs", noted)
    steps, options = plan(8, LogLinear(), Constant(1.0)), {"given": given, "graph": True}
    sample(denoiser(Uniform(K)), Uniform(K), steps, (40, 100), generator(0), **options)
    assert max(sizes) <= 1024


def test_a_unet_walks_recorded_steps_as_usual_ones(monkeypatch):
    torch.manual_seed(0)
    network = UNet(12, 8, 1, 16, (1, 2), 1, num_classes=None).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    denoiser, steps = Parameterized(network, Uniform(12)), plan(30, LogLinear(), Cap(0.05))
    assert traits(denoiser).recordable
    found = {}
    for graph in (False, True):
        if graph:
            unrecorded(monkeypatch)
        found[graph] = sample(denoiser, Uniform(12), steps, (3, 64), generator(0), graph=graph)
    assert torch.equal(found[True].tokens, found[False].tokens)
    assert found[True].head_rows == found[False].head_rows < 31 * 3 * 64 / 2


@pytest.mark.parametrize(
    "options, said",
    (
        ({}, "graph=True needs a GPU"),
        ({"predictor": "confident"}, "graph=True needs predictor 'markov' or 'maximal'"),
        ({"predictor": lambda p, a, b: markov(0.9 * p, a, b)}, "needs predictor 'markov'"),
        ({"kappa": Confidence(1.0)}, "graph=True needs no rule that remembers"),
        ({"corrector": Corrector()}, "graph=True needs no corrector"),
        ({"micro_batch": 2}, "graph=True needs no micro_batch"),
        ({"nucleus": "drop", "top_p": 0.9}, "graph=True needs nucleus='keep' and no processor"),
    ),
)
def test_a_graph_that_cannot_be_is_refused_in_a_sentence(options, said):
    options = dict(options)
    steps = plan(30, LogLinear(), options.pop("kappa", Constant(1.0)))
    with pytest.raises(ValueError, match=said):
        sample(denoiser(Uniform(K)), Uniform(K), steps, (2, 4), graph=True, **options)


def test_who_is_not_asked_takes_graphs_where_all_is_there():
    says_so = Parameterized(Transformer(K, 8, 1, 1, 8), Uniform(K))
    silent = denoiser(Uniform(K))
    there, lacking = {"a GPU": True}, {"a GPU": False, "no corrector": True}
    assert loop.use_graphs(None, says_so, there) and loop.use_graphs(True, silent, there)
    assert not loop.use_graphs(None, silent, there) and not loop.use_graphs(
        False, says_so, there
    )
    assert not loop.use_graphs(None, says_so, lacking)
    with pytest.raises(ValueError, match="graph=True needs a GPU"):
        loop.use_graphs(True, says_so, lacking)


def test_rows_in_chunks_are_the_same_rows(monkeypatch):
    want, _ = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    monkeypatch.setattr(cuda_graph, "_CHUNK", 5 * K)
    made, _ = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    assert torch.equal(made.tokens, want.tokens) and made.head_rows == want.head_rows


@pytest.mark.parametrize(
    "options", ({}, {"top_p": 0.8}, {"top_k": 2, "top_p": 0.8, "min_p": 0.1})
)
@pytest.mark.parametrize("name", PRIORS)
def test_a_step_of_fixed_shapes_never_asks_the_host(name, options):
    """On tensors without values, where a question of the host is an error."""
    prior, steps = PRIORS[name], plan(40, LogLinear(), Cap(0.05))
    layout = SampleLayout(5, 12, (3,), 12, torch.device("cpu"))
    sampler = Sampler(Constant(1.0), **options)
    begun = loop.diffusion_context(denoiser(prior), prior, steps, layout, sampler).start(0, 5)
    batch, source = batch_of(begun), begun.source
    made = cuda_graph.CudaGraphStepper(source, layout.device, True, longest=16, replay=False)
    table, size, *tensors = made.inputs(batch)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made.pi = mode.from_tensor(made.pi)
        fakes = [each if each is None else mode.from_tensor(each) for each in tensors]
        z, route, found = made.step(mode.from_tensor(table), size, *fakes)
        assert z.shape == route.shape == (8, 12) and route.dtype == torch.int8
        assert found.shape == (3,)
        names = ("pi", "z", "free", "sample_hash")
        batch = replace(batch, **{n: mode.from_tensor(getattr(batch, n)) for n in names})
        with pytest.raises(DataDependentOutputException):
            psi_step(batch, source)
