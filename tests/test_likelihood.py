"""Likelihoods: their exact values on toys, their errors, their units; the zero-shot suite."""

import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from toys import IDS, JOINT, PRIORS, generator

from psidiff.data.tokenizers import Bytes, Characters, Subwords
from psidiff.data.toy import Chain
from psidiff.distributed import Processes
from psidiff.evaluation.exact_distribution import (
    every_state,
    sampler_distribution,
    state_number,
    transition,
)
from psidiff.evaluation.metric_result import UNKNOWN, MetricResult
from psidiff.evaluation.nll import Likelihood, likelihood, stratify, sum_over_tokens
from psidiff.evaluation.psi_nelbo import psi_divergence, psi_nelbo
from psidiff.evaluation.sequence_nll import ScoredSequences
from psidiff.evaluation.zero_shot import SUITE, corpus
from psidiff.process import Cosine, LogLinear, Masked, Uniform, marginal, nelbo
from psidiff.sampling import Constant, parse_kappa, plan
from psidiff.sampling.plan import Step
from psidiff.types import Rows

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
WHOLE = LogLinear(eps=0.0)
SOME = torch.tensor([[0, 0, 0], [2, 1, 0], [1, 2, 2]])


class Sequences:
    """A dataset of given rows."""

    def __init__(self, tokens, labels=None, real=None):
        self.all, self.length = (tokens, labels, real), tokens.shape[1]

    def __len__(self):
        return len(self.all[0])

    def rows(self, indices, generator=None):
        return Rows(*(None if v is None else v[indices] for v in self.all))


def copies(x, count):
    return Sequences(x.expand(count, -1))


def guess(prior, seed=0):
    """A denoiser without context."""
    log_x = torch.randn(prior.vocab_size, generator=generator(seed), dtype=torch.float64)
    if prior.mask_id is not None:
        log_x[prior.mask_id] = -torch.inf
    log_x = log_x.log_softmax(-1)

    def denoiser(z, alpha, labels=None, real=None):
        carried = (prior.probs(like=log_x)[z] == 0)[..., None]
        return torch.where(carried, F.one_hot(z, prior.vocab_size).double().log(), log_x)

    return denoiser


def minus_log_p(x):
    return -JOINT.weights[(JOINT.sequences == x).all(-1)].log().item()


def chance_of(prior, x, alpha):
    """q_t(z | x) of all states z, and these."""
    states = every_state(prior.vocab_size, len(x))
    q = marginal(prior, F.one_hot(x, prior.vocab_size).double()[None], alpha)[0]
    return q[torch.arange(len(x)), states].prod(-1), states


# The continuous bound


@each_prior
def test_the_nelbo_of_the_exact_denoiser_is_minus_log_p_of_every_sequence(prior):
    """In continuous time one token changes at a time, so the reversed process is exact."""
    nodes, weights = np.polynomial.legendre.leggauss(48)
    denoiser, found = JOINT.denoiser(prior), torch.zeros(len(SOME), dtype=torch.float64)
    for u, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        alpha, slope = 1 - u**4, -4 * u**3
        log_x = denoiser(every_state(prior.vocab_size, 3), alpha)
        for i, x in enumerate(SOME):
            q, states = chance_of(prior, x, alpha)
            rate = nelbo(prior, states, x.expand_as(states), log_x, alpha, slope).sum(-1)
            found[i] += weight * torch.where(q > 0, q * rate, 0).sum()
    assert found.tolist() == pytest.approx([minus_log_p(x) for x in SOME], abs=1e-6)


@each_prior
@pytest.mark.parametrize("draws", [1, 3])
def test_the_estimate_is_minus_log_p(prior, draws):
    for x in SOME[1:]:
        data, schedule = copies(x, 1200 // draws), LogLinear()
        found = likelihood(JOINT.denoiser(prior), prior, schedule, data, draws=draws)
        nats = found.nats_per_token
        assert abs(nats.value - minus_log_p(x) / 3) < 4.5 * nats.stderr
        assert nats.stderr < 0.08 and found.tokens == 3600 // draws


@pytest.mark.parametrize("prior", [Masked(7, 6), Uniform(6)], ids=str)
def test_the_interval_covers_the_entropy_of_a_chain(prior):
    """95% of 100 intervals should, 90 at least do; data and noise are drawn anew each time."""
    chain = Chain.random(num_tokens=6, length=8)
    denoiser, exact = chain.denoiser(prior), chain.entropy() / chain.length
    covered = 0
    for seed in range(100):
        data = Sequences(chain.sample(200, generator(seed)))
        nats = likelihood(denoiser, prior, LogLinear(), data, batch_size=200, seed=seed)
        low, high = nats.nats_per_token.interval
        covered += low < exact < high
    assert 90 <= covered < 100


def test_the_error_is_that_of_the_stratified_estimate():
    """Neither as large as without strata, nor too small: it is the spread over seeds."""
    prior, chain = Uniform(4), Chain.random(num_tokens=4, length=12)
    found = []
    for seed in range(60):
        data = Sequences(chain.sample(60, generator(seed)))
        how = {"draws": 2, "batch_size": 60, "seed": seed}
        found.append(likelihood(chain.denoiser(prior), prior, WHOLE, data, **how))
    values = torch.tensor([each.nats_per_token.value for each in found])
    errors = torch.tensor([each.nats_per_token.stderr for each in found])
    assert 0.7 < errors.square().mean().sqrt() / values.std() < 1.4


def test_strata_are_met_once_and_every_row_sees_the_whole_range():
    places = stratify(5, 3, seed=1)
    assert (places * 15).long().flatten().sort().values.tolist() == list(range(15))
    assert (places * 3).long().tolist() == [[0, 1, 2]] * 5
    assert not places.equal(stratify(5, 3, seed=2))


def test_the_released_protocol_is_the_mean_of_the_integrand_over_times_above_a_thousandth():
    prior, schedule, tokens = Uniform(5), Cosine(), torch.randint(5, (5, 4))
    denoiser, asked = guess(prior), []

    def spy(z, alpha, labels=None):
        asked.append((z, alpha))
        return denoiser(z, alpha)

    data = Sequences(tokens)
    found = likelihood(spy, prior, schedule, data, protocol="released", batch_size=2)
    total = 0
    for (z, alpha), x in zip(asked, tokens.split(2), strict=True):
        place = (schedule.time(alpha.double())[:, 0, 0] - 1e-3) / (1 - 1e-3) * len(z)
        assert (place + 1e-4).long().tolist() == list(range(len(z)))
        t = schedule.time(alpha.double())
        total += nelbo(prior, z, x, denoiser(z, alpha), alpha, schedule.dalpha(t)).sum()
    assert found.nats_per_token.value == pytest.approx(total.item() / 20, rel=1e-5)
    assert found.nats_per_token.protocol["batch_size"] == 2


def test_the_released_protocol_leaves_out_what_it_is_known_to():
    """exact = (1 - t_min) released + both ends; for a guess without context all are known."""
    prior, schedule = Uniform(4), LogLinear(eps=0.5)
    denoiser, x = guess(prior), torch.tensor([1, 3, 0, 2])
    log_x = denoiser(x[None], 1.0)[:, :1]
    data, how = copies(x, 4000), {"batch_size": 500}
    exact, released = (
        likelihood(denoiser, prior, schedule, data, protocol=p, **how).nats_per_token
        for p in ("exact", "released")
    )
    one_hot = F.one_hot(x, 4).double()[None]
    ends = []
    for t in (1.0, 1e-3):  # KL(q_t || p_t): what is left of the bound above t
        q, p = (marginal(prior, v, schedule.alpha(t)) for v in (one_hot, log_x.exp()))
        ends.append((q * (q / p).log()).sum().item() / 4)
    integral = ends[1] - ends[0]
    assert abs(exact.value + log_x[0, 0, x].mean()) < 4.5 * exact.stderr
    assert abs(released.value - integral / (1 - 1e-3)) < 4.5 * released.stderr
    assert exact.value - released.value > 4.5 * (exact.stderr + released.stderr)


def test_the_denoiser_is_never_asked_below_the_least_level_it_knows():
    prior, levels = Uniform(5), []

    def spy(z, alpha, labels=None):
        levels.append(alpha)
        return guess(prior)(z, alpha)

    likelihood(spy, prior, LogLinear(eps=0.3), copies(torch.tensor([1, 2]), 50))
    assert torch.cat(levels).min() == pytest.approx(0.3) and torch.cat(levels).max() < 1


@pytest.mark.parametrize("how", [{}, {"draws": 2}, {"sequences": 5}], ids=str)
def test_results_do_not_depend_on_the_batches(how):
    prior, data = PRIORS[1], Sequences(JOINT.sequences[::3])
    denoiser, steps = JOINT.denoiser(prior), plan(3, WHOLE, Constant(0.5))
    for measure in (
        lambda n: likelihood(denoiser, prior, WHOLE, data, batch_size=n, **how).nats_per_token,
        lambda n: psi_nelbo(denoiser, prior, steps, data, batch_size=n, **how),
        lambda n: psi_nelbo(denoiser, prior, steps, data, batch_size=n, steps_drawn=2, **how),
    ):
        ones, some, all_ = (measure(n) for n in (1, 4, 99))
        assert ones.value == pytest.approx(some.value, abs=1e-12)
        assert some.value == pytest.approx(all_.value, abs=1e-12)
        assert some.stderr == pytest.approx(all_.stderr, abs=1e-12)
        assert ones.protocol == all_.protocol


def test_processes_share_the_batches():
    """Half of the mean over two processes is what this one has added up."""

    class OneOfTwo(Processes):
        def mean(self, values):
            return values / 2

    seen = []

    def values(batch):
        seen.append(len(batch.rows))
        return torch.stack((batch.tokens + 10.0 * batch.draws[:, None], 1.0 * batch.tokens))

    source = ScoredSequences([torch.arange(n) for n in (3, 1, 0, 4)])
    how = {"draws": 3, "batch_size": 2}
    whole = sum_over_tokens(source, values, 2, **how)
    assert whole[0, 3].tolist() == [6, 46, 86] and whole[1, :, 0].tolist() == [3, 0, 0, 6]
    seen.clear()
    halves = [sum_over_tokens(source, values, 2, group=OneOfTwo(r, 2), **how) for r in (0, 1)]
    assert torch.equal(sum(halves), whole) and sum(seen) == 9


def test_padding_is_not_counted_and_labels_reach_the_denoiser():
    prior, heard = Uniform(5), []
    tokens, labels = torch.randint(5, (6, 4)), torch.arange(6)
    real = torch.arange(4) < torch.tensor([1, 2, 3, 4, 2, 4])[:, None]

    def spy(z, alpha, labels, real):
        heard.append((labels, real))
        return guess(prior)(z, alpha)

    values = []
    for padding in (0, 3):
        data = Sequences(tokens.masked_fill(~real, padding), labels, real)
        found = likelihood(spy, prior, LogLinear(), data, batch_size=6)
        assert found.tokens == found.nats_per_token.protocol["tokens"] == 16
        values.append(found.nats_per_token.value)
        steps = plan(2, LogLinear(), Constant(1.0))
        values.append(psi_nelbo(spy, prior, steps, data, batch_size=6).value)
    assert values[:2] == pytest.approx(values[2:], abs=1e-12)
    assert all(mask.equal(real[of]) for of, mask in heard)
    assert torch.cat([of for of, _ in heard]).unique().equal(labels)


# Left to right


def test_the_likelihood_of_an_autoregressive_network_is_exact():
    chain = Chain.random(num_tokens=5, length=6)
    table = torch.cat((chain.transition, chain.initial[None])).log()  # bos is number 5
    tokens = chain.sample(40, generator())
    want = -chain.log_prob(tokens) / 6
    found = likelihood(lambda z: table[z], None, WHOLE, Sequences(tokens), bos_id=5, draws=7)
    assert found.nats_per_token.value == pytest.approx(want.mean().item(), rel=1e-6)
    assert found.nats_per_token.stderr == pytest.approx(want.std().item() / 40**0.5, rel=0.5)
    assert found.nats_per_token.protocol["draws"] == 1
    real = torch.arange(6) < 4
    padded = Sequences(tokens, None, real.expand(40, -1))
    shorter = Chain(chain.initial, chain.transition, 4)
    found = likelihood(lambda z: table[z], None, WHOLE, padded, bos_id=5)
    want = -shorter.log_prob(tokens[:, :4]).mean().item() / 4
    assert found.nats_per_token.value == pytest.approx(want, rel=1e-6)


# The bound of a sampler

RULES = ["ancestral", "constant:.5", "constant:0", "cap:.3", "rescale:.4"]


def bayes(prior, z, x, alpha_s, alpha_t, kappa):
    """Psi_{s|t} from its definition: forward kernels and Bayes' rule, no closed form.

    q_{s|t}(s) ~ q_{t|s}(z | s) q_s(s | x), with the kernel alpha_{t|s} 1 + (1 - alpha_{t|s}) pi
    """
    K = prior.vocab_size
    pi = prior.probs(like=x)

    def reverse(level):
        survival = alpha_t / level
        kernel = survival * torch.eye(K, dtype=x.dtype) + (1 - survival) * pi  # s -> z
        joint = kernel.T[z] * (level * x + (1 - level) * pi)
        return joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)

    corrector = alpha_s * reverse(1.0) + (1 - alpha_s) * pi
    return kappa * reverse(alpha_s) + (1 - kappa) * corrector


def bound_by_paths(prior, steps, x):
    """E_q[log q(path | x)/p(path)], a vector over all states moved by matrices over them."""
    law, states = chance_of(prior, x, steps[0].alpha_t)
    start = prior.probs(like=law)[states].prod(-1)
    total = torch.xlogy(law, law).sum() - torch.xlogy(law, start).sum()
    clean = F.one_hot(x, prior.vocab_size).double().expand(len(states), -1, -1)
    for at in steps:
        x_theta = JOINT.denoiser(prior)(states, max(at.alpha_t, 1e-9)).exp()
        levels = (at.alpha_s, at.alpha_t, at.kappa)
        q, p = (transition(bayes(prior, states, v, *levels), states) for v in (clean, x_theta))
        cost = torch.xlogy(q, q) - torch.where(q > 0, torch.xlogy(q, p), 0)
        total += torch.where(law > 0, law * cost.sum(-1), 0).sum()
        law = torch.where(law > 0, law, 0) @ q
    return total.item()


def bound_by_tokens(prior, steps, x):
    """The same from `psi_divergence`, with z_t from q_t."""
    total = 0.0
    for at in steps:
        q, states = chance_of(prior, x, at.alpha_t)
        log_x = JOINT.denoiser(prior)(states, max(at.alpha_t, 1e-9))
        levels = (at.alpha_s, at.alpha_t, at.kappa)
        nats = psi_divergence(prior, states, x.expand_as(states), log_x, *levels).sum(-1)
        total += torch.where(q > 0, q * nats, 0).sum().item()
    return total


@each_prior
@pytest.mark.parametrize("text", RULES)
def test_the_psi_nelbo_is_the_bound_by_enumeration_of_all_paths(prior, text):
    steps = plan(4, WHOLE, parse_kappa(text))
    for x in SOME:
        by_paths = bound_by_paths(prior, steps, x)
        assert bound_by_tokens(prior, steps, x) == pytest.approx(by_paths, abs=1e-9)
        law = sampler_distribution(JOINT, prior, steps)
        assert by_paths > -law[state_number(x[None], prior.vocab_size)].log().item()


@each_prior
@pytest.mark.parametrize("text", ["ancestral", "cap:.3"])
@pytest.mark.parametrize("steps_drawn", [None, 2])
def test_the_estimate_of_the_psi_nelbo_is_its_value(prior, text, steps_drawn):
    steps, x, denoiser = plan(4, WHOLE, parse_kappa(text)), SOME[1], JOINT.denoiser(prior)
    how = {"steps_drawn": steps_drawn, "draws": 2, "batch_size": 100}
    found = psi_nelbo(denoiser, prior, steps, copies(x, 200), **how)
    assert abs(found.value - bound_by_paths(prior, steps, x) / 3) < 4.5 * found.stderr
    assert found.stderr < 0.05
    assert found.protocol["steps"] == 4 and found.protocol.get("steps_drawn") == steps_drawn
    assert None not in found.protocol.values()


@each_prior
def test_the_psi_nelbo_tends_to_the_nelbo_and_its_excess_halves_as_steps_double(prior):
    x = SOME[1]
    plans = [plan(n, WHOLE, Constant(1.0)) for n in (16, 32, 64, 128)]
    excess = [bound_by_tokens(prior, steps, x) - minus_log_p(x) for steps in plans]
    assert all(1.7 < a / b < 2.3 for a, b in itertools.pairwise(excess))


@pytest.mark.parametrize("prior", PRIORS[1:2] + PRIORS[3:], ids=str)
def test_a_plan_that_starts_above_the_prior_pays_for_it(prior):
    steps, x = plan(3, LogLinear(eps=0.3), parse_kappa("cap:.2")), SOME[2]
    found = psi_nelbo(JOINT.denoiser(prior), prior, steps, copies(x, 400), batch_size=100)
    assert abs(found.value - bound_by_paths(prior, steps, x) / 3) < 4.5 * found.stderr
    assert bound_by_paths(prior, steps, x) - bound_by_tokens(prior, steps, x) > 0.1


def test_the_last_step_is_the_reconstruction_term():
    """One step from alpha = .5 to 1: -log p(x | z), with q_{0|t} of x_theta."""
    prior, z, x = Uniform(3), torch.tensor([[1]]), torch.tensor([[2]])
    log_x = torch.tensor([[[0.2, 0.3, 0.5]]], dtype=torch.float64).log()
    nats = psi_divergence(prior, z, x, log_x, 1.0, 0.5, 1.0).item()
    weights = torch.tensor([0.2 / 6, 0.3 * (1 / 2 + 1 / 6), 0.5 / 6])
    assert nats == pytest.approx(-math.log(weights[2] / weights.sum()), rel=1e-6)


# Units and words


def test_units_are_conversions_of_nats():
    protocol = {"seed": 3}
    found = Likelihood(MetricResult("nll", 2.0, 0.1, "nats/token", protocol), tokens=100)
    bits, perplexity, characters = (
        found.bits_per_token,
        found.perplexity,
        found.per(400, "character"),
    )
    assert bits.value == pytest.approx(2 / math.log(2)) and bits.unit == "bits/token"
    assert bits.stderr == pytest.approx(0.1 / math.log(2))
    assert perplexity.value == pytest.approx(math.exp(2))
    assert perplexity.stderr == pytest.approx(0.1 * math.exp(2))
    assert characters.value == pytest.approx(bits.value / 4)
    assert characters.unit == "bits/character"
    assert bits.protocol == perplexity.protocol == characters.protocol == protocol


def test_a_likelihood_says_how_it_was_made():
    prior, told = Uniform(5), []
    data = Sequences(torch.randint(5, (9, 4)))
    found = likelihood(
        guess(prior),
        prior,
        LogLinear(),
        data,
        sequences=7,
        batch_size=3,
        on_batch=lambda done, total: told.append((done, total)),
    )
    assert found.nats_per_token.protocol == {
        "protocol": "exact",
        "sequences": 7,
        "tokens": 28,
        "draws": 1,
        "seed": 0,
        "prior": "Uniform(vocab_size=5)",
        "alpha": "1 - t^3",  # the schedule says only where the denoiser's levels end
        "least_alpha_asked": pytest.approx(0.001),
    }
    assert told == [(3, 7), (6, 7), (7, 7)]
    told.clear()
    how = {"draws": 2, "batch_size": 2, "on_batch": lambda *done: told.append(done)}
    found = likelihood(guess(prior), prior, LogLinear(), data, protocol="released", **how)
    assert found.nats_per_token.protocol["schedule"] == "LogLinear(eps=0.001)"
    assert "alpha" not in found.nats_per_token.protocol
    assert told[:3] == [(2, 18), (4, 18), (6, 18)] and told[-1] == (18, 18)


def test_nobody_knows_the_error_of_one_row_in_any_unit():
    prior, data = Uniform(5), Sequences(torch.randint(5, (1, 4)))
    one = likelihood(guess(prior), prior, LogLinear(), data)
    for found in (one.nats_per_token, one.bits_per_token, one.perplexity):
        assert found.stderr == UNKNOWN and str(found).split(" ± ")[1].startswith("unknown")
        assert found.to_dict()["error"] is None and found.to_dict()["exact"] is False
    assert MetricResult("count", 3.0).to_dict()["exact"] is True
    assert MetricResult("nll", math.nan, 0.1, protocol={"a": [math.inf, 1.0]}).to_dict() == {
        **{"name": "nll", "value": None, "error": 0.1, "unit": ""},
        **{"protocol": {"a": [None, 1.0]}, "exact": False},
    }


WRONG_PLANS = {
    "goes to alpha_s = 1": (Step(1.0, 0.0, 0.5),),
    "with gaps": (Step(1.0, 0.0, 0.5), Step(0.4, 0.6, 1.0)),
    "greedy": plan(2, WHOLE, Constant(1.0), last="greedy"),
    "memory": plan(2, WHOLE, parse_kappa("confidence:.1")),
    "infinite": plan(2, LogLinear(), Constant(1.0)),
}


@pytest.mark.parametrize("words", WRONG_PLANS)
def test_plans_without_a_likelihood_are_told_apart(words):
    prior = PRIORS[0]
    with pytest.raises(ValueError, match=words):
        psi_nelbo(JOINT.denoiser(prior), prior, WRONG_PLANS[words], copies(SOME[0], 2))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"protocol": "new"}, "protocol must be 'exact' or 'released', got 'new'"),
        ({"draws": 0}, "draws must be"),
        ({"sequences": 0}, "sequences must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": -1}, "seed must be"),
        ({"prior": None}, "bos_id is missing"),
    ],
    ids=str,
)
def test_wrong_options_get_a_sentence(how, words):
    prior = Uniform(3)
    options = {"prior": prior, "schedule": WHOLE, "data": copies(SOME[0], 2), **how}
    with pytest.raises(ValueError, match=words):
        likelihood(guess(prior), **options)


# The zero-shot suite

LAMBADA = ["“Yes,” she said . ", "He left"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Small files of the formats in which the corpora come."""
    for name in ("ptb", "wikitext2", "lambada", "ag_news"):
        (tmp_path / name).mkdir()
    (tmp_path / "ptb/ptb.valid.txt").write_text(" the firm 's N cars \n <unk> did n't move \n")
    (tmp_path / "wikitext2/valid.txt").write_text(" \n = Title = \n \n A 1 @,@ 200 m hall . \n")
    lines = (json.dumps({"text": text}) + "\n" for text in LAMBADA)
    (tmp_path / "lambada/lambada_test.jsonl").write_text("".join(lines))
    (tmp_path / "ag_news/test.csv").write_text('"3","Up, up","He said ""no"""\n"1","B","C"\n')
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path))
    return tmp_path


TEXTS = {
    "ptb": "the firm's 1 cars? didn't move",
    "wikitext2": " = Title =\n A 1,200 m hall.\n",
    "lambada": '\n"Yes," she said .\nHe left',
    "ag_news": 'Up, up He said "no"B C',
}


@pytest.mark.parametrize("name", TEXTS)
def test_corpora_are_read_and_detokenized(folder, name):
    assert "".join(SUITE[name].texts()) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_packing_is_deterministic_and_loses_only_an_incomplete_block(folder, name):
    codec = Bytes()
    text = codec.encode(TEXTS[name])
    data = corpus(name, codec, length=5)
    assert len(data) == len(text) // 5 and data.length == 5
    rows = data.rows(torch.arange(len(data))).tokens
    assert rows.flatten().tolist() == text[: len(data) * 5].tolist()
    assert corpus(name, codec, length=5).rows(torch.arange(len(data))).tokens.equal(rows)


def test_framed_blocks_open_and_close(folder):
    codec = Subwords.train_bpe(TEXTS.values(), vocab_size=270)
    rows = corpus("lambada", codec, 6, framed=True).rows(torch.tensor([0, 1])).tokens
    assert rows[:, 0].tolist() == [codec.bos_id] * 2
    assert rows[:, -1].tolist() == [codec.eos_id] * 2
    plain = corpus("lambada", codec, 4).rows(torch.tensor([0, 1])).tokens
    assert rows[:, 1:-1].equal(plain)


def test_unknown_characters_are_an_error_or_dropped(folder):
    codec = Characters("\n -]^abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(ValueError, match="ag_news: the character 'U' is not in the alphabet"):
        corpus("ag_news", codec, 4)
    data = corpus("ag_news", codec, 4, drop_unknown=True)
    text = "".join(codec.decode(row) for row in data.rows(torch.arange(len(data))).tokens)
    assert text == "p up e said no  "[: len(text)]


def test_corpora_of_the_hub_come_from_their_library(monkeypatch):
    asked = []

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        return [{"text": "a ? b", "article": "see ( 1 ) , please"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = {name: "".join(SUITE[name].texts()) for name in ("lm1b", "pubmed", "arxiv")}
    assert found == {"lm1b": "a? b", "pubmed": "see (1), please", "arxiv": "see (1), please"}
    assert asked[0] == ("lm1b", None, "test")
    assert [(config, split) for _, config, split in asked[1:]] == [
        ("pubmed", "validation"),
        ("arxiv", "validation"),
    ]


def test_a_corpus_that_is_not_there_gets_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (folder / "ptb/ptb.valid.txt").unlink()
    (folder / "ag_news/test.csv").write_text('"3","Up"\n')
    cases = {
        "ptb": r"^ptb is not here: put .* \(column sentence\) into .*/ptb, or",
        "arxiv": r"^arxiv is not here: .*column article.* needs: pip install datasets",
        "ag_news": "row 1 of .*ag_news/test.csv must be class, title and text, got 2 columns",
        "wikitext2": "wikitext2: the corpus has 28 tokens, but one block of length 99 needs",
        "ptb3": "'ptb3' is no zero-shot corpus; these are: ptb, wikitext2, lm1b",
    }
    for name, words in cases.items():
        with pytest.raises(ValueError, match=words) as error:
            corpus(name, Bytes(), 99)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="need a model with a codec for text"):
        corpus("wikitext2", None, 4)
