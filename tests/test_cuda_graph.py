"""Steps of fixed shapes give the tokens of steps that look at each coin."""

from collections import Counter
from dataclasses import replace

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
    state,
)
from psidiff.sampling.state import SampleLayout
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


def walked(monkeypatch, prior, replayed, **options):
    """`sample` as on a GPU, without recording; or as ever."""
    if replayed:
        monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
        original = cuda_graph.CudaGraphStepper
        monkeypatch.setattr(state, "CudaGraphStepper", lambda *a: original(*a, replay=False))
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
    monkeypatch.setattr(cuda_graph, "_capacity", lambda *_: 3)
    made, _ = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    want, _ = walked(monkeypatch, Uniform(K), False, kappa=Cap(0.05))
    assert torch.equal(made.tokens, want.tokens) and made.head_rows == want.head_rows


def test_who_listens_hears_of_a_step_without_room_once(monkeypatch):
    monkeypatch.setattr(cuda_graph, "_capacity", lambda *_: 3)
    made, seen = walked(monkeypatch, Uniform(K), True, kappa=Cap(0.05))
    want, wanted = walked(monkeypatch, Uniform(K), False, kappa=Cap(0.05))
    assert len(seen) == len(wanted) == 41 and made.head_rows == want.head_rows
    for (z, route), (z_want, route_want) in zip(seen, wanted, strict=True):
        assert torch.equal(z, z_want) and torch.equal(route, route_want)


def test_where_nobody_listens_the_plan_is_walked_again(monkeypatch):
    monkeypatch.setattr(cuda_graph, "_capacity", lambda *_: 3)
    monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
    original = cuda_graph.CudaGraphStepper
    monkeypatch.setattr(state, "CudaGraphStepper", lambda *a: original(*a, replay=False))
    steps, prior = plan(40, LogLinear(), Cap(0.05)), Uniform(K)
    made = sample(denoiser(prior), prior, steps, (5, 12), generator(0), graph=True)
    monkeypatch.undo()
    want = sample(denoiser(prior), prior, steps, (5, 12), generator(0))
    assert torch.equal(made.tokens, want.tokens) and made.head_rows == want.head_rows
    assert made.nfe == want.nfe


def test_a_denoiser_without_numbers_is_named(monkeypatch):
    monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
    original = cuda_graph.CudaGraphStepper
    monkeypatch.setattr(state, "CudaGraphStepper", lambda *a: original(*a, replay=False))
    broken = lambda z, alpha, labels=None: torch.full((*z.shape, K), torch.nan)  # noqa: E731
    steps = plan(30, LogLinear(), Cap(0.05))
    with pytest.raises(ValueError, match="returned NaN"):
        sample(broken, Uniform(K), steps[:-1], (2, 4), generator(0), graph=True)


def test_a_denoiser_without_numbers_is_named_though_a_later_step_has_no_room(monkeypatch):
    monkeypatch.setattr(cuda_graph, "_capacity", lambda *a: 60 if a[-1].t > 0.5 else 1)
    monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
    original, calls = cuda_graph.CudaGraphStepper, []
    monkeypatch.setattr(state, "CudaGraphStepper", lambda *a: original(*a, replay=False))

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
    capacities = []
    original = cuda_graph.CudaGraphStepper

    def noted(*a):
        made = original(*a, replay=False)
        capacities.extend(made.capacities)
        return made

    monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
    monkeypatch.setattr(state, "CudaGraphStepper", noted)
    steps = plan(64, LogLinear(), Constant(1.0), last="greedy")
    sample(denoiser(Uniform(K)), Uniform(K), steps, (40, 100), generator(0), graph=True)
    assert capacities[-1] is None and all(
        64 <= capacity <= 4000 for capacity in capacities[:-1]
    )
    assert (
        capacities[32] <= 512 < capacities[0]
    )  # 244 of 4,000 coins ask at t = 1/2, most at t = 1


def test_steps_too_few_for_a_graph_share_that_of_twice_their_room():
    def shared(**uses):
        capacities = [
            int(capacity[1:]) for capacity, count in uses.items() for _ in range(count)
        ]
        found = cuda_graph.bucket_capacities([None, *capacities])
        assert found[0] is None and all(
            b >= a for a, b in zip(capacities, found[1:], strict=True)
        )
        return dict(sorted(Counter(found[1:]).items()))

    assert shared(_64=30, _128=20, _256=5, _512=40) == {64: 30, 256: 25, 512: 40}
    assert shared(_64=20, _256=20, _512=3) == {
        64: 20,
        256: 20,
        512: 3,
    }  # four times is too much
    assert shared(_64=20, _100=4) == {100: 24}


def test_a_unet_walks_recorded_steps_as_usual_ones(monkeypatch):
    torch.manual_seed(0)
    network = UNet(12, 8, 1, 16, (1, 2), 1, num_classes=None).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    denoiser, steps = Parameterized(network, Uniform(12)), plan(30, LogLinear(), Cap(0.05))
    assert traits(denoiser).recordable
    original = cuda_graph.CudaGraphStepper
    found = {}
    for graph in (False, True):
        if graph:
            monkeypatch.setattr(loop, "use_graphs", lambda *_: True)
            monkeypatch.setattr(
                state, "CudaGraphStepper", lambda *a: original(*a, replay=False)
            )
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


@pytest.mark.parametrize("top_p", (None, 0.8))
@pytest.mark.parametrize("name", PRIORS)
def test_a_step_of_fixed_shapes_never_asks_the_host(name, top_p):
    """On tensors without values, where a question of the host is an error."""
    prior, steps = PRIORS[name], plan(40, LogLinear(), Cap(0.05))
    layout = SampleLayout(5, 12, (3,), 12, torch.device("cpu"))
    chain = Sampler(Constant(1.0), top_p=top_p)
    context = loop.diffusion_context(denoiser(prior), prior, steps, layout, chain)
    begun = replace(context, logits_processor=chain.chain(static=True)).start(0, 5)
    batch = state.batch_of(begun)
    made = cuda_graph.CudaGraphStepper(batch, begun.source, markov, steps, replay=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        names = ("pi", "z", "free", "sample_hash")
        fakes = {name: mode.from_tensor(getattr(batch, name)) for name in names}
        made.batch = batch = replace(batch, **fakes)
        for name in ("table", "num_rows", "wrong"):
            setattr(made, name, mode.from_tensor(getattr(made, name)))
        z, route = made.step(mode.from_tensor(torch.tensor([3])), batch.z, capacity=16)
        assert z.shape == route.shape == (5, 12) and route.dtype == torch.int8
        with pytest.raises(DataDependentOutputException):
            psi_step(batch, begun.source)
