"""Objectives, times, given spans, the curriculum and the average of the weights."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import IDS, JOINT, PRIORS, generator

from psidiff.data.toy import Chain
from psidiff.duality import diffusion_transform, gamma_at
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Masked, Uniform, categorical, to_plain
from psidiff.training import (
    EMA,
    Batch,
    CrossEntropy,
    Curriculum,
    Nelbo,
    NextToken,
    Objective,
    Phase,
    RelaxedNelbo,
    random_spans,
    stratified_times,
)
from psidiff.training.batch import between
from psidiff.types import SoftTokens

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
SCHEDULE = LogLinear(1e-4)
ENTROPY = -(JOINT.weights * JOINT.weights.log()).sum().item()


def data(count, seed=0):
    rows = categorical(JOINT.weights.expand(1, count, -1).contiguous(), generator(seed))[0]
    return JOINT.sequences[rows]


class InGamma:
    """A schedule that walks evenly in gamma, as the curriculum does."""

    def __init__(self, vocab_size, low, high):
        self.vocab_size, self.low, self.width = vocab_size, low, high - low

    def alpha(self, t):
        return diffusion_transform(self.low + self.width * t, self.vocab_size)[0]

    def dalpha(self, t):
        slope = diffusion_transform(self.low + self.width * t, self.vocab_size)[1]
        return slope * self.width

    def time(self, alpha):
        return (gamma_at(alpha, self.vocab_size) - self.low) / self.width


@each_prior
def test_the_exact_denoiser_s_loss_is_the_entropy_of_the_data(prior):
    """The bound is tight in continuous time, up to t < t_min and the prior term."""
    n = 20_000
    times = stratified_times(n, generator(1), t_min=1e-4)
    loss = Nelbo(prior, SCHEDULE)(
        JOINT.denoiser(prior), Batch(data(n), times), generator(2)
    ).sum(-1)
    assert abs(loss.mean() - ENTROPY) < 5 * loss.std() / n**0.5 + 0.01


@each_prior
def test_given_tokens_cost_nothing_and_the_rest_their_conditional_entropy(prior):
    n = 20_000
    x = data(n)
    given = torch.zeros(n, 3, dtype=torch.bool)
    given[:, 0] = True
    times = stratified_times(n, generator(1), t_min=1e-4)
    loss = Nelbo(prior, SCHEDULE)(
        JOINT.denoiser(prior), Batch(x, times, given=given), generator(2)
    )
    assert (loss[:, 0] == 0).all()
    table = JOINT.weights.view(3, 3, 3)
    first = table.sum((1, 2))
    conditional = ENTROPY + (first * first.log()).sum().item()
    total = loss.sum(-1)
    assert abs(total.mean() - conditional) < 5 * total.std() / n**0.5 + 0.01


@each_prior
def test_leave_one_out_and_plain_cross_entropy_agree_on_the_same_knowledge(prior):
    n, exact = 500, JOINT.denoiser(prior)

    def plain(z, alpha, labels=None):
        return to_plain(prior, z, exact(z, alpha), alpha).log_softmax(-1)

    times = stratified_times(n, generator(1))
    one = CrossEntropy(prior, SCHEDULE)(exact, Batch(data(n), times), generator(2))
    two = CrossEntropy(prior, SCHEDULE, "plain")(plain, Batch(data(n), times), generator(2))
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0)  # the level is told in float32
    assert (one >= 0).all()


@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_a_cold_relaxed_loss_is_the_exact_one_at_the_same_levels(top_k):
    """At temperature 0 soft tokens are z_t: the two losses have the same mean."""
    prior, n = Uniform(3), 40_000
    relaxed = RelaxedNelbo(3, top_k, temperature=1e-6)
    exact = JOINT.denoiser(prior)

    def denoiser(z, alpha, labels=None):
        if isinstance(z, SoftTokens):
            assert z.weights.shape[-1] == top_k
            z = z.hard
        elif z.is_floating_point():
            z = z.argmax(-1)
        return exact(z, alpha)

    times = stratified_times(n, generator(1), t_min=0.0)
    soft = relaxed(denoiser, Batch(data(n), times), generator(2)).sum(-1)

    evenly = InGamma(3, *relaxed.gamma_range)
    hard = Nelbo(prior, evenly)(exact, Batch(data(n), times), generator(3)).sum(-1)
    spread = (soft.var() / n + hard.var() / n) ** 0.5
    assert abs(soft.mean() - hard.mean()) < 5 * spread


class Widths(TorchDispatchMode):
    """The sizes of all tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.seen.update(value.shape)
        return result


def test_the_sparse_curriculum_holds_no_tensor_as_wide_as_the_vocabulary():
    K, objective = 4096 + 7, RelaxedNelbo(4096 + 7, top_k=3)
    assert objective.gamma_range[0] < objective.gamma_range[1]
    tokens = torch.randint(K, (2, 5), generator=generator())
    with Widths() as widths:
        soft, z = objective.relax(Batch(tokens, None), torch.tensor([-3.0, -2.0]), generator())
    assert K not in widths.seen and soft.ids.shape == (2, 5, 3) and (z == soft.hard).all()


@pytest.mark.parametrize("top_k", [None, 2])
def test_given_tokens_are_clean_in_the_curriculum_too(top_k):
    objective = RelaxedNelbo(11, top_k, temperature=0.1)
    network = Transformer(11, 32, 1, 4, 16)
    tokens = torch.randint(11, (4, 6), generator=generator())
    given = torch.zeros(4, 6, dtype=torch.bool)
    given[:, :2] = True
    seen = []

    def denoiser(z, alpha, labels=None):
        seen.append((z, alpha))
        return network(z, alpha, labels).log_softmax(-1)

    times = stratified_times(4, generator())
    loss = objective(denoiser, Batch(tokens, times, given=given), generator())
    soft, alpha = seen[0]
    assert (alpha[:, :2] == 1).all() and (alpha[:, 2:] < 1).all() and (loss[:, :2] == 0).all()
    if top_k is None:
        assert (soft[:, :2].argmax(-1) == tokens[:, :2]).all() and (
            soft[:, :2].amax(-1) == 1
        ).all()
    else:
        assert (soft.hard[:, :2] == tokens[:, :2]).all() and (soft.weights[:, :2, 0] == 1).all()
    loss.mean().backward()
    assert network.vocab_embed.embedding.grad.isfinite().all()


def test_next_tokens_cost_what_the_chain_says():
    chain = Chain.random(num_tokens=5, length=6)
    log_first, log_next = chain.initial.log(), chain.transition.log()

    def causal(z, alpha=1.0, labels=None):
        table = torch.cat((log_next, log_first[None]))  # row 5: after the beginning
        return table[z]

    tokens = chain.sample(50, generator())
    loss = NextToken(bos_id=5)(causal, Batch(tokens, torch.zeros(50)))
    torch.testing.assert_close(
        loss.sum(-1).double(), -chain.log_prob(tokens), atol=1e-4, rtol=0
    )


def test_objectives_are_objectives():
    for objective in (
        Nelbo(Uniform(3), SCHEDULE),
        CrossEntropy(Uniform(3), SCHEDULE),
        RelaxedNelbo(3),
        NextToken(0),
    ):
        assert isinstance(objective, Objective)
    with pytest.raises(ValueError, match="'both'"):
        CrossEntropy(Uniform(3), SCHEDULE, "both")


def test_times_are_stratified_over_the_batch_of_all_processes():
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())["antithetic_t"]
    got = between(torch.tensor(golden["inputs"]["u"], dtype=torch.float64), 4, 1e-3)
    torch.testing.assert_close(got, torch.tensor(golden["value"], dtype=torch.float64))
    whole = stratified_times(12, generator(3))
    parts = [stratified_times(4, generator(3), rank, 3) for rank in range(3)]
    assert torch.equal(torch.stack(parts, 1).flatten(), whole)
    strata = ((whole - 1e-3) / (1 - 1e-3) * 12).floor()
    assert strata.tolist() == list(range(12))
    assert all(part.min() < 0.35 and part.max() > 0.65 for part in parts)


def test_random_spans_leave_something_to_learn():
    given = random_spans((2000, 20), 0.5, generator())
    touched = given.any(-1)
    assert 0.3 < touched.double().mean() < 0.55 and not given.all(-1).any()
    edges = given.diff(dim=-1).sum(-1)
    assert (
        edges.max() <= 2
        and (given[:, 0] & ~given[:, -1]).any()
        and not random_spans((50, 4), 0.0, generator()).any()
    )


def test_a_curriculum_says_which_objective_at_which_step():
    soft, exact = RelaxedNelbo(11), Nelbo(Uniform(11), SCHEDULE)
    plain = Curriculum.relaxed(soft, exact, steps=10)
    assert plain.at(0) is soft and plain.at(9) is soft and plain.at(10) is exact
    cooling = Curriculum.relaxed(soft, exact, steps=100, final_temperature=1e-5, stages=3)
    temperatures = [cooling.at(step).temperature for step in (0, 50, 99)]
    assert temperatures == pytest.approx([1e-3, 1e-4, 1e-5])
    assert cooling.at(100) is exact
    for phases in ((), (Phase(exact, 5),), (Phase(exact), Phase(exact))):
        with pytest.raises(ValueError, match="last phase"):
            Curriculum(phases)
    with pytest.raises(ValueError, match=r"rise, got \[5, 5, None\]"):
        Curriculum((Phase(soft, 5), Phase(soft, 5), Phase(exact)))


def test_the_average_warms_up():
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())["ema_warmup"]
    network = torch.nn.Linear(1, 1, bias=False).double()
    network.weight.data.zero_()
    ema = EMA(network)
    network.weight.data.fill_(1)
    values = []
    for _ in range(5):
        ema.update(network)
        values.append(ema.shadow["weight"].item())
    assert values == pytest.approx(golden["value"], abs=1e-12)
    assert network.weight.item() == 1
    with pytest.raises(ValueError, match="decay"):
        EMA(network, decay=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [Masked(4, 3), Uniform(3)], ids=["Masked", "Uniform"])
def test_a_small_network_learns_the_toy(prior):
    """Trained by the exact loss, its bound comes close to the entropy of the data."""
    torch.manual_seed(0)
    denoiser = Parameterized(Transformer(prior.vocab_size, 64, 2, 4, 32, dropout=0.0), prior)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=3e-3)
    objective, g = Nelbo(prior, SCHEDULE), generator(1)
    for step in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 500)
        loss = objective(denoiser, Batch(data(256, seed=step), stratified_times(256, g)), g)
        optimizer.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
    denoiser.eval()
    with torch.no_grad():
        n = 40_000
        times = stratified_times(n, generator(5), t_min=1e-4)
        loss = objective(denoiser, Batch(data(n, seed=10_000), times), generator(6)).sum(-1)
    assert 0.95 < loss.mean() / ENTROPY < 1.08  # it began at 1.31
